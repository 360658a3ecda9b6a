"""The plan: which axis of which tensor carries which group of hidden units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeAlias

from fedmerge.types.layouts import Layout, Pinned, Units, groups_in, replace_groups

Role: TypeAlias = Literal["weight", "recurrent", "pointwise"]

OUTPUT = "output"  # the reason that pins the axis of a network's outputs


@dataclass(frozen=True)
class Group:
    """All tensor axes indexed by the same hidden units."""

    name: str
    can_grow: bool = True
    why: str = ""  # why it can't grow
    width: int | None = None  # in every client, where no shape shows it (heads × units per head)


@dataclass(frozen=True)
class TensorPlan:
    """One layout per axis of a tensor, and what the tensor does.

    `out` is the axis of the units that the tensor produces. Roles: a `weight` (or bias) makes
    units from inputs, a `recurrent` one from the previous step's state, a `pointwise` one scales
    or shifts units one by one (norms, PReLU).
    """

    axes: tuple[Layout, ...]
    out: int = 0
    role: Role = "weight"

    @property
    def produces(self) -> frozenset[str]:
        """The groups on the out axis."""
        return frozenset(groups_in(self.axes[self.out])) if self.axes else frozenset()

    @property
    def makes_outputs(self) -> bool:
        """Whether the tensor's out axis is the network's output."""
        return bool(self.axes) and getattr(self.axes[self.out], "reason", None) == OUTPUT

    @property
    def consumes(self) -> frozenset[str]:
        """The groups on the other axes."""
        others = (axis for k, axis in enumerate(self.axes) if k != self.out)
        return frozenset(group for axis in others for group in groups_in(axis))


@dataclass(frozen=True)
class Norm:
    """A batch norm that directly follows the one producer of its units."""

    producer: str  # the producing weight's name
    bias: str | None  # the producing bias's name
    scale: str | None
    shift: str | None
    mean: str
    variance: str
    eps: float = 1e-5


@dataclass(frozen=True)
class Plan:
    """Groups in forward order, and the layouts of every tensor that is matched and averaged."""

    groups: tuple[Group, ...]
    tensors: Mapping[str, TensorPlan]
    norms: tuple[Norm, ...] = ()
    same_width: tuple[tuple[str, ...], ...] = ()  # groups that must end equally wide
    kept: tuple[str, ...] = ()  # tensors taken from the first client as they are
    architecture: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def is_recurrent(self) -> bool:
        """Whether any tensor is fed by the previous step's state."""
        return any(tensor.role == "recurrent" for tensor in self.tensors.values())

    def group(self, name: str) -> Group:
        """Return the group of that name."""
        return next(group for group in self.groups if group.name == name)

    def axes_of(self, group: str) -> Iterator[tuple[str, int]]:
        """Yield every (tensor, axis) that carries the group."""
        yield from self._axes.get(group, ())

    @cached_property
    def _axes(self) -> Mapping[str, Sequence[tuple[str, int]]]:
        """Group → (tensor, axis), found once: plans may have thousands of both."""
        found: dict[str, list[tuple[str, int]]] = {}
        for name, tensor in self.tensors.items():
            for axis, layout in enumerate(tensor.axes):
                for group in set(groups_in(layout)):
                    found.setdefault(group, []).append((name, axis))
        return found


def pin_groups(plan: Plan, widths: Mapping[str, int], reason: str) -> Plan:
    """Return the plan with the groups named in `widths` pinned at those widths."""

    def pinned(group: str) -> Layout:
        return Pinned(widths[group], reason) if group in widths else Units(group)

    tensors = {
        name: replace(tensor, axes=tuple(replace_groups(axis, pinned) for axis in tensor.axes))
        for name, tensor in plan.tensors.items()
    }
    tied_to_pinned = {g for tie in plan.same_width if set(tie) & set(widths) for g in tie}
    why = f"must stay as wide as a pinned layer ({reason})"
    groups = tuple(
        replace(group, can_grow=False, why=why) if group.name in tied_to_pinned else group
        for group in plan.groups
        if group.name not in widths
    )
    same_width = (tuple(g for g in tie if g not in widths) for tie in plan.same_width)
    ties = tuple(tie for tie in same_width if len(tie) > 1)
    return replace(plan, groups=groups, tensors=tensors, same_width=ties)


def equal_widths(widths: Mapping[str, int], ties: Iterable[Iterable[str]]) -> dict[str, int]:
    """Return the widths with every tie raised to its widest group."""
    raised = dict(widths)
    for tie in map(tuple, ties):
        raised.update(dict.fromkeys(tie, max(widths[group] for group in tie)))
    return raised


def neighbours(plan: Plan, group: str) -> list[str]:
    """Return the groups that share a tensor with a group, itself included, in the plan's order."""
    shared = {
        other
        for tensor in plan.tensors.values()
        if group in tensor.produces | tensor.consumes
        for other in tensor.produces | tensor.consumes
    }
    return [each.name for each in plan.groups if each.name in shared]
