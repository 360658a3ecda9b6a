"""What running a stranger's graph may cost: every op is tried without numbers before it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedmerge.private_torch import (
    CostMode,
    Op,
    base_name,
    leaves,
    load_compiler,
    map_tensors,
    packet_of,
    schema_of,
    unseen,
    without_modes,
)

MOST_STEPS = 50_000  # ops of one run: those of loops each time, those that ops are made of
MOST_SECONDS = 5.0  # of CPU time of the thread that runs it: others work meanwhile
WEIGHTS_PER_SECOND = 500_000  # besides: a file of more weights may take longer
OPS_PER_SECOND = 400  # besides, as far as it has no more ops than MOST_OPS
MOST_OPS = 2_000
MOST_HELD = 40_000_000  # bytes held at once, besides four times those of the weights as doubles
MOST_MADE = 80_000_000  # bytes made in one run, besides eight times those; a plan holds them all
MOST_PARTS = 10_000  # tensors in a list that an op takes or gives
MOST_AXES = 64
_DOUBLE = 8  # bytes
_FLOPS_PER_SECOND = 5e9
_NUMBERS_PER_SECOND = 2e8  # that are read or written besides products
_BOUNDED = frozenset({  # no larger than what they are given, though their size is not foreseeable
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "unique_consecutive", "unique_dim",
})  # fmt: skip


class BudgetError(ValueError):
    """A graph that would cost more than any checkpoint's should."""


@dataclass
class Budget:
    """What is left of steps, time and room for runs of a graph."""

    weights: int  # numbers that the graph has of its own
    ops: int  # that stand in the graph
    started: float  # of CPU time
    known: dict[Hashable, _Cost] = field(default_factory=dict)  # of ops that ran before
    steps: int = 0
    held: int = 0  # bytes
    made: int = 0  # bytes

    @staticmethod
    def beside(weights: int, ops: int = 0) -> Budget:
        """Return the budget of a graph of so many numbers of its own, and ops."""
        load_compiler()  # no cost of the graph's, though its first op would pay for it
        return Budget(weights, ops, time.thread_time())

    def again(self, *, started: float | None = None) -> Budget:
        """Return the budget of a further run, whose time counts together with that of the first.

        Unless it is said when it `started`.
        """
        return Budget(self.weights, self.ops, started or self.started, self.known)

    def foresee(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse an op that would take too long or make too much; its numbers stay unknown."""
        self._step()
        if not isinstance(op, Op):
            return
        key = (op, _signature(args), _signature(list(kwargs.items())))
        if key not in self.known:
            _check_lists(op, args, kwargs)
            self.known[key] = _cost(op, args, kwargs, self._step)
        else:
            self._step(self.known[key].steps)
        cost = self.known[key]
        seconds = cost.flops / _FLOPS_PER_SECOND + cost.numbers / _NUMBERS_PER_SECOND
        if seconds > self._seconds_left():
            raise self._too_slow()
        if self.held + cost.made > MOST_HELD + 4 * _DOUBLE * self.weights:
            raise BudgetError(f"it holds more than {MOST_HELD:,} bytes at once")

    def hold(self, size: int) -> None:
        """Take note of the bytes of a value that is kept."""
        self.held += size
        self.made += size
        if self.made > MOST_MADE + 8 * _DOUBLE * self.weights:
            raise BudgetError(f"it makes more than {MOST_MADE:,} bytes")

    def release(self, size: int) -> None:
        """Take note of the bytes of a value that is no longer needed."""
        self.held -= size

    def _step(self, count: int = 1) -> None:
        self.steps += count
        if self.steps > MOST_STEPS:
            raise BudgetError(f"it runs more than {MOST_STEPS:,} ops")
        if self._seconds_left() < 0:
            raise self._too_slow()

    def _seconds_left(self) -> float:
        return self._seconds() - (time.thread_time() - self.started)

    def _seconds(self) -> float:
        own = self.weights / WEIGHTS_PER_SECOND + min(self.ops, MOST_OPS) / OPS_PER_SECOND
        return MOST_SECONDS + own

    def _too_slow(self) -> BudgetError:
        return BudgetError(f"it takes more than {self._seconds():.0f} seconds of CPU time")


class _Cost(CostMode):  # type: ignore[no-untyped-call]
    """Adds up what the ops that an op is made of cost."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.numbers = 0  # that are read or written
        self.made = 0  # bytes of new memory, at most
        self.steps = 0
        self._step = step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an op that has no numbers, and take note of what it would take."""
        kwargs = kwargs or {}
        self._step()
        self.steps += 1
        result = func(*args, **kwargs)
        made = _tensors(result)
        if max((tensor.dim() for tensor in made), default=0) > MOST_AXES:
            raise BudgetError(f"'{func}' makes more than {MOST_AXES} axes")
        if not func.is_view:
            given = _tensors((args, kwargs))
            look: Callable[..., int] = _WINDOWS.get(base_name(func), _no_window)
            self.numbers += sum(t.numel() for t in given)
            self.numbers += look(*args) * sum(t.numel() for t in made)
            self.made += sum(t.numel() * t.itemsize for t in made)
            self._count_products(func, args, kwargs, result)
        return result

    def _count_products(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        from torch.utils.flop_counter import flop_registry  # few files need it

        if packet_of(func) not in flop_registry:
            return
        flops = int(flop_registry[packet_of(func)](*args, **kwargs, out_val=result))
        dtype = _tensors(args)[0].dtype
        self.flops += flops if dtype in (torch.float32, torch.float64) else 20 * flops
        if "conv" in base_name(func) and dtype != torch.float32:
            # Torch lays out a window for every place before it multiplies.
            self.made += flops // (2 * max(1, args[1].shape[0])) * dtype.itemsize


def _cost(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], step: Callable[[], None]
) -> _Cost:
    """Return what an op on tensors of these shapes costs."""
    # Whoever follows the run must not see this.
    with unseen(), without_modes():
        cost = _Cost(step)
        try:
            bare, named = map_tensors(_without_numbers, (tuple(args), dict(kwargs)))
            with torch.no_grad(), cost:
                op(*bare, **named)
        except (NotImplementedError, RuntimeError) as error:
            if base_name(op).rstrip("_") not in _BOUNDED:
                raise BudgetError(f"the size of what '{op}' makes can't be foreseen") from error
    return cost


def _without_numbers(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _signature(values: Sequence[Any]) -> Hashable:
    """Return all that an op's cost depends on: shapes, but no numbers of tensors."""
    return tuple(
        (value.shape, value.stride(), value.dtype)
        if isinstance(value, Tensor)
        else _signature(value)
        if isinstance(value, list | tuple)
        else (type(value), value)
        for value in values
    )


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _check_lists(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse an op that takes or gives very many tensors."""
    name = base_name(op)
    given = dict(zip((a.name for a in schema_of(op).arguments), args, strict=False)) | dict(kwargs)
    lists = [value for value in given.values() if isinstance(value, list | tuple)]
    taken = max((len(v) for v in lists if any(isinstance(i, Tensor) for i in v)), default=0)
    parts = _PARTS[name](*_split(given)) if name in _PARTS else 0
    if max(taken, parts) > (MOST_AXES if name == "meshgrid" else MOST_PARTS):
        raise BudgetError(f"'{op}' takes or makes more than {MOST_PARTS:,} tensors")


def _split(given: Mapping[str, Any]) -> tuple[int, Any]:
    """Return how long the axis is that an op takes apart, and by what."""
    tensor, axis = given.get("self"), given.get("dim", 0)
    is_known = isinstance(tensor, Tensor) and type(axis) is int
    is_known = is_known and -tensor.dim() <= axis < tensor.dim()  # type: ignore[union-attr]
    named = ("split_size", "split_sizes", "chunks", "sections", "indices")
    how = next((given[name] for name in named if name in given), 0)
    return tensor.shape[axis] if is_known else 0, how  # type: ignore[union-attr]


def _by_size(length: int, size: Any) -> int:
    return len(size) if isinstance(size, list | tuple) else length // max(1, size) + 1


def _by_count(length: int, count: Any) -> int:
    return len(count) + 1 if isinstance(count, list | tuple) else int(count)


_PARTS: Mapping[str, Callable[[int, Any], int]] = {  # how many tensors an axis is taken apart into
    **dict.fromkeys(("split", "unsafe_split", "split_with_sizes"), _by_size),
    "unsafe_split_with_sizes": _by_size,
    **dict.fromkeys(("chunk", "unsafe_chunk"), lambda length, count: min(length, count)),
    "tensor_split": _by_count,
    "unbind": lambda length, _: length,
}


def _no_window(*_: Any) -> int:
    return 1


def _window(_: Any, size: Sequence[int], *rest: Any) -> int:
    """Return how many numbers a pool looks at for one that it gives."""
    count = 1
    for length in size:
        count *= length
    return count


def _features(one: Tensor, *_: Any) -> int:
    return one.shape[-1]


_WINDOWS: Mapping[str, Callable[..., int]] = {  # what one number of the result takes, if not one
    **dict.fromkeys(
        (
            *("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices"),
            "fractional_max_pool2d",
        ),
        _window,
    ),
    "_cdist_forward": _features,
}
