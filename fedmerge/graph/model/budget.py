"""What running a stranger's graph may cost: every op is tried without numbers before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

MOST_STEPS = 100_000  # ops of one run, those of loops each time
MOST_WORK = 150_000_000_000  # multiplications and additions of one run
MOST_NUMBERS = 1 << 24  # held at once, besides four times those of the weights
_WORK_PER_NUMBER = 50  # what one number of an op's result costs besides products, e.g. a logarithm
_BOUNDED = frozenset({  # no larger than what they are given, though their size is not foreseeable
    "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "unique_consecutive", "unique_dim",
})  # fmt: skip


class BudgetError(ValueError):
    """A graph that would cost more than any checkpoint's should."""


@dataclass
class Budget:
    """What is left of steps, work and room in one run of a graph."""

    room: int  # numbers that may be held at once
    work: int
    steps: int

    @staticmethod
    def beside(weights: int) -> Budget:
        """Return the budget of a graph that has so many numbers of its own."""
        return Budget(MOST_NUMBERS + 4 * weights, MOST_WORK, MOST_STEPS)

    def foresee(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse an op that would take too long or make too much; its numbers stay unknown."""
        self.steps -= 1
        if self.steps < 0:
            raise BudgetError(f"it runs more than {MOST_STEPS:,} ops")
        if not isinstance(op, torch._ops.OpOverload):
            return
        cost = _cost(op, args, kwargs)
        self.work -= cost.flops + _WORK_PER_NUMBER * cost.numbers
        if self.work < 0:
            raise BudgetError(f"it takes more than {MOST_WORK:,} operations")
        self.check_room(cost.numbers)

    def check_room(self, numbers: int) -> None:
        """Refuse more numbers at once than there is room for."""
        if numbers > self.room:
            raise BudgetError(f"it holds more than {self.room:,} numbers at once")


class _Cost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what the ops that an op is made of cost."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an op that has no numbers, and take note of its result's size."""
        from torch.utils.flop_counter import flop_registry  # few files need it

        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numbers += sum(tensor.numel() for tensor in made)
        if func._overloadpacket in flop_registry:
            self.flops += int(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        return result


def _cost(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Cost:
    """Return what an op on tensors of these shapes costs."""
    # Whoever follows the run must not see this.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        cost = _Cost()
        try:
            bare, named = pytree.tree_map_only(
                Tensor, _without_numbers, (tuple(args), dict(kwargs))
            )
            with torch.no_grad(), cost:
                op(*bare, **named)
        except (NotImplementedError, RuntimeError) as error:
            if op._overloadpacket.__name__.rstrip("_") not in _BOUNDED:
                raise BudgetError(f"the size of what '{op}' makes can't be foreseen") from error
    return cost


def _without_numbers(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
