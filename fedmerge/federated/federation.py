"""Rounds, local models, and the federation that they form between rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np

from fedmerge.matching.features import Placement, place_tensor
from fedmerge.merging.averages import Averaging
from fedmerge.merging.record_schema import GroupEntry
from fedmerge.values.arrays import Array, IntArray
from fedmerge.values.clients import TensorInfo
from fedmerge.values.plans import (
    Assignment,
    Plan,
    TensorPlan,
    Widths,
    equal_widths,
    groups_in,
    index_map,
)
from fedmerge.values.run_settings import Stage
from fedmerge.values.work import Arrays


@dataclass(frozen=True)
class Layer:
    """What one round of a pass decides."""

    label: str  # what the user is told
    group: str | None  # that is matched; none where all groups are matched already
    tensors: tuple[str, ...]  # averaged, and frozen from then on


@dataclass(frozen=True)
class Round:
    """One exchange with the clients, after they trained."""

    number: int  # from 1
    pass_number: int  # from 1
    layer: Layer
    stage: Stage
    epochs: int  # of local training before the exchange; 0: none
    completes: bool  # whether there is a whole global model after it


_Change: TypeAlias = Callable[[Array, TensorPlan, Placement, Widths], Array]


@dataclass(frozen=True)
class LocalModel:
    """A client of the matching whose tensors are in memory."""

    name: str
    arrays: Arrays

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape and dtype of every array."""
        return {n: TensorInfo(array.shape, array.dtype.name) for n, array in self.arrays.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        """No further names: of tied tensors there is one array."""
        return {}

    def read(self, name: str) -> Array:
        """Return one tensor."""
        return self.arrays[name]

    def updated(self, arrays: Arrays) -> LocalModel:
        """Return the model with some arrays replaced."""
        return replace(self, arrays={**self.arrays, **arrays})

    def without(self, names: Iterable[str]) -> LocalModel:
        """Return the model without some arrays."""
        gone = set(names)
        return replace(self, arrays={n: a for n, a in self.arrays.items() if n not in gone})


def same_units(width: int) -> Assignment:
    """Return the assignment of every unit to the one at its place."""
    return Assignment(np.arange(width), width)


def place_units(model: LocalModel, plan: Plan, placed: Placement, widths: Widths) -> LocalModel:
    """Return the model with the units of some groups permuted and zero-padded as assigned.

    `widths` are those of all groups before.
    """
    return model.updated(_changed(model.arrays, plan, placed, widths, placed_array))


def placed_array(values: Array, tensor: TensorPlan, placed: Placement, widths: Widths) -> Array:
    """Return a tensor with the units of some groups placed, all others where they are."""
    everywhere = {
        group: placed[group] if group in placed else same_units(widths[group])
        for group in _groups_of(tensor)
    }
    new_widths = {group: assignment.width for group, assignment in everywhere.items()}
    return place_tensor(values, tensor, everywhere, new_widths)


def taken_array(values: Array, tensor: TensorPlan, taken: Placement, widths: Widths) -> Array:
    """Return the part of a tensor that belongs to the assigned units: the inverse of placing.

    `widths` are those of groups that are not taken from.
    """
    own = {g: taken[g].width if g in taken else widths[g] for g in _groups_of(tensor)}
    targets: dict[str, IntArray] = {
        group: taken[group].indices if group in taken else np.arange(width)
        for group, width in own.items()
    }
    maps = [index_map(layout, targets, own) for layout in tensor.axes]
    return np.ascontiguousarray(values[np.ix_(*maps)]) if maps else values


def pad_ties(arrays: Arrays, plan: Plan, widths: Widths) -> dict[str, Array]:
    """Return tensors of these widths with tied groups padded to the widest one by zero units.

    Such units get no gradient and stay zero, so that nothing is lost when they are cut again.
    """
    return {**arrays, **_changed(arrays, plan, _padding(plan, widths), widths, placed_array)}


def cut_ties(arrays: Arrays, plan: Plan, widths: Widths) -> dict[str, Array]:
    """Return what `pad_ties` was given."""
    return {**arrays, **_changed(arrays, plan, _padding(plan, widths), widths, taken_array)}


def _padding(plan: Plan, widths: Widths) -> dict[str, Assignment]:
    """Return where the units of groups stand that are narrower than those they are tied to."""
    tied = equal_widths(widths, plan.same_width)
    return {
        group: Assignment(np.arange(width), tied[group])
        for group, width in widths.items()
        if tied[group] > width
    }


def _changed(
    arrays: Arrays, plan: Plan, moved: Placement, widths: Widths, change: _Change
) -> dict[str, Array]:
    """Return those arrays that carry a moved group, changed."""
    return {
        name: change(array, plan.tensors[name], moved, widths)
        for name, array in arrays.items()
        if name in plan.tensors and _groups_of(plan.tensors[name]) & set(moved)
    }


def _groups_of(tensor: TensorPlan) -> set[str]:
    return {group for layout in tensor.axes for group in groups_in(layout)}


@dataclass(frozen=True)
class Federation:
    """What is decided of the global model, and the clients' models without that."""

    locals: tuple[LocalModel, ...]  # in a mixed layout
    fixed: Arrays  # global tensors, the same for all clients
    placements: tuple[Placement, ...]  # per client, of the groups matched in this pass
    groups: tuple[GroupEntry, ...]  # matched in this pass
    weights: tuple[float, ...] = ()  # what each client counts, where rounds change it

    @property
    def widths(self) -> dict[str, int]:
        """The global width of every group matched in this pass."""
        return {group: assignment.width for group, assignment in self.placements[0].items()}

    def with_locals(self, models: Mapping[int, LocalModel]) -> Federation:
        """Return the federation with some clients' models replaced."""
        pairs = enumerate(self.locals)
        return replace(self, locals=tuple(models.get(k, model) for k, model in pairs))


@dataclass(frozen=True)
class Exchange:
    """What one exchange decided, and the bytes that a client must send and get for it."""

    federation: Federation
    up: int  # of all clients that took part
    down: int  # to all clients
    matched: GroupEntry | None = None


@dataclass(frozen=True)
class Decided:
    """What is the same for all clients after some rounds."""

    groups: tuple[str, ...]  # whose units have their global places, in the order of matching
    tensors: tuple[str, ...]  # that are fixed, besides those that everybody takes as they are


class Method(Protocol):
    """How a global model comes from the clients' models: the server's side of an algorithm."""

    @property
    def rounds(self) -> Sequence[Round]:
        """All rounds."""

    @property
    def initial(self) -> Sequence[LocalModel]:
        """The clients' models as they came."""

    @property
    def kept(self) -> Arrays:
        """The first client's tensors that everybody takes as they are."""

    def decided(self, done: int) -> Decided:
        """Return what is decided after so many rounds, at least one."""

    def start(self) -> Federation:
        """Return the federation before the first round."""

    def begin(self, federation: Federation, current: Round) -> Federation:
        """Return the federation as clients get it for a round."""

    def client_widths(self, federation: Federation, client: int) -> Widths:
        """Return the widths of a client's model in its present layout."""

    def exchange(self, federation: Federation, current: Round, present: Sequence[int]) -> Exchange:
        """Return what the models of the clients that are present decide."""

    def weigh(self, federation: Federation, losses: Mapping[str, float]) -> Federation:
        """Return the federation after clients told what they lost in a round's first epoch."""


def averaging_of(averaging: Averaging, present: Sequence[int]) -> Averaging:
    """Return how much the clients that are present count among themselves."""
    weights = tuple(averaging.client_weights[client] for client in present)
    if averaging.class_weights is None:
        return replace(averaging, client_weights=weights)
    table = averaging.class_weights[list(present)]
    totals = table.sum(axis=0)
    shares = [[weight / sum(weights)] for weight in weights]
    table = np.where(totals > 0, table / np.where(totals > 0, totals, 1.0), shares)
    return replace(averaging, client_weights=weights, class_weights=table)
