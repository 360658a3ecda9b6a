"""Ways to merge clients that answered probes, and which of them is preferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from fedmerge.merging.client_modules import ClientModules
from fedmerge.merging.distillation import Distiller
from fedmerge.merging.fit import fit_merges
from fedmerge.merging.options import NO_LEAD
from fedmerge.merging.quality import (
    Agreement,
    Quality,
    agreement,
    are_class_scores,
    ensemble_weights,
    mean_outputs,
    outputs_on,
    same_decisions,
    variance,
)
from fedmerge.merging.result import Merge, average
from fedmerge.merging.session import Session
from fedmerge.probes.probe_inputs import Probes
from fedmerge.values.wording import AVERAGE, AVERAGES, BY_WEIGHTS, Progress

FACTOR = 2.0  # by which an average's outputs may spread less or more than the ensemble's


@dataclass(frozen=True)
class Answers:
    """What the clients answer to held-out probes, with the modules and probes that it is from."""

    modules: ClientModules
    probes: Probes  # on which units are compared and layers fitted
    held_out: Probes  # which choose ridges and candidates, and tell the quality
    outputs: tuple[Tensor, ...]  # every client's on the held-out probes
    members: tuple[int, ...]  # the clients that the ensemble is of: the finite ones
    ensemble: Tensor  # the members' mean outputs
    are_classes: bool  # whether outputs score classes, so that probabilities follow from them
    outliers: Sequence[int] = ()  # the clients that answer unlike the others
    dropped: tuple[str, ...] = ()  # clients that were left out for their answers

    @property
    def session(self) -> Session:
        """The clients that are merged."""
        return self.modules.session

    def agreement(self, outputs: Tensor) -> Agreement:
        """Compare outputs on the held-out probes with the ensemble's."""
        return agreement(outputs, self.ensemble, are_classes=self.are_classes)

    @property
    def best_client(self) -> int:
        """The client that is most alike the ensemble."""
        ranks = [self.agreement(outputs).rank for outputs in self.outputs]
        return ranks.index(max(ranks))

    @property
    def alike(self) -> float | None:
        """How often two clients decide alike, in the mean."""
        pairs = [same_decisions(*pair) for pair in combinations(self.outputs, 2)]
        return sum(pairs) / len(pairs) if pairs else None


def collect_answers(modules: ClientModules, probes: Probes, held_out: Probes) -> Answers:
    """Let every client answer the held-out probes."""
    outputs = [outputs_on(module, held_out, device=modules.device) for module in modules.clients]
    return answers_from(modules, probes, held_out, outputs)


def answers_from(
    modules: ClientModules, probes: Probes, held_out: Probes, outputs: Sequence[Tensor]
) -> Answers:
    """Return clients with their answers and the mean of these: by classes where counted."""
    finite = [k for k, own in enumerate(outputs) if torch.isfinite(own).all()]
    members = finite or list(range(len(outputs)))
    weights = ensemble_weights(modules.session.averaging, members, outputs[0].shape[1])
    ensemble = mean_outputs([outputs[k] for k in members], weights)
    are_classes = are_class_scores(ensemble, held_out.inputs)
    return Answers(modules, probes, held_out, tuple(outputs), tuple(members), ensemble, are_classes)


@dataclass(frozen=True)
class Candidate:
    """One way to merge, and how it answers the held-out probes."""

    name: str
    merge: Merge
    outputs: Tensor


def average_candidates(answers: Answers, by_weights: Merge) -> Iterator[Candidate]:
    """Yield the merges for which nothing is run, as far as the user left everything open."""
    options = answers.session.options
    if options.lead is not None or options.merge_units is not None:
        return
    if answers.session.is_equally_wide:
        yield _candidate(answers, AVERAGE, average(answers.session))
        if by_weights.shares_start and not by_weights.stays_in_place:
            yield _candidate(answers, BY_WEIGHTS, by_weights)


def possible_leads(answers: Answers, by_weights: Merge) -> tuple[int | None, ...]:
    """Return who may lead, as far as the user left that open.

    Units of clients that began with the same weights are alike, so that their mean means
    something: nobody has to lead.
    """
    if answers.session.options.lead is not None:
        return (answers.session.averaging.lead,)
    return (None,) if by_weights.shares_start else (None, answers.best_client)


def matched_candidates(
    answers: Answers,
    matched: Merge,
    leading: Sequence[int | None],
    steady: frozenset[str],
    progress: Progress,
) -> Iterator[Candidate]:
    """Yield a matching's ways to merge units: mean and fit, with each of the leads.

    `steady` are the weights whose rows can be compared (`invariance.steady_weights`).
    """
    units = answers.session.options.merge_units
    led = [_led(matched, lead) for lead in leading]
    fits: Sequence[Merge | None] = [None] * len(led)
    if units in (None, "fit"):
        fitted = [_with_units(merge, "fit") for merge in led]
        fits = fit_merges(
            answers.modules,
            fitted,
            answers.probes,
            answers.held_out,
            steady=steady,
            progress=progress,
        )
    for lead, merge, fit in zip(leading, led, fits, strict=True):
        label = "equal clients" if lead is None else f"{answers.session.names[lead]} leads"
        if units in (None, "mean"):
            for name, mean in _by_class_or_alike(_with_units(merge, "mean")):
                yield _candidate(answers, f"{label}, {name}", mean)
        if fit is not None:
            yield _candidate(answers, f"{label}, fit", fit)


def distilled_candidates(answers: Answers, merge: Merge, progress: Progress) -> Iterator[Candidate]:
    """Yield what training from two starts makes of a merge, if the options want it."""
    options = answers.session.options
    if options.distillation:
        distiller = Distiller(
            *(answers.modules, merge, answers.probes, answers.members),
            steps=options.distillation,
            seed=options.seed,
        )
        for name, trained in distiller.merges(answers.best_client, progress):
            yield _candidate(answers, name, trained)


def preferred_candidate(
    candidates: Sequence[Candidate], answers: Answers, by_weights: Merge
) -> Candidate:
    """Return the candidate that is most alike the ensemble, as a rule.

    Averages of clients that began with the same weights may be better than their ensemble, so
    that being less alike says nothing against them: the better one is kept where it works.
    """
    working = []
    if by_weights.shares_start:
        working = [c for c in candidates if c.name in AVERAGES and _works(c, answers, by_weights)]
    return best_candidate(working or candidates, answers)


def best_candidate(candidates: Sequence[Candidate], answers: Answers) -> Candidate:
    """Return the candidate most alike the ensemble, the earlier of two that are equal."""
    return max(candidates, key=lambda candidate: answers.agreement(candidate.outputs).rank)


def _works(candidate: Candidate, answers: Answers, by_weights: Merge) -> bool:
    """Return whether what clients learnt can be averaged.

    It can where the average is as much alike the ensemble as the best client is. Where all units
    are still in place, it is enough that weights did not cancel out, as outputs that hardly differ
    from input to input would tell.
    """
    best_alone = max(answers.agreement(outputs).decisions for outputs in answers.outputs)
    if answers.agreement(candidate.outputs).decisions >= best_alone:
        return True
    usual = variance(answers.ensemble)
    spreads_alike = usual / FACTOR**2 <= variance(candidate.outputs) <= usual * FACTOR**2
    return by_weights.stays_in_place and spreads_alike


def quality_of(chosen: Candidate, candidates: Sequence[Candidate], answers: Answers) -> Quality:
    """Return what the held-out probes tell of the chosen candidate, beside clients and others."""
    names = answers.session.names
    return Quality(
        source=answers.probes.source,
        samples=len(answers.held_out),
        merged=answers.agreement(chosen.outputs),
        clients=dict(zip(names, map(answers.agreement, answers.outputs), strict=True)),
        candidates={own.name: answers.agreement(own.outputs) for own in candidates},
        chosen=chosen.name,
        outliers=tuple(names[k] for k in answers.outliers),
        dropped=answers.dropped,
        alike=answers.alike,
        likeness={
            name: same_decisions(chosen.outputs, outputs)
            for name, outputs in zip(names, answers.outputs, strict=True)
        },
    )


def _candidate(answers: Answers, name: str, merge: Merge) -> Candidate:
    arrays = {tensor: merge.read(tensor) for tensor in merge.plan.tensors}
    model = answers.modules.merged(arrays)
    return Candidate(
        name, merge, outputs_on(model, answers.held_out, device=answers.modules.device)
    )


def _led(matched: Merge, lead: int | None) -> Merge:
    """Return a merge in which a client leads, or nobody."""
    name = NO_LEAD if lead is None else matched.session.names[lead]
    return replace(matched, session=matched.session.with_lead(lead, name))


def _with_units(merge: Merge, units: Literal["mean", "fit"]) -> Merge:
    options = replace(merge.options, merge_units=units)
    return replace(merge, session=replace(merge.session, options=options))


def _by_class_or_alike(merge: Merge) -> Iterator[tuple[str, Merge]]:
    """Yield a merge as it is, and where classes are counted also one whose last layer ignores it.

    That is the better one where the match is poor. A fit has no need of it: its last layer has
    the ensemble's answers themselves for its target.
    """
    yield "mean", merge
    session = merge.session
    if session.averaging.class_weights is not None:
        averaging = replace(session.averaging, class_weights=None)
        options = replace(session.options, class_counts=None)
        alike = replace(session, averaging=averaging, options=options)
        yield "mean, classes alike", replace(merge, session=alike)
