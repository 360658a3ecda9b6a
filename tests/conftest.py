"""Settings of every test."""

import os
import signal

import pytest
import torch
from hypothesis import settings

from fedmerge.architecture import plan_apart
from fedmerge.merging import FEWEST_STEPS, SPENDING, Spending
from fedmerge.tracebacks import USERS

settings.register_profile("any machine", deadline=None)  # a busy one is no failure
settings.load_profile("any machine")


# Processes that tests start would each take all cores, and spin while they wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
    USERS.clear()


@pytest.fixture(autouse=True)
def graphs_planned_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan graphs of files here: each new process takes seconds to load what torch needs for it."""
    if request.node.get_closest_marker("planned_apart") is None:
        monkeypatch.setattr(plan_apart, "planned_apart", plan_apart.answer_to)


@pytest.fixture(autouse=True)
def short_refinement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refine merges for a moment only: what longer training gives, its own tests ask for."""
    monkeypatch.setitem(SPENDING, "normal", Spending(FEWEST_STEPS, 1e12))
