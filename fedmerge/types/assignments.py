"""Which client unit became which global unit."""

from dataclasses import dataclass

from fedmerge.types.arrays import IntArray


@dataclass(frozen=True)
class Assignment:
    """Injective map from one client's units of one group to global units."""

    indices: IntArray  # (units,), the global unit of each client unit
    width: int  # global units of the group

    def __post_init__(self) -> None:
        assert self.indices.ndim == 1
        assert len(set(self.indices.tolist())) == len(self.indices), "not injective"
        assert len(self.indices) == 0 or 0 <= self.indices.min() <= self.indices.max() < self.width
