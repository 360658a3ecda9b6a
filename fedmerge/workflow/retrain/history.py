"""What the rounds of a run were, as its record and its table tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from fedmerge.types.limits import Count, Number

WHY_MISSING = {  # as records say it → as people do
    "app": "its data or its training failed",
    "lost": "its worker was lost",
    "timeout": "it took too long",
}
Metrics: TypeAlias = Mapping[str, Number | None]  # None: not finite


@dataclass(frozen=True)
class RoundEntry:
    """One round that is over."""

    number: Count
    pass_number: Count
    layer: str
    stage: str
    epochs: Count
    losses: Mapping[str, Number]  # client → mean of its last epoch
    metrics: Metrics | None  # of the global model, where there is one and data
    widths: Mapping[str, Count]  # global, of the groups that are matched
    bytes_up: Count  # that clients must exchange
    bytes_down: Count
    missing: Mapping[str, str]  # client → app, lost or timeout
    moved_up: int = 0  # that the engine moved; depends on retries, so it is not in the record
    moved_down: int = 0
    seconds: float = 0.0

    @property
    def loss(self) -> float | None:
        """The mean loss of the clients that trained."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else None

    def to_record(self) -> dict[str, Any]:
        """Return what depends on inputs and options alone."""
        values = asdict(self)
        for name in ("moved_up", "moved_down", "seconds"):
            del values[name]
        return values
