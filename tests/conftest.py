"""Settings of every test."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a busy one is no failure
settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Keep tests that run side by side from fighting for the cores."""
    torch.set_num_threads(1)
