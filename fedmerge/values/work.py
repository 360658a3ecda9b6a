"""Work that a client does: the contract between those who run it and those who wrote it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from fedmerge.values.arrays import Array

Arrays: TypeAlias = Mapping[str, Array]
JsonObject: TypeAlias = Mapping[str, Any]  # names and what JSON can say


@dataclass(frozen=True)
class Place:
    """Where work is done: it shall use this device, so many threads, and no more time."""

    device: str = "cpu"
    threads: int = 1
    timeout: float | None = None  # seconds after which nobody waits for the result


@dataclass(frozen=True)
class WorkResult:
    """What work gives back."""

    arrays: Arrays
    values: JsonObject


class Work(Protocol):
    """A function that can run anywhere: all it knows, it is given.

    Arrays arrive read-only; the same arguments give the same result on every CPU engine.
    """

    def __call__(self, arrays: Arrays, settings: JsonObject, place: Place) -> WorkResult:
        """Do the work."""
