"""What a merge's size buys: agreement with the clients' ensemble at a range of size budgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedmerge.errors import UsageError
from fedmerge.merging.answers import Answers
from fedmerge.merging.by_probes import (
    UnitResponses,
    choose_merge,
    match_within,
    probe_clients,
    respond,
    with_weights,
)
from fedmerge.merging.candidates import best_candidate, matched_candidates
from fedmerge.merging.methods import is_probed
from fedmerge.merging.quality import Agreement
from fedmerge.merging.result import Merge
from fedmerge.merging.session import Session
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.wording import Progress

GROWTHS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)  # that are tried
ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Point:
    """A size, and how often a model of that size decides as the ensemble does."""

    name: str  # of the client, of the way to merge, or the ensemble
    budget: float | None  # the growth that was allowed, of merges
    growth: float  # parameters ÷ those of a net with each group at its widest client's width
    parameters: int
    agreement: Agreement

    def to_json(self) -> dict[str, Any]:
        """Return the point as JSON values."""
        return {**vars(self), "agreement": self.agreement.to_json()}


@dataclass(frozen=True)
class Frontier:
    """Sizes against agreement with the ensemble, and the merge at the budget that was asked for."""

    merge: Merge
    clients: tuple[Point, ...]
    merges: tuple[Point, ...]  # from the smallest budget to the largest, not refined
    ensemble: Point  # of all clients, side by side

    def to_json(self) -> dict[str, Any]:
        """Return all points as JSON values, without the merge."""
        return {
            "clients": [point.to_json() for point in self.clients],
            "points": [point.to_json() for point in (*self.merges, self.ensemble)],
        }


def survey_sizes(session: Session, probing: ProbeOptions, progress: Progress) -> Frontier:
    """Merge clients, and tell what other size budgets would give.

    Probes, responses and loss curves are made once.
    """
    if not is_probed(session, probing, "`frontier`"):
        raise UsageError("`frontier`: the clients have no hidden units that could be matched")
    answers = probe_clients(session, probing, progress)
    answers, by_weights = with_weights(answers)
    responses = respond(answers, progress)
    merge = choose_merge(answers, by_weights, responses, probing, progress)
    survey = _Survey(answers, by_weights, responses, merge)
    surveyed = Frontier(
        merge=merge,
        clients=tuple(survey.clients()),
        merges=tuple(survey.merges(progress)),
        ensemble=survey.point(ENSEMBLE, answers.session.ensemble_parameters, answers.ensemble),
    )
    return replace(surveyed, merge=replace(merge, frontier=surveyed.to_json()))


@dataclass(frozen=True)
class _Survey:
    """Tries sizes of merges of clients that answered probes, beside the size that was chosen."""

    answers: Answers
    by_weights: Merge
    responses: UnitResponses
    chosen: Merge

    def clients(self) -> Iterator[Point]:
        """Yield what every client has alone."""
        session = self.answers.session
        for name, widths, outputs in zip(
            session.names, session.client_widths, self.answers.outputs, strict=True
        ):
            yield self.point(name, session.parameters(widths), outputs)

    def merges(self, progress: Progress) -> Iterator[Point]:
        """Yield the better of mean and fit at every budget that buys more units than the last.

        The client that leads is the chosen merge's.
        """
        budgets, before = self._budgets(), None
        leading = (self.chosen.session.averaging.lead,)
        for number, budget in enumerate(budgets):
            progress("trying sizes", number, len(budgets))
            session = self.answers.session
            matched = match_within(budget, session, self.responses, self.by_weights, progress)
            if matched.widths != before:
                before = matched.widths
                steady = self.responses.steady
                candidates = matched_candidates(self.answers, matched, leading, steady, progress)
                chosen = best_candidate(list(candidates), self.answers)
                point = self.point(chosen.name, matched.parameters, chosen.outputs)
                yield replace(point, budget=budget)
        progress("trying sizes", len(budgets), len(budgets))

    def _budgets(self) -> list[float]:
        """Return the growths to try: a merge larger than all clients together is of no use."""
        session = self.chosen.session
        most = session.ensemble_parameters / session.widest_parameters
        wanted = session.dials.max_growth
        growths = {growth for growth in GROWTHS if growth <= most}
        return sorted(growths if wanted is None else growths | {wanted})

    def point(self, name: str, parameters: int, outputs: Tensor) -> Point:
        """Return the point of a model by its outputs on the held-out probes."""
        growth = parameters / self.answers.session.widest_parameters
        return Point(name, None, growth, parameters, self.answers.agreement(outputs))
