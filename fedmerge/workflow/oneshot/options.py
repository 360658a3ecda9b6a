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
FEWEST = 10


@dataclass(frozen=True)
class ProbeOptions:
    """Inputs on which clients are compared; None leaves the choice to fedmerge."""

    source: Source | None = None
    data: Path | None = None  # a file of real inputs without labels
    count: int | None = None
    mean: tuple[float, ...] = (0.0,)  # of noise, one number or one per channel
    std: tuple[float, ...] = (1.0,)
    preparation: Preparation | None = None  # of the file's arrays

    def __post_init__(self) -> None:
        if self.source not in (None, "noise", "synthetic", "none"):
            raise UsageError(f"--probe is {self.source!r}, expected noise, synthetic or none")
        if self.data is not None and self.source is not None:
            raise UsageError("--probe-data and --probe exclude each other")
        if self.count is not None and self.count < FEWEST:
            raise UsageError(f"--probe-count is {self.count}, expected at least {FEWEST}")
        if any(deviation <= 0 for deviation in self.std):
            raise UsageError("--probe-std has to be above 0")

    @property
    def is_asked_for(self) -> bool:
        """Whether the user said anything about probes that needs a model which can be run."""
        return self.data is not None or self.source in ("noise", "synthetic")

    def to_json(self) -> dict[str, Any]:
        """Return the options as the merge record keeps them, files without their folders."""
        prepared = None if self.preparation is None else vars(self.preparation)
        file = None if self.data is None else self.data.name
        return {**vars(self), "data": file, "preparation": prepared}
