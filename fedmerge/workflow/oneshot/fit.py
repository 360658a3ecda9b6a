"""Fit the layers of a merge in closed form, front to back, to what the clients' layers give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedmerge.probing.calls import Call, LayerCall, StopRun, hearing, names_of
from fedmerge.probing.gram import Gram, GramSum, Moments
from fedmerge.probing.values import Probes
from fedmerge.types.arrays import Array
from fedmerge.types.progress import Progress, silent
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.fitted import cell_rows, fitted_cell, fitted_layer, layer_rows
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.targets import BATCH, Part, collect_targets, used_once

FEW = 2  # samples on which it is seen how a layer is used
MOST_INPUTS = (
    12_288  # of a fitted layer: moments of more (1.2 GB in double precision) cost too much
)


@dataclass(frozen=True)
class Fitter:
    """Fits one merge's layers on probes; held-out ones choose the strength of each ridge.

    Every layer is fitted on what the global model gives it, whose earlier layers are fitted by
    then: errors don't add up. Weights that are used more than once, that read very much, or that
    are none of the `weights` whose rows can be compared, stay as they were averaged.
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
        changed: dict[str, Array] = {}
        for number, name in enumerate(wanted):
            progress("fitting", number, len(wanted))
            model = self.models.merged({**arrays, **changed})
            for call in self._calls(model, name, [few]):
                if call.reads <= MOST_INPUTS:
                    both = wanted[name], checked[name]
                    changed |= self._fitted(model, name, call, both, arrays)
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
        for call, part in zip(self._calls(model, name, batches), parts, strict=True):
            inputs, targets = (
                layer_rows(call, part) if isinstance(call, LayerCall) else cell_rows(call, part)
            )
            if total is None:
                total = GramSum(inputs.shape[1], targets.shape[1], device=self.models.device)
            total.add(inputs, targets)
        assert total is not None
        return total.result(has_intercept=has_intercept)

    def _calls(
        self, model: nn.Module, name: str, batches: Iterable[tuple[Tensor, ...]]
    ) -> Iterator[Call]:
        """Yield the call of a weight in every batch; a run ends there."""
        for inputs in batches:
            found: list[Call] = []
            with hearing(model, self._hear(name, found)):
                model(*inputs)
            yield from found

    def _hear(self, name: str, found: list[Call]) -> Callable[[Call], None]:
        def hear(call: Call) -> None:
            if self.models.own_names[names_of(call)[0]] == name:
                found.append(call)
                raise StopRun

        return hear
