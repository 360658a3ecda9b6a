"""Settings of every test."""

import signal

import pytest
import torch
from hypothesis import settings

from fedmerge.tracebacks import forget_users

settings.register_profile("any machine", deadline=None)  # a busy one is no failure
settings.load_profile("any machine")


def pytest_configure() -> None:
    """Let Ctrl-C through where a shell started the tests in the background, deaf to it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Keep tests that run side by side from fighting for the cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_of_the_users() -> None:
    """Let no test's code count as the user's because an earlier one loaded something beside it."""
    forget_users()
