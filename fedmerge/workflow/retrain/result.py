"""The global model that retraining gave, with the history of its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedmerge.types.arrays import Array
from fedmerge.types.work import Arrays
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.retrain.history import RoundEntry
from fedmerge.workflow.retrain.inputs import ShardEntry
from fedmerge.workflow.retrain.options import RetrainOptions


@dataclass(frozen=True, kw_only=True)
class Retrained(Merge):
    """A merge whose global tensors were trained, not computed from the clients' files."""

    arrays: Arrays  # every tensor of the global model under the clients' names
    retraining: RetrainOptions
    shards: Sequence[ShardEntry]
    rounds: tuple[RoundEntry, ...]
    continued: str | None  # SHA-256 of the merged file that the clients were cut out of

    def read(self, name: str) -> Array:
        """Return one global tensor."""
        return self.arrays[self.aligned[0].aliases.get(name, name)]

    @property
    def missing(self) -> Mapping[int, Mapping[str, str]]:
        """Who was left out of which round, and why."""
        return {entry.number: entry.missing for entry in self.rounds if entry.missing}

    def summary(self) -> dict[str, Any]:
        """Return what a script wants to know of the run."""
        return {
            **super().summary(),
            "method": self.retraining.method,
            "rounds": [asdict(entry) for entry in self.rounds],
            "bytes_up": sum(entry.bytes_up for entry in self.rounds),
            "bytes_down": sum(entry.bytes_down for entry in self.rounds),
            "missing": {str(number): dict(names) for number, names in self.missing.items()},
        }

    def record(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Return the merge record, with what was trained on what in which rounds."""
        retraining = {
            "options": self.retraining.to_json(),
            "continued_from": self.continued,
            "shards": [entry.to_json() for entry in self.shards],
            "rounds": [entry.to_record() for entry in self.rounds],
        }
        return {**super().record(digests), "retrain": retraining}
