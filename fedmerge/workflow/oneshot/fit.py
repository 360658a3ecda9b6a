"""Fit the layers of a merge in closed form, front to back, to what the clients' layers give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from fedmerge.probing.calls import Call, LayerCall
from fedmerge.probing.gram import Gram, GramSum, Moments
from fedmerge.probing.values import Probes
from fedmerge.types.arrays import Array
from fedmerge.types.progress import Progress, silent
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.correct import Corrector
from fedmerge.workflow.oneshot.fitted import cell_rows, fitted_cell, fitted_layer, layer_rows
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.runs import calls_of
from fedmerge.workflow.oneshot.targets import BATCH, Part, collect_targets, used_once

FEW = 2  # samples on which it is seen how a layer is used
MOST_INPUTS = (
    12_288  # of a fitted layer: moments of more (1.2 GB in double precision) cost too much
)


@dataclass(frozen=True)
class Fitter:
    """Fits one merge's layers on probes; held-out ones choose the strength of each ridge.

    Every layer is fitted on what the global model gives it, whose earlier layers are fitted by
    then: errors don't add up. Weights that read very much are corrected as the merge's options
    ask for it; those that are used more than once, or that are none of the `weights` whose rows
    can be compared, stay as the merge has them.
    """

    models: Models
    merge: Merge
    probes: Probes
    held_out: Probes
    weights: frozenset[str]  # by the plan's names
    seed: int

    def fit(self, progress: Progress = silent) -> dict[str, Array]:
        """Return the tensors that differ from the merge's, by the plan's names."""
        few = next(self.probes.batches(FEW, self.models.device))
        weights = used_once(self.models, self.merge, few, self.weights)
        wanted, checked = (
            collect_targets(self.models, self.merge, probes, weights=weights, seed=self.seed)
            for probes in (self.probes, self.held_out)
        )
        arrays = {name: self.merge.read(name) for name in self.merge.plan.tensors}
        corrector = Corrector(self.models, self.merge, self.probes, weights, self.seed)
        changed: dict[str, Array] = {}
        for number, name in enumerate(wanted):
            progress("fitting", number, len(wanted))
            model = self.models.merged({**arrays, **changed})
            for call in calls_of(self.models, model, name, [few]):
                if call.reads <= MOST_INPUTS:
                    both = wanted[name], checked[name]
                    changed |= self._fitted(model, name, call, both, arrays)
                elif corrector.changes(name):
                    changed |= corrector.layer(model, name, {**arrays, **changed})
        progress("fitting", len(wanted), len(wanted))
        return changed

    def _fitted(
        self,
        model: nn.Module,
        name: str,
        call: Call,
        targets: tuple[list[Part], list[Part]],
        arrays: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Return the new tensors of the layer that a call is of."""
        has_intercept = call.has_bias or self.merge.norm_of(name) is not None
        moments = Moments(
            *(
                self._gram(model, name, probes, parts, has_intercept=has_intercept)
                for probes, parts in zip((self.probes, self.held_out), targets, strict=True)
            )
        )
        if isinstance(call, LayerCall):
            return fitted_layer(self.merge, self.models.own_names, name, call, moments)
        return fitted_cell(self.models.own_names, arrays, call, moments)

    def _gram(
        self,
        model: nn.Module,
        name: str,
        probes: Probes,
        parts: list[Part],
        *,
        has_intercept: bool,
    ) -> Gram:
        """Return the moments of what the global model's layer reads and should give."""
        total: GramSum | None = None
        batches = probes.batches(BATCH, self.models.device)
        calls = calls_of(self.models, model, name, batches)
        for call, part in zip(calls, parts, strict=True):
            inputs, targets = (
                layer_rows(call, part) if isinstance(call, LayerCall) else cell_rows(call, part)
            )
            if total is None:
                total = GramSum(inputs.shape[1], targets.shape[1], device=self.models.device)
            total.add(inputs, targets)
        assert total is not None
        return total.result(has_intercept=has_intercept)
