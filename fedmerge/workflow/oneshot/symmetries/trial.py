"""Whether a client computes the same after a change: seen on a few inputs, not guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedmerge.types.arrays import Array
from fedmerge.user_code import load_state
from fedmerge.workflow.models import outputs_of
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.symmetries.rewritten import Change, changed
from fedmerge.workflow.outputs import TOLERANCE, relative_difference

SEEN = 10.0  # × the tolerance: what half a change must do, or the inputs show nothing


@dataclass(frozen=True)
class Trial:
    """The first client with inputs on which changes of it are tried."""

    models: Models
    inputs: tuple[Tensor, ...]

    @cached_property
    def _model(self) -> nn.Module:
        return self.models.client(0)

    @cached_property
    def _before(self) -> list[Tensor]:
        return self._outputs()

    def _outputs(self) -> list[Tensor]:
        outputs = outputs_of(self._model, self.inputs)
        return [out.clone() for out in outputs if out.is_floating_point() and out.numel()]

    def keeps_outputs(self, change: Change) -> bool:
        """Return whether outputs stay with a change, and don't with its readers' part alone."""
        if not self._difference(change) <= TOLERANCE:
            return False
        return self._difference(self._half(change)) > SEEN * TOLERANCE

    def _half(self, change: Change) -> Change:
        """Return what a change does to who reads units: all axes but those that make them."""
        tensors = self.models.prepared.plan.tensors
        return {
            name: {axis: own for axis, own in axes.items() if axis != tensors[name].out}
            for name, axes in change.items()
        }

    def _difference(self, change: Change) -> float:
        """Return how much the outputs change, relative to the largest."""
        before = self._before
        first = self.models.prepared.aligned[0]
        arrays = {name: first.read(name) for name in change}
        self._load({name: changed(own, name, change) for name, own in arrays.items()})
        try:
            after = self._outputs()
        finally:
            self._load(arrays)
        if not before or [out.shape for out in before] != [out.shape for out in after]:
            return float("inf")
        return relative_difference(before, after)

    def _load(self, arrays: Mapping[str, Array]) -> None:
        own = self.models.own_names.items()
        state = {
            model: torch.from_numpy(arrays[name].copy()) for model, name in own if name in arrays
        }
        load_state(self._model, state, strict=False)
