"""The tensors of fitted layers: plain ones, with batch norm behind them, and recurrent ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmerge.probing.calls import LayerCall
from fedmerge.probing.cells import CellCall
from fedmerge.probing.gram import Fit, Moments, best_ridge, lively_ridge
from fedmerge.types.arrays import Array
from fedmerge.types.clients import ClientView
from fedmerge.types.plans import Norm, Plan
from fedmerge.units import average_tensor, folded
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.targets import Part

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of the ridge, one is chosen per layer
CANDIDATE = 2  # the gate of a GRU whose part from the states is gated before it is added
GRU_GATES = 3


def layer_rows(call: LayerCall, part: Part) -> tuple[Tensor, Tensor]:
    """Return what a layer reads and should give (rows, …)."""
    inputs = call.patches(part.rows)
    return inputs, part.mean("outputs").to(inputs)


def cell_rows(call: CellCall, part: Part) -> tuple[Tensor, Tensor]:
    """Return what a recurrent layer reads and should add to its gates (rows, …).

    The states are the owners' mean: those of the layer itself are right only once it is fitted.
    Targets are three: from inputs and states together, from inputs, and from states.
    """
    inputs, _ = call.rows(part.rows)
    states = part.mean("states").to(inputs)
    one, two = part.mean("from_inputs").to(inputs), part.mean("from_states").to(inputs)
    return torch.cat([inputs, states], dim=1), torch.cat([one + two, one, two], dim=1)


def fitted_layer(
    merge: Merge, names: Mapping[str, str], name: str, call: LayerCall, moments: Moments
) -> dict[str, Array]:
    """Return the weight and bias of a layer, and the batch norm that follows it, if any."""
    start = np.moveaxis(_folded_mean(merge, name), call.out_axis, 0)
    flat = torch.from_numpy(start.reshape(len(start), -1)).to(moments.fitted.inputs)
    is_hidden = bool(merge.plan.tensors[name].produces)
    fit = (lively_ridge if is_hidden else best_ridge)(moments, flat, STRENGTHS)
    weight = fit.weight.cpu().numpy().reshape(start.shape)
    found: dict[str, Array] = {name: np.moveaxis(weight, 0, call.out_axis)}
    bias = None if call.bias is None else names[call.bias]
    norm = merge.norm_of(name)
    if norm is not None:
        return found | _fitted_norm(norm, fit, moments, bias)
    return found if bias is None else {**found, bias: fit.bias.cpu().numpy()}


def _fitted_norm(norm: Norm, fit: Fit, moments: Moments, bias: str | None) -> dict[str, Array]:
    """Return a batch norm that leaves its input as it is and adds the fit's bias.

    Its statistics are those of its input on the probes, so that it may be trained on.
    """
    mean = fit.weight @ moments.fitted.input_mean
    variance = moments.fitted.variance(fit.weight)
    if norm.scale is None or norm.shift is None:  # nothing to learn: the statistics do it all
        mean, variance = -fit.bias, torch.full_like(variance, 1 - norm.eps)
    found = {norm.mean: mean, norm.variance: variance}
    if norm.scale is not None and norm.shift is not None:
        found |= {norm.scale: (variance + norm.eps).sqrt(), norm.shift: mean + fit.bias}
    if bias is not None:
        found[bias] = torch.zeros_like(fit.bias)
    return {name: values.cpu().numpy() for name, values in found.items()}


def fitted_cell(
    names: Mapping[str, str], arrays: Mapping[str, Array], call: CellCall, moments: Moments
) -> dict[str, Array]:
    """Return the tensors of one layer and direction of a recurrent stack."""
    like = moments.fitted.inputs
    from_inputs = torch.from_numpy(arrays[names[call.weight_ih]]).to(like)
    from_states = torch.from_numpy(arrays[names[call.weight_hh]]).to(like)
    rows, inputs = from_inputs.shape
    both = moments.part(slice(None), slice(0, rows))
    fit = best_ridge(both, torch.cat([from_inputs, from_states], dim=1), STRENGTHS)
    weight, bias, state_bias = fit.weight, fit.bias, torch.zeros_like(fit.bias)
    if call.kind == "gru":
        gate = slice(CANDIDATE * rows // GRU_GATES, rows)
        one = moments.part(slice(0, inputs), _moved(gate, rows))
        two = moments.part(slice(inputs, None), _moved(gate, 2 * rows))
        alone = best_ridge(one, from_inputs[gate], STRENGTHS)
        before = best_ridge(two, from_states[gate], STRENGTHS)
        weight[gate] = torch.cat([alone.weight, before.weight], dim=1)
        bias[gate], state_bias[gate] = alone.bias, before.bias
    found = {call.weight_ih: weight[:, :inputs], call.weight_hh: weight[:, inputs:]}
    if call.bias_ih is not None and call.bias_hh is not None:
        found |= {call.bias_ih: bias, call.bias_hh: state_bias}
    return {names[name]: values.cpu().numpy() for name, values in found.items()}


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


def _folded_mean(merge: Merge, name: str) -> Array:
    """Return the owners' mean weight, each with its batch norm folded in."""
    return average_tensor(
        name,
        [_Folded(client, merge.plan) for client in merge.aligned],
        merge.plan,
        placements=merge.placements,
        widths=merge.widths,
        averaging=merge.averaging,
    )


@dataclass(frozen=True)
class _Folded(ClientView):
    """A client whose weights have the batch norms that follow them folded in."""

    plan: Plan

    def read(self, name: str) -> Array:
        """Return a tensor, folded."""
        return folded(self.client, self.plan, name)
