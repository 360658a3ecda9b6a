"""What clients answer to probes, as they are and changed, and the ensemble that this makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from fedmerge.merging.client_modules import ClientModules
from fedmerge.merging.quality import (
    DATA,
    Agreement,
    agreement,
    are_class_scores,
    distance,
    ensemble_weights,
    mean_outputs,
    outputs_on,
    same_decisions,
)
from fedmerge.merging.session import Session
from fedmerge.probes.augmentation import Augmentation, augmentation_for, mirrored
from fedmerge.probes.descent import lowest
from fedmerge.probes.probe_inputs import Probes

COPIES = 3  # changed copies of the held-out probes: nets know many inputs by heart as they are
FLIPPED = 200  # probes that tell whether left and right are alike
ALIKE_FLIPPED = 0.8  # share of them whose mirror image is decided alike where they are
ALIKE_COUNT = 1.5  # clients whose weights differ by at most this factor count alike
PRIOR = 0.3  # nats that weights are worth which differ by a factor of e, in the mean
POOLED_ROWS = 4000  # that weights go by, at most
DIGITS = 3  # that count of a weight: what is recorded is what was used


@dataclass(frozen=True)
class ProbeSets:
    """Probes by what they are for."""

    fitting: Probes  # on which units are compared and merges refined
    held_out: Probes  # which choose the strength of ridges
    judging: Probes  # held-out ones with changed copies or others: they choose among candidates
    ranking: Probes  # the others, changed: with the judging ones they rank clients
    augmentation: Augmentation  # how probes are changed

    @property
    def varied(self) -> Probes:
        """The fitting probes as they are and changed: layers that are fitted to both serve more."""
        return self.fitting.joined(self.ranking) if self.augmentation.ways else self.fitting


@dataclass(frozen=True)
class Answers:
    """What the clients answer, with the modules and probes that it is from."""

    modules: ClientModules
    sets: ProbeSets
    outputs: tuple[Tensor, ...]  # every client's on the judging probes
    ranked: tuple[Tensor, ...]  # every client's on the ranking ones
    members: tuple[int, ...]  # the clients that the ensemble is of: the finite ones
    ensemble: Tensor  # the members' mean outputs on the judging probes
    distances: tuple[float, ...]  # every client's from the ensemble, on both
    are_classes: bool  # whether outputs score classes, so that probabilities follow from them
    outliers: Sequence[int] = ()  # the clients that answer unlike the others
    dropped: tuple[str, ...] = ()  # clients that were left out for their answers

    @property
    def session(self) -> Session:
        """The clients that are merged."""
        return self.modules.session

    def agreement(self, outputs: Tensor) -> Agreement:
        """Compare outputs on the judging probes with the ensemble's."""
        return agreement(outputs, self.ensemble, are_classes=self.are_classes)

    @property
    def best_client(self) -> int:
        """The client nearest to the ensemble: by all probes, as it is fitted to none."""
        return self.distances.index(min(self.distances))

    @property
    def alike(self) -> float | None:
        """How often two clients decide alike, in the mean."""
        pairs = [same_decisions(*pair) for pair in combinations(self.outputs, 2)]
        return sum(pairs) / len(pairs) if pairs else None

    def of_clients(self, modules: ClientModules, kept: Sequence[int]) -> Answers:
        """Return the answers of some of the clients, whose modules these are."""
        outputs, ranked = ([own[k] for k in kept] for own in (self.outputs, self.ranked))
        return answers_from(modules, self.sets, outputs, ranked)


def collect_answers(
    modules: ClientModules,
    probes: Probes,
    held_out: Probes,
    *,
    judging: Probes | None = None,
    augment: Sequence[str] = (),
) -> Answers:
    """Let every client answer all probes, changed and, of the judging ones, as they are.

    Without judging probes of their own, held-out ones and changed copies of them judge.
    """
    seed = modules.session.options.seed
    augmentation = augmentation_for(probes, augment)
    if augmentation.flips and not _may_flip(modules, probes):
        augmentation = augmentation.without("flips")
    sets = ProbeSets(
        probes,
        held_out,
        judging=judging or augmentation.copies(held_out, COPIES, seed=seed),
        ranking=augmentation.changed(probes, seed=seed),
        augmentation=augmentation,
    )
    outputs, ranked = (
        [outputs_on(module, own, device=modules.device) for module in modules.clients]
        for own in (sets.judging, sets.ranking)
    )
    return answers_from(modules, sets, outputs, ranked)


def answers_from(
    modules: ClientModules, sets: ProbeSets, outputs: Sequence[Tensor], ranked: Sequence[Tensor]
) -> Answers:
    """Return clients with their answers and the mean of these: by classes where counted."""
    finite = [k for k, own in enumerate(outputs) if torch.isfinite(own).all()]
    members = finite or list(range(len(outputs)))
    weights = ensemble_weights(modules.session.averaging, members, outputs[0].shape[1])
    ensemble, other = (mean_outputs([o[k] for k in members], weights) for o in (outputs, ranked))
    are_classes = are_class_scores(ensemble, sets.judging.inputs)
    wanted = torch.cat([ensemble, other])
    distances = (
        distance(torch.cat(own), wanted, are_classes=are_classes)
        for own in zip(outputs, ranked, strict=True)
    )
    return Answers(
        modules,
        sets,
        tuple(outputs),
        tuple(ranked),
        tuple(members),
        ensemble,
        tuple(torch.nan_to_num(torch.tensor(list(distances)), nan=torch.inf).tolist()),
        are_classes,
    )


def with_voices(answers: Answers) -> Answers:
    """Return answers in whose ensemble a client that is too sure of itself counts less.

    On real inputs, and where the user says nothing of weights or classes.
    """
    options = answers.session.options
    is_given = bool(options.client_weight) or options.class_counts is not None
    is_known = answers.are_classes and answers.sets.fitting.source == DATA
    if is_given or not is_known or len(answers.members) < len(answers.outputs):
        return answers
    scores = [torch.cat(own) for own in zip(answers.outputs, answers.ranked, strict=True)]
    weights = pooled_weights(scores)
    if len(set(weights)) == 1:
        return answers
    session = answers.session.with_options(
        client_weight=dict(zip(answers.session.names, weights, strict=True))
    )
    weighed = answers_from(
        answers.modules.of(session), answers.sets, answers.outputs, answers.ranked
    )
    return replace(weighed, outliers=answers.outliers, dropped=answers.dropped)


def pooled_weights(scores: Sequence[Tensor]) -> list[float]:
    """Return every client's weight by its scores (rows, classes): 1 at most, and for all if alike.

    A client that was trained for long on few samples, or misses classes, has large scores where it
    knows nothing, and decides alone in a mean of scores; a mean of probabilities bounds what one
    client can say. So the weights are those whose mean of scores comes nearest to it,
    min_w KL(mean_k softmax(s_k) ‖ softmax(mean_k w_k s_k)) + PRIOR · variance(log w).
    """
    step = -(-len(scores[0]) // POOLED_ROWS)
    each = torch.stack([own[::step].double() for own in scores])
    wanted = each.softmax(2).mean(0)

    def loss(log_weights: Tensor) -> Tensor:
        mean = (log_weights.exp()[:, None, None] * each).mean(0)
        missed = -(wanted * mean.log_softmax(1)).sum(1).mean()
        return missed + PRIOR * log_weights.var(correction=0)

    log_weights = lowest(loss, torch.zeros(len(each), dtype=torch.double))
    weights = (log_weights - log_weights.max()).exp().tolist()
    if not 0 < min(weights) < 1 / ALIKE_COUNT:  # nor where there is no best: scores beyond measure
        return [1.0] * len(scores)
    return [float(f"{weight:.{DIGITS}g}") for weight in weights]


def _may_flip(modules: ClientModules, probes: Probes) -> bool:
    """Return whether clients decide alike on most mirror images, as for pictures of animals.

    Of letters they do not, and what is no letter teaches little.
    """
    few = probes.first(FLIPPED)
    pair = (few, mirrored(few))
    alike = [
        same_decisions(*(outputs_on(own, given, device=modules.device) for given in pair))
        for own in modules.clients
    ]
    return sum(alike) / len(alike) >= ALIKE_FLIPPED
