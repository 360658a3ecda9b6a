"""Merge clients by what they do: probe, respond, choose widths, match, try candidates, choose."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from fedmerge.errors import FedmergeError, UsageError
from fedmerge.matching import represent
from fedmerge.merging.answers import Answers, collect_answers, with_voices
from fedmerge.merging.by_weights import (
    Compared,
    Matcher,
    Responses,
    match_groups,
    merge_by_weights,
    with_doubt,
)
from fedmerge.merging.candidates import (
    Candidate,
    average_candidates,
    best_candidate,
    client_candidates,
    in_place_candidates,
    is_settled,
    matched_candidates,
    possible_leads,
    preferred_candidate,
    quality_of,
    refined_candidates,
)
from fedmerge.merging.client_modules import ClientModules, steady_weights
from fedmerge.merging.fit import FEW
from fedmerge.merging.importance import Selection, choose_widths, select_all, unit_importance
from fedmerge.merging.options import effort_of, needs_probes
from fedmerge.merging.outlying_clients import FEWEST, outliers
from fedmerge.merging.quality import outputs_on
from fedmerge.merging.result import Merge, Solution, merge_of
from fedmerge.merging.session import Session, prepare
from fedmerge.probes.options import ProbeOptions
from fedmerge.probes.probe_inputs import normalised, unit_responses
from fedmerge.probes.sources import ProbedClients, judging_probes, make_probes, neutral_probes
from fedmerge.values.plans import is_alone
from fedmerge.values.wording import Progress, silent

if TYPE_CHECKING:  # the help of commands comes from here, which has to be quick
    pass
from fedmerge.merging.options import MatchOptions

HELD_OUT = 0.2  # of the probes: they choose ridges and, changed, candidates
RESPONSE_SHARE = 0.9  # of responses in what units have in common; the rest are weights
THRESHOLD = 0.95  # correlation from which units are merged though the budget would keep them
FEWEST_CLIENTS = 2  # that there is something to be merged of


def merge_by_probes(session: Session, probing: ProbeOptions, progress: Progress) -> Merge:
    """Return the candidate nearest to the clients' ensemble on held-out probes.

    Where the user asks for no probes and the model can't be run on them, weights alone are matched.
    """
    try:
        answers = probe_clients(session, probing, progress)
    except UsageError:
        raise
    except FedmergeError as error:
        if probing.asked_for or needs_probes(session.options):
            raise
        return _by_weights_with_note(session, error, progress)
    answers, by_weights = with_weights(answers)
    return choose_merge(answers, by_weights, respond(answers, progress), probing, progress)


def with_weights(answers: Answers) -> tuple[Answers, Merge]:
    """Return the answers with how much each client counts, and the merge by weights alone.

    Clients that share their start count alike.
    """
    by_weights = merge_by_weights(answers.session, silent, only_if_shared=True)
    return answers if by_weights.shares_start else with_voices(answers), by_weights


def choose_merge(
    answers: Answers,
    by_weights: Merge,
    responses: UnitResponses,
    probing: ProbeOptions,
    progress: Progress,
) -> Merge:
    """Match, try every way to merge, and return the best with what is known of its quality."""
    growth = answers.session.dials.max_growth
    matched = match_within(growth, answers.session, responses, by_weights, progress)
    leads = possible_leads(answers, by_weights)
    averages = list(average_candidates(answers, by_weights))
    candidates = [
        *averages,
        *in_place_candidates(answers, by_weights, averages, progress),
        *matched_candidates(answers, matched, leads, responses.steady, progress),
    ]
    chosen = preferred_candidate(candidates, answers, by_weights)
    others: list[Candidate] = []
    notes: list[str] = []
    if not is_settled(chosen, by_weights):
        others, notes = _refined(answers, chosen, progress)
        others += client_candidates(answers, matched)
    chosen = best_candidate([chosen, *others], answers)
    quality = quality_of(chosen, [*candidates, *others], answers)
    return replace(
        chosen.merge,
        quality=quality,
        in_place=by_weights.in_place,
        probes=probing.to_json(),
        warnings=(*chosen.merge.warnings, *notes, *quality.warnings()),
    )


def match_within(
    growth: float | None,
    session: Session,
    responses: UnitResponses,
    by_weights: Merge,
    progress: Progress,
) -> Merge:
    """Return the matching within a size budget whose units are to be merged.

    Units of clients trained apart correlate by 0.3 to 0.6, so that their means are neither: one
    client's stands for them, unless the user wants means, or says what is to be matched.
    """
    options = session.options
    wants_means = options.merge_units == "mean" or options.match_threshold is not None
    if growth is None or wants_means or by_weights.shares_start:
        return match_by_responses(session, responses, growth, progress)
    return represent_clients(session, responses, growth, progress)


def _refined(
    answers: Answers, start: Candidate, progress: Progress
) -> tuple[list[Candidate], list[str]]:
    """Return what refinement makes of a merge; where nobody asked for much, it may fail."""
    try:
        return list(refined_candidates(answers, start, progress)), []
    except FedmergeError as error:
        if answers.session.options.effort == "thorough":
            raise
        return [], [f"the merge was not refined: {error.brief}"]


def probe_clients(session: Session, probing: ProbeOptions, progress: Progress) -> Answers:
    """Make probes and let every client answer them; with `drop_outliers`, odd clients go."""
    options = replace(session.options, effort=effort_of(session.options))
    session = replace(session, options=options)  # dials may be those of `max_params`
    is_strict = session.options.drop_outliers
    diverged = [c.name for c in session.clients if is_strict and not c.is_finite()]
    modules = ClientModules(session)
    if diverged:
        session = _without(session, diverged)
        modules = modules.of(session)
    clients = ProbedClients(
        modules.clients,
        modules.sample_inputs(),
        probing,
        seed=session.options.seed,
        device=session.device,
        progress=progress,
    )
    probes = make_probes(clients)
    kept, held_out = probes.split(int(HELD_OUT * len(probes)), seed=session.options.seed)
    judging = judging_probes(clients, held_out)
    answers = collect_answers(modules, kept, held_out, judging=judging, augment=probing.augment)
    answers = replace(answers, dropped=tuple(diverged))
    if len(session.clients) < FEWEST:
        return answers
    outputs: Sequence[Tensor] = answers.outputs
    neutral = neutral_probes(clients, probes)
    if neutral is not probes:  # on which clients have answered
        outputs = [outputs_on(module, neutral, device=modules.device) for module in modules.clients]
    odd = outliers(outputs)
    if is_strict and odd:
        return _without_clients(answers, odd, outputs)
    return replace(answers, outliers=odd)


def _without_clients(answers: Answers, odd: Sequence[int], outputs: Sequence[Tensor]) -> Answers:
    """Return the answers of all clients but the odd ones.

    `outputs` are those of every client on neutral probes, by which it is told to be odd.
    """
    session = answers.session
    dropped = [session.names[k] for k in odd]
    kept = [k for k in range(len(session.clients)) if k not in odd]
    remaining = answers.of_clients(answers.modules.of(_without(session, dropped)), kept)
    is_telling = len(kept) >= FEWEST
    others = outliers([outputs[k] for k in kept]) if is_telling else []
    return replace(remaining, outliers=others, dropped=(*answers.dropped, *dropped))


@dataclass(frozen=True)
class UnitResponses:
    """How every client's units respond to probes, and which of them tell most that matters."""

    clients: Sequence[Responses]
    selections: Mapping[str, Selection]
    steady: frozenset[str]  # weights that read the same rows whatever units' order is


def respond(answers: Answers, progress: Progress = silent) -> UnitResponses:
    """Run every client on the probes, and compare its units with those of the others."""
    modules, session = answers.modules, answers.session
    probes = answers.sets.fitting
    steady = steady_weights(modules, next(probes.batches(FEW, modules.device)))
    names = {model: name for model, name in modules.own_names.items() if name in steady}
    by_client = []
    for module, widths in zip(modules.clients, session.client_widths, strict=True):
        units = unit_responses(
            module,
            session.plan,
            widths,
            probes,
            names=names,
            seed=session.options.seed,
            device=modules.device,
        )
        by_client.append({group: normalised(values) for group, values in units.items()})
    return UnitResponses(
        by_client, select_all(session.plan, by_client, unit_importance(answers, progress)), steady
    )


def match_by_responses(
    session: Session, responses: UnitResponses, growth: float | None, progress: Progress
) -> Merge:
    """Return the merge of groups that are matched by responses and weights within a size budget."""
    compared = Compared(responses.clients, RESPONSE_SHARE)
    limits: dict[str, int] = {}
    bounded = session
    if growth is not None:
        chosen = choose_widths(session, responses.selections, session.budget(growth))
        limits = session.limits(1.0) | chosen
        threshold = session.options.match_threshold or THRESHOLD
        bounded = replace(session, dials=replace(session.dials, threshold=threshold))
    matchings = match_groups(bounded, limits, progress, compared=compared)
    assert matchings is not None
    return merge_of(session, Solution(matchings, None))


def represent_clients(
    session: Session, responses: UnitResponses, growth: float, progress: Progress
) -> Merge:
    """Return the merge whose units each stand for one client's unit, within a size budget.

    Units that hold others, as heads do, and those whose responses are not known are matched.
    """
    chosen = session.widest | choose_widths(session, responses.selections, session.budget(growth))
    matchers: dict[str, Matcher] = {
        group: partial(
            represent, order=own.order, width=chosen[group], solver=session.options.solver
        )
        for group, own in responses.selections.items()
        if is_alone(session.plan, group)
    }
    matchings = match_groups(
        replace(session, dials=replace(session.dials, threshold=THRESHOLD)),
        chosen,
        progress,
        compared=Compared(responses.clients, RESPONSE_SHARE),
        matchers=matchers,
    )
    assert matchings is not None
    return merge_of(session, Solution(matchings, None))


def _without(session: Session, dropped: Sequence[str]) -> Session:
    """Return what is left of a session without some clients."""
    kept = [client for client in session.clients if client.name not in dropped]
    if len(kept) < FEWEST_CLIENTS:
        raise UsageError(f"`drop_outliers` leaves fewer than {FEWEST_CLIENTS} clients")
    options = without_clients(session.options, dropped)
    held = session.config  # the plan is held to it already
    remaining = prepare(
        kept, options, plan=session.plan, model=session.model, device=session.device
    )
    return replace(remaining, config=held)


def _by_weights_with_note(session: Session, error: FedmergeError, progress: Progress) -> Merge:
    merge = with_doubt(merge_by_weights(session, progress))
    note = f"units were matched by their weights alone, as no probes run: {error.brief}"
    return replace(merge, warnings=(*merge.warnings, note))


def without_clients(options: MatchOptions, names: Collection[str]) -> MatchOptions:
    """Return the options of a merge that leaves some clients out."""
    if options.lead in names:
        raise UsageError(f"`lead` names '{options.lead}', which `drop_outliers` leaves out")
    weights, counts = options.client_weight, options.class_counts
    return replace(
        options,
        client_weight={name: w for name, w in weights.items() if name not in names},
        class_counts=counts and {name: c for name, c in counts.items() if name not in names},
    )
