"""How much the answers of the clients' ensemble depend on each of their units."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
from fedmerge.user_code import user_code
from fedmerge.values.arrays import Float64Array
from fedmerge.values.plans import Plan, TensorPlan, Widths, groups_in, unit_positions
from fedmerge.values.wording import Progress

SAMPLES = 512  # of the probes, at most
BATCH = 8  # samples whose effects are summed before they are squared

Importance = Mapping[str, Float64Array]  # group → (units,)


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
