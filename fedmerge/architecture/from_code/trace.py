"""What is known of the values of a run, and one call of an operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedmerge.architecture.from_code.labels import Axes, Fixed, Labels, Tree
from fedmerge.private_torch import storage_address


@dataclass
class Stacked:
    """Slices along one axis that need not share the labels of their other axes."""

    dim: int
    slices: tuple[Axes, ...]  # the labels of each slice, without the stacked axis


@dataclass
class Value:
    """What is known of one tensor: a label tree per axis."""

    axes: Axes
    stacked: Stacked | None = None
    pins: Axes = ()  # axes to pin once anything reads the tensor (indices of a maximum)
    why: str = ""  # the reason of these pins
    makers: tuple[str, str | None] | None = None  # the weight and bias that just made it


@dataclass(frozen=True)
class FoundNorm:
    """A batch norm that an op showed: names of its tensors, and those of its input's makers."""

    makers: tuple[str, str | None]
    scale: str | None
    shift: str | None
    mean: str
    variance: str
    eps: float


@dataclass(frozen=True)
class Summed:
    """A product of two tensors: the axis that it sums over, and those that are left."""

    over: Tree
    paired: Axes  # of one of both each
    shared: Axes  # of both, element by element

    @property
    def kept(self) -> Axes:
        """All axes of the result."""
        return (*self.paired, *self.shared)

    def resolved(self, labels: Labels) -> Summed:
        """Return the product with everything known put in."""
        resolve = labels.resolve
        paired, shared = (tuple(map(resolve, axes)) for axes in (self.paired, self.shared))
        return Summed(resolve(self.over), paired, shared)


Site: TypeAlias = tuple[int, int]  # the number of an op in its run, and an axis
Uses: TypeAlias = dict[str, Counter[str]]


@dataclass
class Trace:
    """All values of a run. Tensors are kept alive, since their identities are the keys."""

    labels: Labels = field(default_factory=Labels)
    sites: frozenset[Site] = frozenset()  # view results whose slices go own ways
    values: dict[int, Value] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)
    bases: dict[int, Axes] = field(default_factory=dict)  # by storage: its first tensor's axes
    owners: dict[int, tuple[str, Tensor]] = field(default_factory=dict)  # by storage: parameters
    uses: Uses = field(default_factory=dict)  # per parameter: how its axes and it were used
    reads: dict[str, None] = field(default_factory=dict)  # parameters in order of first use
    norms: list[FoundNorm] = field(default_factory=list)
    unknown: dict[str, None] = field(default_factory=dict)  # ops without a rule
    consumed: list[Axes] = field(default_factory=list)  # of parameters, as computations read them
    made: list[Axes] = field(default_factory=list)  # of all values of all runs
    sums: list[Summed] = field(default_factory=list)  # products, of all runs
    steps: int = 0  # ops seen
    split_at: dict[int, Site] = field(default_factory=dict)  # label: (step, axis)
    selected: set[Site] = field(default_factory=set)  # sites found worth a stack

    @contextmanager
    def another_run(self, sites: frozenset[Site]) -> Iterator[None]:
        """Follow a run beside those before: of how tensors are used, the run that does most counts.

        What a run made is forgotten when it has ended, but not what it showed of parameters.
        """
        uses, norms, own = self.uses, self.norms, list(self.kept)
        self.uses, self.norms = {name: Counter() for name in uses}, []
        self.sites, self.steps, self.split_at = sites, 0, {}
        yield
        self.uses = {name: uses[name] | self.uses[name] for name in uses}
        self.norms = [*norms, *(norm for norm in self.norms if norm not in norms)]
        self.kept = own
        self.values = {id(tensor): self.values[id(tensor)] for tensor in own}
        storages = set(map(storage_of, own))
        self.bases = {storage: axes for storage, axes in self.bases.items() if storage in storages}

    def own(self, name: str, tensor: Tensor) -> None:
        """Give a parameter or buffer labels of its own."""
        self.owners[storage_of(tensor)] = (name, tensor)
        self.uses[name] = Counter()
        self.put(tensor, Value(tuple(self.labels.fresh(size) for size in tensor.shape)))

    def put(self, tensor: Tensor, value: Value) -> None:
        """Record what is known of a tensor."""
        assert len(value.axes) == tensor.dim(), f"{len(value.axes)} labels for {tensor.shape}"
        storage = storage_of(tensor)
        if storage not in self.bases:
            value.axes = tuple(map(self.labels.renewed, map(self.labels.resolve, value.axes)))
            self.bases[storage] = value.axes
        self.values[id(tensor)] = value
        self.kept.append(tensor)
        self.made += [value.axes] if value.stacked is None else value.stacked.slices

    def pin_new(self, tensor: Tensor, reason: str) -> None:
        """Record a tensor that nobody may permute."""
        self.put(tensor, Value(tuple(Fixed(size, reason) for size in tensor.shape)))

    def look(self, tensor: Tensor) -> Value:
        """Return what is known of a tensor without reading it."""
        if id(tensor) not in self.values:
            self._adopt(tensor)
        return self.values[id(tensor)]

    def _adopt(self, tensor: Tensor) -> None:
        """Record a tensor that no op made: an alias of a known one, or a constant of the code."""
        storage = storage_of(tensor)
        twins = [t for t in self.kept if storage_of(t) == storage] if tensor.numel() else []
        same = [t for t in twins if _geometry(t) == _geometry(tensor)]
        if same:
            self.values[id(tensor)] = self.values[id(same[-1])]
            self.kept.append(tensor)
            return
        for twin in twins:
            for axis in self.read(twin):
                self.labels.pin(axis, "an alias that no op shows")
        self.pin_new(tensor, "constant")

    def read(self, tensor: Tensor) -> Axes:
        """Return the labels of a tensor that is used as a whole."""
        value = self.look(tensor)
        for axis in value.pins:
            self.labels.pin(axis, value.why)
        if value.stacked is not None:
            self._unstack(value)
        self._count(tensor)
        return value.axes

    def _unstack(self, value: Value) -> None:
        """Tie the slices of a stack, which something reads as a whole."""
        assert value.stacked is not None
        others = value.axes[: value.stacked.dim] + value.axes[value.stacked.dim + 1 :]
        for found in value.stacked.slices:
            for axis, tree in zip(others, found, strict=True):
                self.labels.unify(axis, tree)
        value.stacked = None

    def _count(self, tensor: Tensor) -> None:
        name = self.owner(tensor)
        if name is not None:
            self.reads.setdefault(name)

    def owner(self, tensor: Tensor | None) -> str | None:
        """Return the name of the parameter that a tensor is a view of."""
        if tensor is None or storage_of(tensor) not in self.owners:
            return None
        return self.owners[storage_of(tensor)][0]

    def use(self, tensor: Tensor | None, how: str) -> None:
        """Note how an op uses a parameter: `add`, `scale`, `make`, `look up`."""
        name = self.owner(tensor)
        if name is not None:
            self.uses[name][how] += 1

    def contract(self, tensor: Tensor, axis: int) -> None:
        """Note which axis of a parameter an op sums over; a view is known by its strides."""
        name = self.owner(tensor)
        if name is None:
            return
        _, whole = self.owners[storage_of(tensor)]
        found = [
            k
            for k in range(whole.dim())
            if (whole.shape[k], whole.stride(k)) == (tensor.shape[axis], tensor.stride(axis))
        ]
        self.uses[name]["make"] += 1
        if len(found) == 1:
            self.uses[name][f"in {found[0]}"] += 1

    def consume(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Note which parts of parameters enter a result that is no mere view of them."""
        made = {storage_of(output) for output in outputs}
        for tensor in tensors:
            if storage_of(tensor) in self.owners and (not made or made - {storage_of(tensor)}):
                self.consumed.append(self.look(tensor).axes)

    def write(self, tensor: Tensor, axes: Sequence[Tree] | None) -> None:
        """Record an in-place change to a tensor by a value with the given labels (None: any)."""
        own = self.read(tensor)
        self.look(tensor).makers = None
        if tuple(axis.size for axis in own) != tuple(tensor.shape):  # `out=` was resized
            self.bases.pop(storage_of(tensor), None)
            self.put(tensor, Value(tuple(axes or map(Fixed, tensor.shape))))
            return
        base = self.bases.get(storage_of(tensor))
        if base is not None:
            self.labels.write(base, own)
        for axis, tree in zip(own, axes or (), strict=False):
            self.labels.unify(axis, tree)


def storage_of(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common."""
    return storage_address(tensor) if tensor.layout == torch.strided else id(tensor)


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


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
