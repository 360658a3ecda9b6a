"""What goes into an engine and what comes out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from fedmerge.types.work import Arrays, JsonObject, array_bytes

Status: TypeAlias = Literal["ok", "app", "lost", "timeout"]


@dataclass(frozen=True)
class Task:
    """One client's work for one step; it holds all that the work needs, so it can be run again."""

    id: str
    client: str
    function: str  # a `Work` as "package.module:name"
    arrays: Arrays = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        json.dumps(self.settings)  # every engine refuses what one of them cannot send
        assert not any(array.dtype.hasobject for array in self.arrays.values())

    @property
    def nbytes(self) -> int:
        """The bytes of numbers sent to the client."""
        return array_bytes(self.arrays)


@dataclass(frozen=True)
class Outcome:
    """How a task ended: done, or its code failed (`app`), its process died, it took too long.

    Arrays and values are empty unless it is done (`ok`).
    """

    task: str  # its id
    client: str
    status: Status
    arrays: Arrays = field(default_factory=dict)
    values: JsonObject = field(default_factory=dict)
    message: str = ""  # one line: what went wrong
    hint: str = ""  # what to do about it, where that is known
    details: str = ""  # the traceback of code that failed
    is_defect: bool = False  # whether that code is fedmerge's own
    seconds: float = 0.0
    attempts: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of numbers sent back by the client."""
        return array_bytes(self.arrays)


@dataclass(frozen=True)
class ClientInfo:
    """A client whose tasks can be run now, and where."""

    name: str
    where: str


class Engine(Protocol):
    """Runs the tasks of clients; one `run` at a time."""

    def clients(self) -> Sequence[ClientInfo]:
        """Return the clients that can be placed now, in the order in which to start them."""

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield exactly one outcome per task, in the order in which they end.

        A client's failure is an outcome, never an exception. Tasks are taken from the iterable
        only when they can start. `timeout`: seconds that a task's function may take.
        """

    def close(self) -> None:
        """End everything that the engine started; closing twice does no harm."""
