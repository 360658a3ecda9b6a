"""Correct averaged layers on probes, front to back: units' means and variances, batch norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.probing.calls import Call, LayerCall
from fedmerge.probing.cells import CellCall
from fedmerge.probing.values import Probes
from fedmerge.types.arrays import Array, BoolArray
from fedmerge.types.layouts import axis_size
from fedmerge.types.plans import Norm, TensorPlan
from fedmerge.types.progress import Progress, silent
from fedmerge.units import out_places
from fedmerge.units.scatter import along
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.runs import calls_of
from fedmerge.workflow.oneshot.spread import Spread, Spreads, SpreadSum, given_by, owners_spreads
from fedmerge.workflow.oneshot.targets import BATCH, Part, Targets, collect_targets
from fedmerge.workflow.options import MatchOptions

CONSTANT = 1e-12  # of the largest variance: a unit that varies less is not rescaled


def is_corrected_on_probes(options: MatchOptions) -> bool:
    """Return whether averaged layers are looked at on probes."""
    return options.correct == "moments" or options.batch_norm == "reestimate"


@dataclass(frozen=True)
class Corrector:
    """Lets one merge's units vary on probes as their owners do, as far as its options ask for it.

    Every layer is looked at in the global model, whose earlier layers are corrected by then. Where
    a batch norm follows a layer, only that norm's statistics are set: to those of what it reads.
    Units of the lead, and the net's outputs, stay as they are.
    """

    models: Models
    merge: Merge
    probes: Probes
    weights: frozenset[str]  # by the plan's names: used once, with rows that can be compared
    seed: int

    def correct(self, progress: Progress = silent) -> dict[str, Array]:
        """Return the tensors that differ from the merge's, by the plan's names."""
        arrays = {name: self.merge.read(name) for name in self.merge.plan.tensors}
        changed: dict[str, Array] = {}
        for number, name in enumerate(self._owners):
            progress("correcting", number, len(self._owners))
            if self.changes(name):
                model = self.models.merged({**arrays, **changed})
                changed |= self.layer(model, name, {**arrays, **changed})
        progress("correcting", len(self._owners), len(self._owners))
        return changed

    def changes(self, name: str) -> bool:
        """Return whether the options ask for a correction of a layer on probes."""
        options = self.merge.options
        if self.merge.norm_of(name) is not None:
            return options.batch_norm == "reestimate"
        return options.correct == "moments" and bool(self.merge.plan.tensors[name].produces)

    def layer(self, model: nn.Module, name: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the new tensors of one layer of the global model so far."""
        sums: dict[str, SpreadSum] = {}
        parts = self._cells.get(name, [])
        batches = self.probes.batches(BATCH, self.models.device)
        parameters: dict[str, tuple[str, str | None]] = {}
        for number, call in enumerate(calls_of(self.models, model, name, batches)):
            parameters = _parameters(call, self.models.own_names)
            is_cell = isinstance(call, CellCall)
            given = _gates(call, parts[number]) if is_cell else given_by(call)
            for kind, values in given.items():
                sums.setdefault(kind, SpreadSum()).add(values)
        found = {kind: own.result() for kind, own in sums.items()}
        norm = self.merge.norm_of(name)
        if norm is not None:
            return _statistics(norm, found["outputs"])
        changed: dict[str, Array] = {}
        for kind, (weight, bias) in parameters.items():
            is_kept = self._is_kept(self.merge.plan.tensors[weight])
            change = _Change.between(found[kind], self._owners[name][kind], is_kept)
            changed |= change.of_layer(weight, bias, arrays, self.merge.plan.tensors[weight].out)
        return changed

    @cached_property
    def _owners(self) -> Spreads:
        return owners_spreads(self.models, self.merge, self.probes, weights=self.weights)

    @cached_property
    def _cells(self) -> Targets:
        """The states that recurrent layers read: the owners' mean, as when they are fitted."""
        cells = {name for name, kinds in self._owners.items() if "outputs" not in kinds}
        return collect_targets(self.models, self.merge, self.probes, weights=cells, seed=self.seed)

    def _is_kept(self, tensor: TensorPlan) -> BoolArray:
        """Return which positions along the out axis are the lead's, or nobody's."""
        merge, lead = self.merge, self.merge.averaging.lead
        places = [out_places(tensor, own, merge.widths) for own in merge.placements]
        is_kept = np.ones(axis_size(tensor.axes[tensor.out], merge.widths), dtype=bool)
        is_kept[np.concatenate(places)] = False
        if lead is not None:
            is_kept[places[lead]] = True
        return is_kept


@dataclass(frozen=True)
class _Change:
    """What is done to units: factor · x + shift, both (units,)."""

    factors: Array
    shifts: Array

    @classmethod
    def between(cls, own: Spread, wanted: Spread, is_kept: BoolArray) -> _Change:
        """Return the change from one spread to another; units that don't vary are only shifted."""
        numbers = (own.mean, own.variance, wanted.mean, wanted.variance)
        is_moved = ~is_kept & np.all(np.isfinite(numbers), axis=0)
        varies = is_moved & (own.variance > CONSTANT * own.variance.max(initial=0.0))
        ratio = np.divide(wanted.variance, own.variance, out=np.ones_like(own.mean), where=varies)
        factors = np.sqrt(ratio)
        return cls(factors, np.where(is_moved, wanted.mean - factors * own.mean, 0.0))

    def of_layer(
        self, weight: str, bias: str | None, arrays: Mapping[str, Array], out: int
    ) -> dict[str, Array]:
        """Return a layer's weight and bias after the change; without a bias nothing is shifted."""
        rows = arrays[weight]
        found = {weight: (rows * along(self.factors, out, rows.ndim)).astype(rows.dtype)}
        if bias is not None:
            shifted = self.factors * arrays[bias] + self.shifts
            found[bias] = shifted.astype(arrays[bias].dtype)
        return found


def _statistics(norm: Norm, own: Spread) -> dict[str, Array]:
    """Return a batch norm's statistics of what it reads."""
    return {norm.mean: own.mean, norm.variance: own.variance}


def _gates(call: Call, part: Part) -> dict[str, Tensor]:
    """Return what inputs and the owners' mean states add to a recurrent layer's gates."""
    assert isinstance(call, CellCall)
    inputs, _ = call.rows(part.rows)
    states = part.mean("states").to(inputs)
    weight_ih, weight_hh, *biases = call.parameters
    bias_ih, bias_hh = biases or (torch.zeros(()), torch.zeros(()))
    return {
        "from_inputs": inputs @ weight_ih.T + bias_ih.to(inputs),
        "from_states": states @ weight_hh.T + bias_hh.to(inputs),
    }


def _parameters(call: Call, names: Mapping[str, str]) -> dict[str, tuple[str, str | None]]:
    """Return the plan's names of the weight and bias that make what a layer gives, by kind."""
    if isinstance(call, LayerCall):
        own = {"outputs": (call.weight, call.bias)}
    else:
        own = {
            "from_inputs": (call.weight_ih, call.bias_ih),
            "from_states": (call.weight_hh, call.bias_hh),
        }
    return {kind: (names[w], None if b is None else names[b]) for kind, (w, b) in own.items()}
