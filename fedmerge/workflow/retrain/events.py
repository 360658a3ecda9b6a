"""What happens in a run, told as it happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from fedmerge.engines import Status
from fedmerge.workflow.retrain.history import Metrics


@dataclass(frozen=True)
class RunStarted:
    """The clients and rounds that lie ahead; `resumed` rounds are done already."""

    method: str
    clients: tuple[str, ...]
    rounds: int
    resumed: int


@dataclass(frozen=True)
class RoundStarted:
    """Clients begin to train for a round."""

    round: int
    pass_number: int
    layer: str
    stage: str
    epochs: int


@dataclass(frozen=True)
class ClientStarted:
    """An attempt of a client begins."""

    round: int
    client: str


@dataclass(frozen=True)
class ClientFinished:
    """A client delivered."""

    round: int
    client: str
    loss: float
    samples: int
    seconds: float
    attempt: int
    bytes_up: int  # that the engine moved
    bytes_down: int


@dataclass(frozen=True)
class ClientFailed:
    """An attempt of a client failed; `is_last`: it is left out of the round.

    A client that cannot be placed is left out after fewer attempts, or none.
    """

    round: int
    client: str
    status: Status
    message: str
    attempt: int
    is_last: bool
    details: str = ""  # the traceback of code that failed


@dataclass(frozen=True)
class GroupMatched:
    """A group's units were matched."""

    round: int
    group: str
    width: int
    match_rate: float


@dataclass(frozen=True)
class RoundDone:
    """A round is over and its state is safe."""

    round: int
    rounds: int
    pass_number: int
    layer: str
    loss: float | None  # mean over the clients of their last epoch
    metrics: Metrics | None  # of the global model, where there is one and data
    widths: Mapping[str, int]
    bytes_up: int  # that clients must exchange
    bytes_down: int
    moved_up: int  # that the engine moved
    moved_down: int
    missing: Mapping[str, str]  # client → why
    seconds: float
    seconds_left: float  # estimated


@dataclass(frozen=True)
class RunFinished:
    """All rounds are done."""

    rounds: int
    seconds: float


Event: TypeAlias = (
    RunStarted
    | RoundStarted
    | ClientStarted
    | ClientFinished
    | ClientFailed
    | GroupMatched
    | RoundDone
    | RunFinished
)
HearEvent: TypeAlias = Callable[[Event], None]
_NAMES: Mapping[type[object], str] = {
    RunStarted: "run-started",
    RoundStarted: "round-started",
    ClientStarted: "client-started",
    ClientFinished: "client-finished",
    ClientFailed: "client-failed",
    GroupMatched: "group-matched",
    RoundDone: "round-done",
    RunFinished: "run-finished",
}


def ignore(event: Event) -> None:
    """Tell nobody."""


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as JSON values."""
    return {"event": _NAMES[type(event)], **asdict(event)}
