"""Units that matter: how much each does, which tell most of that, and which widths it buys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmerge.architecture.model_code import evaluated
from fedmerge.errors import FedmergeError
from fedmerge.merging.answers import Answers
from fedmerge.merging.client_modules import ClientModules
from fedmerge.merging.quality import (
    compared_rows,
    ensemble_weights,
    mean_outputs,
    probabilities,
    variance,
)
from fedmerge.merging.refinement import differentiable
from fedmerge.merging.session import Session
from fedmerge.user_code import user_code
from fedmerge.values.arrays import Float64Array, FloatArray, IntArray
from fedmerge.values.plans import Plan, TensorPlan, Widths, groups_in, unit_positions
from fedmerge.values.wording import Progress

SAMPLES = 512  # of the probes, at most
BATCH = 8  # samples whose effects are summed before they are squared
TURNS = 256  # in which units are chosen: one by one where there are no more
NOISE = 0.02  # share of a unit's responses that is taken for chance
SAME = 1 - 1e-3  # correlation from which one unit says all that another does
CHOSEN, SAID, OPEN = 0, 1, 2  # units that somebody stands for are chosen after all others
FINE = 0.05  # of the widest client: the steps in which widths are chosen
COLUMNS_PER_SUM = 1024  # of responses that are multiplied at once

Importance: TypeAlias = Mapping[str, Float64Array]  # group → (units,)
Curve: TypeAlias = Mapping[int, float]  # width → what is lost, in nats of divergence from answers
Size: TypeAlias = Callable[[Mapping[str, int]], int]


def unit_importance(answers: Answers, progress: Progress) -> list[Importance]:
    """Return how much it matters to the ensemble's answers to leave out each unit of each client.

    With y drawn from what the ensemble answers, the score ∂ log p(y) / ∂ gate of a unit that is
    multiplied by a gate has mean 0, and its mean square is twice the divergence per square of the
    gate's change (Fisher's information). So the squares of sums over a batch add up to that of its
    samples. The score of a unit is Σ W·∂/∂W over the weights that read it. Clients that are not
    part of the ensemble have no importance; where a model has no gradients, all units are alike.
    """
    modules, wanted = answers.modules, _Directions(answers)
    widths = modules.session.client_widths
    found: list[Importance] = []
    try:
        for number in range(len(widths)):
            progress("weighing units", number, len(widths))
            is_member = number in answers.members
            found.append(_importance(modules, number, answers, wanted) if is_member else {})
    except FedmergeError:
        return [{group: np.ones(width) for group, width in own.items()} for own in widths]
    return found


class _Directions:
    """What is drawn of the ensemble's answers, as directions (rows, outputs) of its outputs."""

    def __init__(self, answers: Answers) -> None:
        session, members = answers.session, answers.members
        each = [answers.ranked[k] for k in members]
        weights = ensemble_weights(session.averaging, members, each[0].shape[1])
        total = sum(weights, torch.zeros(()))
        self.shares = {k: own / total for k, own in zip(members, weights, strict=True)}
        self.are_classes = answers.are_classes
        self.mean = mean_outputs(each, weights)
        self.generator = torch.Generator().manual_seed(session.options.seed)
        self.spread = (variance(self.mean) or 1.0) ** 0.5
        self.rows_per_sample = len(self.mean) // len(answers.sets.ranking)

    def of(self, client: int, first: int, count: int) -> Tensor:
        """Return directions for some samples, times what the client counts."""
        rows = slice(first * self.rows_per_sample, (first + count) * self.rows_per_sample)
        mean = self.mean[rows]
        if self.are_classes:
            likely = probabilities(mean)
            drawn = torch.multinomial(likely, 1, generator=self.generator).squeeze(1)
            found = likely - functional.one_hot(drawn, likely.shape[1])
        else:
            found = torch.randn(mean.shape, generator=self.generator) / self.spread
        return self.shares[client] * found


def _importance(
    modules: ClientModules, number: int, answers: Answers, wanted: _Directions
) -> Importance:
    """Return the importance of one client's units, in all groups that weights read."""
    session, model = modules.session, modules.client(number)
    parameters = dict(_read_parameters(model, modules, session.plan))
    reading = list(parameters.values())
    total: dict[str, Float64Array] = {}
    done = 0
    with differentiable(model):
        for parameter in reading:
            parameter.requires_grad_(True)
        for batch in answers.sets.ranking.first(SAMPLES).batches(BATCH, modules.device):
            outputs = compared_rows(evaluated(model, batch, has_gradient=True))
            direction = wanted.of(number, done, len(batch[0])).to(outputs)
            with user_code("the model has no gradient"):
                # A sum, as gradients of several numbers have torch import its compiler.
                along = (outputs * direction).sum()
                gradients = torch.autograd.grad(along, reading, allow_unused=True)
            effects = dict(zip(parameters, map(_effect, reading, gradients), strict=True))
            scores = _scores(effects, session.plan, session.client_widths[number])
            for group, own in scores.items():
                total[group] = total.get(group, 0.0) + np.square(own)
            done += len(batch[0])
        for parameter in reading:
            parameter.requires_grad_(False)
    return {group: own / done for group, own in total.items()}


def _effect(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    """Return what it does to scale each number of a parameter, to first order."""
    return torch.zeros_like(parameter) if gradient is None else parameter.detach() * gradient


def _read_parameters(
    model: nn.Module, modules: ClientModules, plan: Plan
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that read hidden units, by the plan's names."""
    for name, parameter in model.named_parameters():
        tensor = plan.tensors.get(modules.own_names.get(name, ""))
        if tensor is not None and any(True for _ in _reading_axes(tensor)):
            yield modules.own_names[name], parameter


def _reading_axes(tensor: TensorPlan) -> Iterator[int]:
    for axis, layout in enumerate(tensor.axes):
        if axis != tensor.out and any(True for _ in groups_in(layout)):
            yield axis


def _scores(effects: Mapping[str, Tensor], plan: Plan, widths: Widths) -> dict[str, Float64Array]:
    """Return every group's scores (units,): of each unit the sum over all weights that read it."""
    found: dict[str, Float64Array] = {}
    for name, effect in effects.items():
        for axis in _reading_axes(plan.tensors[name]):
            layout = plan.tensors[name].axes[axis]
            along = effect.sum([k for k in range(effect.dim()) if k != axis]).double().cpu().numpy()
            for group in dict.fromkeys(groups_in(layout)):
                sums = along[unit_positions(layout, group, widths)].sum(1)
                found[group] = found.get(group, 0.0) + sums
    return found


@dataclass(frozen=True)
class Selection:
    """All clients' units of a group, those first that tell most of what matters."""

    order: IntArray  # (units,) numbers among all clients' units, one client after the other
    losses: Float64Array  # (units + 1,) what is lost if only so many of them are kept


def select_units(products: Float64Array, importance: Float64Array) -> Selection:
    """Order units by how much of all units' responses they explain, weighted by importance.

    Each turn takes the unit j that lowers Σ_v importance_v · |what the chosen leave of v|² most,
    by Σ_v importance_v · G_vj² / G_jj with G the products of what is left (a pivoted Cholesky
    factorisation). `products` are correlations (units, units).
    """
    count = len(products)
    left = products + NOISE * np.eye(count)
    rank = np.full(count, OPEN)
    weights = np.array(importance, dtype=np.float64)
    order: list[int] = []
    losses = [float(weights @ left.diagonal())]
    while len(order) < count:
        best = _best(left, weights, rank, math.ceil(count / TURNS))
        columns, variances = np.zeros((count, len(best))), left.diagonal().copy()
        for number, unit in enumerate(best):
            is_same = np.abs(products[unit]) > SAME
            rank[is_same] = np.minimum(rank[is_same], SAID)
            rank[unit] = CHOSEN
            weights[is_same] = 0.0
            column = left[:, unit] - columns[:, :number] @ columns[unit, :number]
            columns[:, number] = column / math.sqrt(max(column[unit], NOISE**2))
            variances -= columns[:, number] ** 2
            order.append(unit)
            losses.append(float(weights @ np.maximum(variances, 0.0)))
        left -= columns @ columns.T  # at once: one product is many times faster than its columns
    return Selection(np.array(order, dtype=np.int64), np.array(losses))


def _best(left: Float64Array, weights: Float64Array, rank: IntArray, count: int) -> list[int]:
    """Return the units of the highest rank that explain most of what is left.

    Of units that explain nothing the first ones: one client's, in whose order others' can join.
    """
    explained = (weights @ np.square(left)) / np.maximum(left.diagonal(), NOISE**2)
    ordered = np.lexsort((-explained, -rank))[:count]
    return [int(unit) for unit in ordered if rank[unit] == rank[ordered[0]]]


def select_all(
    plan: Plan, responses: Sequence[Mapping[str, FloatArray]], importance: Sequence[Importance]
) -> dict[str, Selection]:
    """Return every group's units of all clients by what they tell, where responses are known.

    Units inside others are as wide in all of these, so nothing is gained where one of them needs
    more: they stay as wide as they are.
    """
    known = [group for group in responses[0] if all(group in client for client in responses)]
    return {
        group: _selection(group, responses, importance)
        for group in known
        if group not in plan.inside
    }


def _selection(
    group: str, responses: Sequence[Mapping[str, FloatArray]], importance: Sequence[Importance]
) -> Selection:
    each = [client[group] for client in responses]
    matters = [
        own.get(group, np.zeros(len(rows))) for own, rows in zip(importance, each, strict=True)
    ]
    return select_units(_product(np.concatenate(each)), np.concatenate(matters))


def _product(rows: FloatArray) -> Float64Array:
    """Return the product of rows with each other in double precision, a run of columns at once."""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], COLUMNS_PER_SUM):
        run = rows[:, start : start + COLUMNS_PER_SUM].astype(np.float64)
        total += run @ run.T
    return total


def loss_curve(selection: Selection, widest: int) -> Curve:
    """Return what is lost at some widths, from the widest client's to that of all units."""
    units = len(selection.order)
    step = max(1, round(FINE * widest))
    widths = sorted({*range(widest, units, step), units})
    return {width: float(selection.losses[width]) for width in widths}


def choose_widths(
    session: Session, selections: Mapping[str, Selection], budget: int | None
) -> dict[str, int]:
    """Return a width per group that can grow: as little loss in all as the size budget allows."""
    growing = [group.name for group in session.plan.groups if group.can_grow]
    curves = {
        name: loss_curve(selections[name], session.widest[name])
        for name in growing
        if name in selections
    }
    ties = [tie for tie in session.plan.same_width if set(tie) <= set(curves)]
    return allocate(curves, ties, session.parameters, budget)


def allocate(
    curves: Mapping[str, Curve], ties: Sequence[Sequence[str]], size: Size, budget: int | None
) -> dict[str, int]:
    """Return a width per group: the least sum of losses that the size budget allows.

    From the narrowest on, what gains most per parameter is widened, again and again, as long as
    anything fits; losses between tried widths are interpolated. Tied groups widen together.
    """
    widths = {group: min(curve) for group, curve in curves.items()}
    tied = [list(tie) for tie in ties]
    bundles = tied + [[group] for group in curves if not any(group in tie for tie in tied)]
    while True:
        steps = [step for bundle in bundles for step in _steps(curves, widths, bundle)]
        now = size(widths)
        best, best_gain = None, 0.0
        for step in steps:
            cost = size({**widths, **step}) - now
            if budget is not None and now + cost > budget:
                continue
            gain = sum(_loss(curves[g], widths[g]) - _loss(curves[g], w) for g, w in step.items())
            if gain / max(cost, 1) > best_gain:
                best, best_gain = step, gain / max(cost, 1)
        if best is None:
            return widths
        widths |= best


def _steps(
    curves: Mapping[str, Curve], widths: Mapping[str, int], bundle: Sequence[str]
) -> Iterator[dict[str, int]]:
    """Yield wider widths of a bundle: a fine step on, and at the widths that were tried."""
    narrowest = min(curves[bundle[0]])
    fine = max(widths[g] for g in bundle) + max(1, round(FINE * narrowest))
    tried = {width for group in bundle for width in curves[group]}
    for width in sorted({fine, *tried}):
        step = {g: min(width, max(curves[g])) for g in bundle if width > widths[g]}
        if any(width > widths[g] for g, width in step.items()):
            yield step


def _loss(curve: Curve, width: int) -> float:
    """Return the loss at a width, interpolated between the tried ones."""
    for low, high in pairwise(sorted(curve)):
        if low <= width <= high:
            share = (width - low) / (high - low)
            return (1 - share) * curve[low] + share * curve[high]
    return curve[min(curve)] if width <= min(curve) else curve[max(curve)]
