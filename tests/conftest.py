"""Settings of every test."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Keep tests that run side by side from fighting for the cores."""
    torch.set_num_threads(1)
