"""Events of a run: what whoever listens to `retrain` hears."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

from fedmerge.engines import Outcome, Status
from fedmerge.errors import TrainingCodeError, UsageError
from fedmerge.federated.federation import Round
from fedmerge.merging.record_schema import Metrics, RoundEntry
from fedmerge.user_code import find_object, user_code


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


class Logger(Protocol):
    """What `logger` names: the user's own, or TensorBoard's."""

    def log(self, event: Mapping[str, Any]) -> None:
        """Take an event as JSON values; its kind is under `event`."""

    def close(self) -> None:
        """End: the run is over."""


class TensorBoard:
    """Writes losses, metrics and bytes for TensorBoard, in its folder `runs`."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "tensorboard is not installed, which `logger=tensorboard` writes with",
                "pip install tensorboard",
            ) from None
        self._writer: Any = SummaryWriter()

    def log(self, event: Mapping[str, Any]) -> None:
        """Write the numbers of a client or a round."""
        for name, value in numbers_of(event).items():
            self._writer.add_scalar(name, value, event["round"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def numbers_of(event: Mapping[str, Any]) -> dict[str, float]:
    """Return what of an event is drawn over rounds: a client's loss, a round's numbers.

    >>> numbers_of({"event": "client-finished", "round": 2, "client": "a", "loss": 0.5})
    {'loss/a': 0.5}
    """
    if event["event"] == "client-finished":
        return {f"loss/{event['client']}": event["loss"]}
    if event["event"] != "round-done":
        return {}
    found = {"loss": event["loss"], **(event["metrics"] or {})}
    found |= {name: event[name] for name in ("bytes_up", "bytes_down")}
    return {f"global/{name}": value for name, value in found.items() if value is not None}


LOGGERS: Mapping[str, Callable[[], Logger]] = {"tensorboard": TensorBoard}


@contextmanager
def logging(name: str | None) -> Iterator[HearEvent]:
    """Let the user's own logger, or one of the table, hear of a run."""
    if name is None:
        yield ignore
        return
    what = f"the logger '{name}' fails"
    made: Any = LOGGERS.get(name) or find_object(name, what="logger")
    with user_code(what, error=TrainingCodeError):
        logger: Logger = made() if callable(made) else made

    def hear(event: Event) -> None:
        with user_code(what, error=TrainingCodeError):
            logger.log(event_to_json(event))

    try:
        yield hear
    finally:
        with user_code(what, error=TrainingCodeError):
            logger.close()


def told_to(*listeners: HearEvent) -> HearEvent:
    """Return what tells an event to all listeners in turn."""

    def hear(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return hear


def ignore(event: Event) -> None:
    """Tell nobody."""


def event_to_json(event: Event) -> dict[str, Any]:
    """Return an event as JSON values."""
    return {"event": _NAMES[type(event)], **asdict(event)}


def round_started(current: Round) -> RoundStarted:
    """Return the event that a round begins."""
    return RoundStarted(
        current.number, current.pass_number, current.layer.label, current.stage, current.epochs
    )


def client_failed(outcome: Outcome, current: Round, *, is_last: bool) -> ClientFailed:
    """Return the event that an attempt of a client failed."""
    return ClientFailed(
        current.number,
        outcome.client,
        outcome.status,
        outcome.message,
        outcome.attempts,
        is_last,
        outcome.details,
    )


def round_done(entry: RoundEntry, rounds: int, seconds_left: float) -> RoundDone:
    """Return the event that a round is over, from what the record says of it."""
    return RoundDone(
        round=entry.number,
        rounds=rounds,
        pass_number=entry.pass_number,
        layer=entry.layer,
        loss=entry.loss,
        metrics=entry.metrics,
        widths=entry.widths,
        bytes_up=entry.bytes_up,
        bytes_down=entry.bytes_down,
        moved_up=entry.moved_up,
        moved_down=entry.moved_down,
        missing=entry.missing,
        seconds=entry.seconds,
        seconds_left=round(seconds_left, 1),
    )
