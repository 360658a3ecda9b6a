"""What the user may say about probes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fedmerge.errors import UsageError

if TYPE_CHECKING:
    from fedmerge.training import Preparation

Source: TypeAlias = Literal["noise", "synthetic", "none"]

DEFAULT_COUNT = 1000
FEWEST, MOST = 10, 100_000  # probes; all are made at once
LARGEST = 1e6  # of noise: squares of what nets make of it are finite
_STANDARD = ((0.0,), (1.0,))  # mean and deviation of noise


@dataclass(frozen=True)
class ProbeOptions:
    """Inputs on which clients are compared; None leaves the choice to fedmerge."""

    source: Source | None = None
    data: str | Path | None = None  # a file of real inputs without labels
    count: int | None = None
    mean: tuple[float, ...] = _STANDARD[0]  # of noise, one number or one per channel
    std: tuple[float, ...] = _STANDARD[1]
    preparation: Preparation | None = None  # of the file's arrays

    def __post_init__(self) -> None:
        if self.source not in (None, "noise", "synthetic", "none"):
            raise UsageError(f"--probe is {self.source!r}, expected noise, synthetic or none")
        if self.data is not None and self.source is not None:
            raise UsageError("--probe-data and --probe exclude each other")
        if self.data is not None and (self.mean, self.std) != _STANDARD:
            raise UsageError("--probe-mean and --probe-std are for noise, not for --probe-data")
        if self.count is not None and not FEWEST <= self.count <= MOST:
            raise UsageError(f"--probe-count is {self.count}, expected {FEWEST} to {MOST:,}")
        if not all(abs(value) <= LARGEST for value in (*self.mean, *self.std)):  # nor NaN
            raise UsageError(
                f"--probe-mean and --probe-std have to be finite, at most {LARGEST:,.0f}"
            )
        if any(deviation <= 0 for deviation in self.std):
            raise UsageError("--probe-std has to be above 0")
        if self.source == "none" and self.asked_for:
            raise UsageError("--probe none takes no other options of probes")

    @property
    def asked_for(self) -> tuple[str, ...]:
        """What the user said, as the command line calls it, that needs a model which can be run."""
        said = {
            "--probe": self.source in ("noise", "synthetic"),
            "--probe-data": self.data is not None,
            "--probe-count": self.count is not None,
            "--probe-mean": self.mean != _STANDARD[0],
            "--probe-std": self.std != _STANDARD[1],
        }
        return tuple(name for name, is_said in said.items() if is_said)

    def to_json(self) -> dict[str, Any]:
        """Return the options as the merge record keeps them, files without their folders."""
        prepared = None if self.preparation is None else vars(self.preparation)
        file = None if self.data is None else Path(self.data).name
        return {**vars(self), "data": file, "preparation": prepared}
