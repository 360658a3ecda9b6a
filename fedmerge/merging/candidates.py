"""Ways to merge clients that answered probes, and which of them is preferred."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedmerge.merging.answers import Answers
from fedmerge.merging.fit import fit_merges
from fedmerge.merging.options import NO_LEAD, Units, effort_of, leaves_units_open
from fedmerge.merging.quality import NEGLIGIBLE, Quality, outputs_on, same_decisions, variance
from fedmerge.merging.refinement import (
    FEWEST_STEPS,
    RATES,
    SHARES,
    SPENDING,
    TRIAL,
    WORTH,
    Refiner,
    between,
    started_from,
)
from fedmerge.merging.result import Merge, average
from fedmerge.values.wording import (
    AVERAGE,
    AVERAGES,
    BY_WEIGHTS,
    IN_PLACE,
    Progress,
    client_name,
    whole_percent,
)

FACTOR = 2.0  # by which an average's outputs may spread less or more than the ensemble's


@dataclass(frozen=True)
class Candidate:
    """One way to merge, and how it answers the judging probes."""

    name: str
    merge: Merge
    outputs: Tensor


def average_candidates(answers: Answers, by_weights: Merge) -> Iterator[Candidate]:
    """Yield the merges for which nothing is run, as far as the user left everything open."""
    if _is_open(answers) and answers.session.is_equally_wide:
        yield candidate_of(answers, AVERAGE, average(answers.session))
        if by_weights.shares_start and not by_weights.stays_in_place:
            yield candidate_of(answers, BY_WEIGHTS, by_weights)


def _is_open(answers: Answers) -> bool:
    """Return whether the user left it open how units are merged."""
    return leaves_units_open(answers.session.options)


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
            answers.sets.varied,
            answers.sets.held_out,
            steady=steady,
            progress=progress,
        )
    for lead, merge, fit in zip(leading, led, fits, strict=True):
        label = "equal clients" if lead is None else f"{answers.session.names[lead]} leads"
        if units in (None, "mean"):
            for name, mean in _by_class_or_alike(_with_units(merge, "mean")):
                yield candidate_of(answers, f"{label}, {name}", mean)
        if fit is not None:
            yield candidate_of(answers, f"{label}, fit", fit)


def in_place_candidates(
    answers: Answers, by_weights: Merge, averages: Sequence[Candidate], progress: Progress
) -> Iterator[Candidate]:
    """Yield the fitted average of clients that share their start, but no average of whom works.

    And if the user wants it: a fit comes nearer to the ensemble than an average that works, but is
    no better for it.
    """
    is_wanted = answers.session.options.merge_units == "fit-in-place"
    in_place = by_weights.stays_in_place
    is_open = by_weights.shares_start and bool(averages)
    if is_wanted or (is_open and not any(works(c, answers, in_place=in_place) for c in averages)):
        yield fit_in_place(answers, progress)


def fit_in_place(answers: Answers, progress: Progress) -> Candidate:
    """Return the average whose layers are fitted to the clients' mean outputs, unit by place.

    Units of clients that began with the same weights mean the same where they are.
    """
    [fit] = fit_merges(
        answers.modules,
        [_with_units(average(answers.session), "fit-in-place")],
        answers.sets.varied,
        answers.sets.held_out,
        steady=frozenset(answers.modules.own_names.values()),
        progress=progress,
    )
    return candidate_of(answers, IN_PLACE, fit)


def client_candidates(answers: Answers, matched: Merge) -> Iterator[Candidate]:
    """Yield every client as it is: what is not nearer to the ensemble is no better than it.

    At its own widths, or in a merge's layout where these differ from the others'.
    """
    if answers.session.plan.kept or not _is_open(answers):
        return  # what is kept is the first client's in every merge
    is_free = answers.session.is_equally_wide
    layout = average(answers.session) if is_free else matched
    for number, name in enumerate(answers.session.names):
        own = started_from(layout, number)
        yield Candidate(client_name(name), own, answers.outputs[number])


def refined_candidates(
    answers: Answers, start: Candidate, progress: Progress
) -> Iterator[Candidate]:
    """Yield what refinement makes of a merge and of the best client, the better one for longer.

    Each round begins where the best one before ended, is twice as long and learns half as fast.
    """
    options = answers.session.options
    if answers.agreement(start.outputs).distance <= NEGLIGIBLE:
        return
    spending = SPENDING[effort_of(options)]
    refiner = Refiner(
        *(answers.modules, start.merge, answers.sets.fitting, answers.members),
        augmentation=answers.sets.augmentation,
        seed=options.seed,
    )
    steps = refiner.affordable_steps(spending)
    if steps < FEWEST_STEPS:
        return
    trials = []
    for trial in _trials(answers, start, refiner, round(TRIAL * steps), progress):
        trials.append(trial)
        yield trial.candidate
    best = best_candidate([trial.candidate for trial in trials], answers)
    [chosen] = [trial for trial in trials if trial.candidate is best]
    for number in range(spending.rounds):
        rate = chosen.rate / 2**number
        trained = refiner.refine(best.merge, steps << number, progress, rate=rate)
        label = f"refined longer from {chosen.source}{', again' * number}"
        longer = _on_the_way(answers, label, best.merge, trained)
        yield longer
        if best_candidate([best, longer], answers) is best or _gains_little(best, longer, answers):
            return
        best = longer


@dataclass(frozen=True)
class _Trial:
    """What a short refinement makes of a start."""

    candidate: Candidate
    source: str
    rate: float


def _trials(
    answers: Answers, start: Candidate, refiner: Refiner, steps: int, progress: Progress
) -> Iterator[_Trial]:
    """Yield what a few steps make of every start; slower ones where that was worse than before."""
    for begun in _starts(answers, start):
        for rate, label in RATES.items():
            trained = refiner.refine(begun.merge, steps, progress, rate=rate)
            name = f"refined {label}from {begun.name}"
            found = _on_the_way(answers, name, begun.merge, trained)
            yield _Trial(found, begun.name, rate)
            if best_candidate([begun, found], answers) is found:
                break


def _on_the_way(answers: Answers, name: str, start: Merge, end: Merge) -> Candidate:
    """Return what is nearest to the ensemble on the way from a start to what it became."""
    places = {share: f", {whole_percent(share)} of the way" for share in SHARES[1:]}
    found = [
        candidate_of(answers, name + places.get(share, ""), between(start, end, share))
        for share in SHARES
    ]
    return best_candidate(found, answers)


def _starts(answers: Answers, start: Candidate) -> list[Candidate]:
    """Return the merge, and the client nearest to the ensemble in its layout."""
    client = answers.best_client
    name = client_name(answers.session.names[client])
    own = Candidate(name, started_from(start.merge, client), answers.outputs[client])
    return [start, own]


def _gains_little(before: Candidate, after: Candidate, answers: Answers) -> bool:
    one, other = (answers.agreement(own.outputs).distance for own in (before, after))
    return other > (1 - WORTH) * one


def preferred_candidate(
    candidates: Sequence[Candidate], answers: Answers, by_weights: Merge
) -> Candidate:
    """Return the candidate that is most alike the ensemble, as a rule.

    Averages of clients that began with the same weights may be better than their ensemble, so
    that being less alike says nothing against them: the better one is kept where it works.
    """
    working = []
    if by_weights.shares_start:
        in_place = by_weights.stays_in_place
        working = [
            c for c in candidates if c.name in AVERAGES and works(c, answers, in_place=in_place)
        ]
    return best_candidate(working or candidates, answers)


def is_settled(chosen: Candidate, by_weights: Merge) -> bool:
    """Return whether an average is kept that may be better than the ensemble is."""
    return by_weights.shares_start and chosen.name in AVERAGES


def best_candidate(candidates: Sequence[Candidate], answers: Answers) -> Candidate:
    """Return the candidate most alike the ensemble, the earlier of two that are equal."""
    return max(candidates, key=lambda candidate: answers.agreement(candidate.outputs).rank)


def works(candidate: Candidate, answers: Answers, *, in_place: bool) -> bool:
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
    return in_place and spreads_alike


def quality_of(chosen: Candidate, candidates: Sequence[Candidate], answers: Answers) -> Quality:
    """Return what the held-out probes tell of the chosen candidate, beside clients and others."""
    names = answers.session.names
    return Quality(
        source=answers.sets.fitting.source,
        samples=len(answers.sets.judging),
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


def candidate_of(answers: Answers, name: str, merge: Merge) -> Candidate:
    """Run a merge on the judging probes."""
    arrays = {tensor: merge.read(tensor) for tensor in merge.plan.tensors}
    model = answers.modules.merged(arrays)
    return Candidate(
        name, merge, outputs_on(model, answers.sets.judging, device=answers.modules.device)
    )


def _led(matched: Merge, lead: int | None) -> Merge:
    """Return a merge in which a client leads, or nobody."""
    name = NO_LEAD if lead is None else matched.session.names[lead]
    return replace(matched, session=matched.session.with_lead(lead, name))


def _with_units(merge: Merge, units: Units) -> Merge:
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
