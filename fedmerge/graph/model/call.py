"""One op at work: its arguments by name, the labels of its tensors, its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from fedmerge.graph.model.labels import Labels
from fedmerge.graph.model.trace import Trace, Value
from fedmerge.graph.model.trees import Axes, Fixed, Tree

Result: TypeAlias = "Axes | Value | list[Axes | Value] | None"
Rule: TypeAlias = "Callable[[Call], Result]"


@dataclass(frozen=True)
class Call:
    """An op's arguments by their schema's names, and the tensors that it returned."""

    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[Tensor, ...]
    trace: Trace

    def __getitem__(self, argument: str) -> Any:
        return self.arguments.get(argument)

    @property
    def labels(self) -> Labels:
        """The run's labels."""
        return self.trace.labels

    @property
    def first(self) -> Tensor:
        """The first argument, if it is a tensor."""
        tensor = next(iter(self.arguments.values()))
        assert isinstance(tensor, Tensor)
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return tuple(self.outputs[0].shape)

    def tensor(self, argument: str) -> Tensor | None:
        """Return an argument that is a tensor or absent."""
        value = self.arguments.get(argument)
        return value if isinstance(value, Tensor) else None

    def axes(self, argument: str | None = None) -> Axes:
        """Return the labels of a tensor argument (default: the first), read as a whole."""
        return self.trace.read(self.first if argument is None else self.arguments[argument])

    def tensors(self) -> list[Tensor]:
        """Return all tensor arguments, those in lists too."""
        return [t for value in self.arguments.values() for t in tensors_in(value)]

    def dim(self, argument: str = "dim", default: int = -1) -> int:
        """Return an axis argument, counted from the front."""
        dim = self.arguments.get(argument, default)
        return int(dim) % max(1, self.first.dim())

    def dims(self, argument: str = "dim") -> list[int]:
        """Return a list of axes, counted from the front; absent or empty means all."""
        value = self.arguments.get(argument)
        count = self.first.dim()
        if value is None or value == []:
            return list(range(count))
        found: Sequence[int] = [value] if isinstance(value, int) else value
        return [dim % max(1, count) for dim in found]

    def broadcast(self, operands: Sequence[tuple[Axes, Sequence[int]]]) -> Axes:
        """Unify aligned axes of operands (labels, shape) and return the result's labels."""
        rank = max(len(shape) for _, shape in operands)
        result: list[Tree] = []
        for back in range(rank, 0, -1):
            present = [axes[-back] for axes, shape in operands if len(shape) >= back]
            wide = [tree for tree in present if tree.size != 1]
            result.append(self.labels.merge(wide) if wide else Fixed(1))
        return tuple(result)


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in an argument or result: a tensor, or lists of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
