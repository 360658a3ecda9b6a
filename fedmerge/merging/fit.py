"""Fit merged layers by least squares to what the clients' layers give."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedmerge.matching.features import folded
from fedmerge.merging.client_modules import ClientModules, own_norms
from fedmerge.merging.result import Merge
from fedmerge.merging.targets import (
    BATCH,
    HELD_OUT_ROWS,
    ROWS,
    Part,
    Targets,
    collect_targets,
    used_once,
)
from fedmerge.probes.layer_calls import Call, CellCall, LayerCall, names_of
from fedmerge.probes.least_squares import (
    Fit,
    GramSum,
    Moments,
    Summary,
    best_ridge,
    few_rows,
    lively_ridge,
)
from fedmerge.probes.lockstep import copies_of, held_bytes, run_in_step
from fedmerge.probes.probe_inputs import Probes
from fedmerge.user_code import state_of
from fedmerge.values.arrays import Array
from fedmerge.values.clients import ClientView
from fedmerge.values.plans import Norm, Plan
from fedmerge.values.wording import Progress, silent

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # of the ridge, one is chosen per layer
CANDIDATE = 2  # the gate of a GRU whose part from the states is gated before it is added
GRU_GATES = 3
ROWS_AT_ONCE = 4096  # that are put together of a convolution's input: bounds memory
TRIES = 4  # strengths that are judged, about


def layer_rows(call: LayerCall, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what a layer reads and should give (rows, …), some rows at once."""
    wanted = part.mean("outputs")
    for start in range(0, len(wanted), ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        inputs = call.patches(part.rows[some])
        yield inputs, wanted[some].to(inputs)


def cell_rows(call: CellCall, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what a recurrent layer reads and should add to its gates (rows, …).

    The states are the owners' mean: those of the layer itself are right only once it is fitted.
    Targets are three: from inputs and states together, from inputs, and from states.
    """
    inputs = call.input_rows(part.rows)
    states = part.mean("states").to(inputs)
    one, two = part.mean("from_inputs").to(inputs), part.mean("from_states").to(inputs)
    yield torch.cat([inputs, states], dim=1), torch.cat([one + two, one, two], dim=1)


def fitted_layer(
    merge: Merge, names: Mapping[str, str], name: str, call: LayerCall, moments: Moments
) -> dict[str, Array]:
    """Return the weight and bias of a layer, and the batch norm that follows it, if any."""
    start = np.moveaxis(_folded_mean(merge, name), call.out_axis, 0)
    flat = torch.from_numpy(start.reshape(len(start), -1)).to(moments.fitted.like)
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
    like = moments.fitted.like
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
    clients = [_Folded(client, merge.plan) for client in merge.session.aligned]
    return merge.averaged(name, clients)


@dataclass(frozen=True)
class _Folded(ClientView):
    """A client whose weights have the batch norms that follow them folded in."""

    plan: Plan

    def read(self, name: str) -> Array:
        """Return a tensor, folded."""
        return folded(self.client, self.plan, name)


FEW = 2  # samples on which it is seen how a layer is used
MOST_INPUTS = 12_288  # of a fitted layer: moments of more (1.2 GB as doubles) cost too much
MOST_HELD = 1 << 30  # bytes of activations that the probes may take between two layers
FEWEST = 16  # probes to fit on, however much these take


def fit_merges(
    modules: ClientModules,
    merges: Sequence[Merge],
    probes: Probes,
    held_out: Probes,
    *,
    steady: frozenset[str],
    progress: Progress,
) -> list[Merge]:
    """Return merges of one matching whose layers are fitted on probes.

    `steady` are the weights, by the plan's names, whose rows can be compared. Held-out probes
    choose the strength of each ridge. Batch norms are folded where they alone read a layer.
    """
    few = next(probes.batches(FEW, modules.device))
    weights = used_once(modules, merges[0], few, steady)
    norms = own_norms(modules, few)
    foldable = [_with_norms(merge, norms) for merge in merges]
    probes, held_out = _held_at_once(modules, merges[0], probes, held_out)
    seed = merges[0].options.seed
    wanted, checked = (
        collect_targets(modules, foldable, own, weights=weights, seed=seed, most_rows=rows)
        for own, rows in ((probes, ROWS), (held_out, HELD_OUT_ROWS))
    )
    fitters = [
        Fitter(modules, merge, probes, held_out, targets)
        for merge, *targets in zip(foldable, wanted, checked, strict=True)
    ]
    return [
        replace(merge, fitted=fitter.fit(progress))
        for merge, fitter in zip(merges, fitters, strict=True)
    ]


def _held_at_once(
    modules: ClientModules, merge: Merge, probes: Probes, held_out: Probes
) -> tuple[Probes, Probes]:
    """Return as many of both probes as a run of the merge holds within `MOST_HELD` bytes.

    Fewer ones rather than several runs: where samples are so large, each has many rows to fit to.
    """
    few = next(probes.batches(FEW, modules.device))
    model = modules.merged({name: merge.read(name) for name in merge.plan.tensors})
    per_sample = held_bytes(model, few) / len(few[0])
    share = MOST_HELD / max(1.0, per_sample * (len(probes) + len(held_out)))
    if share >= 1:
        return probes, held_out
    return probes.first(max(FEWEST, int(share * len(probes)))), held_out.first(
        max(FEWEST, int(share * len(held_out)))
    )


def _with_norms(merge: Merge, norms: tuple[Norm, ...]) -> Merge:
    plan = replace(merge.plan, norms=norms)
    return replace(merge, session=replace(merge.session, plan=plan))


@dataclass(frozen=True)
class Fitter:
    """Fits one merge's layers on probes, in one run of the global model.

    Every layer is fitted on what the global model gives it, whose earlier layers are fitted by
    then: errors don't add up. So the run stops before each layer until that has its new weights:
    every layer runs once, and memory is for what the net holds of all probes at once. Weights that
    read very much, that are used more than once or that have no targets stay as the merge has them.
    """

    modules: ClientModules
    merge: Merge
    probes: Probes
    held_out: Probes
    targets: Sequence[Targets]  # on the probes, and on the held-out ones

    def fit(self, progress: Progress = silent) -> dict[str, Array]:
        """Return the tensors that differ from the merge's, by the plan's names."""
        arrays = {name: self.merge.read(name) for name in self.merge.plan.tensors}
        batches = self._batches(self.probes) + self._batches(self.held_out)
        models = copies_of(self.modules.merged(arrays), len(batches))
        states = [state_of(model, keep_vars=True) for model in models]
        changed: dict[str, Array] = {}
        done: set[str] = set()

        def is_wanted(call: Call) -> bool:
            name = self._name(call)
            return name in self.targets[0] and name not in done and call.reads <= MOST_INPUTS

        def solve(calls: Mapping[int, Call]) -> None:
            name = self._name(next(iter(calls.values())))
            progress("fitting", len(done), len(self.targets[0]))
            found = self._fitted(name, calls, arrays)
            for state in states:
                self.modules.change(state, found)
            changed.update(found)
            done.add(name)

        run_in_step(models, batches, is_wanted, solve)
        progress("fitting", len(self.targets[0]), len(self.targets[0]))
        return changed

    def _batches(self, probes: Probes) -> list[tuple[Tensor, ...]]:
        return list(probes.batches(BATCH, self.modules.device))

    def _name(self, call: Call) -> str:
        return self.modules.own_names[names_of(call)[0]]

    def _fitted(
        self, name: str, calls: Mapping[int, Call], arrays: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return the new tensors of a layer, given its calls by the numbers of batches."""
        call = next(iter(calls.values()))
        has_intercept = call.has_bias or self.merge.norm_of(name) is not None
        first = len(self._batches(self.probes))
        numbered = (
            {number: call for number, call in calls.items() if number < first},
            {number - first: call for number, call in calls.items() if number >= first},
        )
        fitted, held_out = (
            self._summary(own, targets[name], are_kept=are_kept, has_intercept=has_intercept)
            for own, targets, are_kept in zip(
                numbered, self.targets, (_are_few, _only_judge), strict=True
            )
        )
        if fitted is None or held_out is None:
            return {}
        moments = Moments(fitted, held_out)
        if isinstance(call, LayerCall):
            return fitted_layer(self.merge, self.modules.own_names, name, call, moments)
        return fitted_cell(self.modules.own_names, arrays, call, moments)

    def _summary(
        self,
        calls: Mapping[int, Call],
        parts: Mapping[int, Part],
        *,
        are_kept: Callable[[LayerCall, int], bool],
        has_intercept: bool,
    ) -> Summary | None:
        """Return what the global model's layer reads and should give, of all batches.

        Rows are kept themselves where that costs less than their moments.
        """
        known = [(calls[k], parts[k]) for k in calls if k in parts]
        if not known:
            return None
        pairs = itertools.chain.from_iterable(
            layer_rows(call, part) if isinstance(call, LayerCall) else cell_rows(call, part)
            for call, part in known
        )
        call, rows = known[0][0], sum(len(part.rows) for _, part in known)
        if isinstance(call, LayerCall) and are_kept(call, rows):
            inputs, targets = map(torch.cat, zip(*pairs, strict=True))
            return few_rows(inputs, targets, has_intercept=has_intercept)
        total: GramSum | None = None
        for inputs, targets in pairs:
            if total is None:
                total = GramSum(inputs.shape[1], targets.shape[1], device=self.modules.device)
            total.add(inputs, targets)
        assert total is not None
        return total.result(has_intercept=has_intercept)


def _are_few(call: LayerCall, rows: int) -> bool:
    """Return whether a layer is fitted to fewer rows than it reads numbers."""
    return rows < call.reads


def _only_judge(call: LayerCall, rows: int) -> bool:
    """Return whether to run some weights on held-out rows takes less than their moments."""
    return TRIES * call.outputs.shape[1] < call.reads
