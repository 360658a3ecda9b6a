"""Candidates for a one-shot merge of clients that answered probes, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

from fedmerge.probing import Probes
from fedmerge.probing.signatures import normalised, unit_responses
from fedmerge.types.arrays import FloatArray
from fedmerge.types.plans import Norm
from fedmerge.types.progress import Progress, silent
from fedmerge.types.words import AVERAGE, AVERAGES, BY_WEIGHTS
from fedmerge.workflow.layers import Problem, Solution, match_groups, solve
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.agreement import (
    Agreement,
    agreement,
    answers,
    ensemble_weights,
    mean_answers,
    variance,
)
from fedmerge.workflow.oneshot.correct import Corrector, is_corrected_on_probes
from fedmerge.workflow.oneshot.curves import Curve, choose_widths, loss_curves
from fedmerge.workflow.oneshot.distill import Distiller
from fedmerge.workflow.oneshot.fit import FEW, Fitter
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.outliers import FEWEST, outliers
from fedmerge.workflow.oneshot.quality import Quality
from fedmerge.workflow.oneshot.steady import own_norms, steady_weights
from fedmerge.workflow.oneshot.targets import used_once
from fedmerge.workflow.options import CORRECTING, NO_LEAD, MatchOptions
from fedmerge.workflow.prepared import Prepared, line_up, merge_of, problem_of
from fedmerge.workflow.weights import merge_by_weights

HELD_OUT = 0.2  # of the probes: they choose ridges and candidates, and tell the quality
RESPONSE_SHARE = {"both": 0.9, "activations": 1.0}  # of responses in what units have in common
FACTOR = 2.0  # by which an average's outputs may spread less or more than the ensemble's
THRESHOLD = 0.95  # correlation from which units are merged though the budget would keep them


@dataclass(frozen=True)
class Candidate:
    """One way to merge: which client leads, and whether layers are averaged or fitted."""

    name: str
    merge: Merge
    outputs: Tensor  # on the held-out probes


@dataclass(frozen=True)
class Scene:
    """Clients, probes, and what the clients answer to the held-out ones."""

    models: Models
    options: MatchOptions
    probes: Probes
    held_out: Probes
    neutral: Probes  # inputs that no client had a hand in, to tell which one is unlike the others
    clients: tuple[Tensor, ...]  # every client's outputs on the held-out probes
    dropped: tuple[str, ...] = ()  # clients that were left out for their answers

    @classmethod
    def on(
        cls, models: Models, options: MatchOptions, probes: Probes, neutral: Probes | None = None
    ) -> Scene:
        """Let every client answer the held-out part of the probes, which are neutral by default."""
        kept, held_out = probes.split(int(HELD_OUT * len(probes)), seed=options.seed)
        numbers = range(len(models.prepared.clients))
        each = (answers(models.client(k), held_out, device=models.device) for k in numbers)
        return cls(models, options, kept, held_out, neutral or probes, tuple(each))

    @property
    def prepared(self) -> Prepared:
        """The clients that are merged."""
        return self.models.prepared

    @property
    def _stored(self) -> Prepared:
        """The clients as their files have them."""
        return self.prepared

    @cached_property
    def ensemble(self) -> Tensor:
        """The clients' mean answers, by classes where these are counted; only of finite ones."""
        each = [self.clients[k] for k in self._members]
        averaging = self.prepared.averaging
        return mean_answers(each, ensemble_weights(averaging, self._members, each[0].shape[1]))

    @cached_property
    def _members(self) -> list[int]:
        """The clients that the ensemble is of."""
        finite = [k for k, own in enumerate(self.clients) if torch.isfinite(own).all()]
        return finite or list(range(len(self.clients)))

    @cached_property
    def outliers(self) -> list[int]:
        """The clients that answer unlike the others."""
        numbers, models = range(len(self.clients)), self.models
        if len(numbers) < FEWEST:
            return []
        each = (answers(models.client(k), self.neutral, device=models.device) for k in numbers)
        return outliers(list(each))

    @cached_property
    def _by_weights(self) -> Merge:
        """The merge of files alone: weights tell best whether clients began with the same ones."""
        device = self.models.device
        return merge_by_weights(self._stored, self.options, device=device, progress=silent)

    @cached_property
    def _alike(self) -> float | None:
        """How often two clients decide alike, in the mean."""
        pairs = [agreement(*pair).decisions for pair in combinations(self.clients, 2)]
        return sum(pairs) / len(pairs) if pairs else None

    def best(self, progress: Progress) -> Merge:
        """Return the best candidate, distilled if asked to, with what is known of its quality."""
        tried = list(self.candidates(progress))
        undistilled = self._preferred(tried)
        distilled = list(self._distilled(undistilled.merge, progress))
        chosen = max([undistilled, *distilled], key=self._rank)
        names = [client.name for client in self.prepared.clients]
        quality = Quality(
            source=self.probes.source,
            samples=len(self.held_out),
            merged=self.agreement(chosen.outputs),
            clients=dict(zip(names, map(self.agreement, self.clients), strict=True)),
            candidates={c.name: self.agreement(c.outputs) for c in (*tried, *distilled)},
            chosen=chosen.name,
            outliers=tuple(names[k] for k in self.outliers),
            dropped=self.dropped,
            alike=self._alike,
        )
        return replace(chosen.merge, quality=quality, in_place=self._by_weights.in_place)

    def candidates(self, progress: Progress) -> Iterator[Candidate]:
        """Yield ways to merge, the plainest first: the earlier one wins where they are equal."""
        if self._is_free and self.prepared.is_equally_wide:
            stored = self._stored
            plain = merge_of(stored, self.options, line_up(stored), is_compared=False)
            yield self._candidate(AVERAGE, plain)
            if self._by_weights.shares_start and not self._by_weights.stays_in_place:
                yield self._candidate(BY_WEIGHTS, self._by_weights)
        matched = self.matched(self.prepared.dials.max_growth, progress)
        for lead in self._leads(matched):
            yield from self.ways(matched, lead, progress)

    def _leads(self, matched: Merge) -> tuple[int | None, ...]:
        """Return who may lead, as far as the user left that open.

        Units of clients that began with the same weights are alike, so that their mean means
        something: nobody has to lead.
        """
        if self.options.lead is not None:
            return (matched.averaging.lead,)
        return (None,) if self._by_weights.shares_start else (None, self._best_client)

    def _preferred(self, tried: Sequence[Candidate]) -> Candidate:
        """Return the candidate that is most alike the ensemble, as a rule.

        Averages of clients that began with the same weights may be better than their ensemble, so
        that being less alike says nothing against them: the better one is kept where it works.
        """
        working = []
        if self._by_weights.shares_start:
            working = [c for c in tried if c.name in AVERAGES and self._works(c)]
        return max(working or tried, key=self._rank)

    def _works(self, average: Candidate) -> bool:
        """Return whether what clients learnt can be averaged.

        It can where the average is as much alike the ensemble as the best client is. Where all
        units are still in place, it is enough that weights did not cancel out, as outputs that
        hardly differ from input to input would tell.
        """
        best = max(self.agreement(own).decisions for own in self.clients)
        if self.agreement(average.outputs).decisions >= best:
            return True
        usual = variance(self.ensemble)
        spreads_alike = usual / FACTOR**2 <= variance(average.outputs) <= usual * FACTOR**2
        return self._by_weights.stays_in_place and spreads_alike

    def matched(self, growth: float | None, progress: Progress) -> Merge:
        """Return the merge of groups that are matched within a size budget."""
        return merge_of(self.prepared, self.options, self._solution(growth, progress))

    def ways(self, matched: Merge, lead: int | None, progress: Progress) -> Iterator[Candidate]:
        """Yield a matching's ways to merge units, with a client that leads, or with equal ones."""
        averaging = replace(matched.averaging, lead=lead)
        name = NO_LEAD if lead is None else self.prepared.clients[lead].name
        led = replace(matched, averaging=averaging, options=replace(self.options, lead=name))
        label = "equal clients" if lead is None else f"{name} leads"
        if self.options.merge_units in (None, "mean"):
            for name, averaged in _by_class_or_alike(_with_units(led, "mean")):
                corrected = self._corrected(averaged, progress)
                yield self._candidate(f"{label}, {name}", corrected)
        if self.options.merge_units in (None, "fit"):
            yield self._candidate(f"{label}, fit", self._fitted(led, progress))

    def _distilled(self, merge: Merge, progress: Progress) -> Iterator[Candidate]:
        """Yield what training from two starts makes of a merge."""
        steps = self.options.distillation
        if steps:
            distiller = Distiller(
                self.models, merge, self.probes, self._members, steps, self.options.seed
            )
            for name, trained in distiller.merges(self._best_client, progress):
                yield self._candidate(name, trained)

    def _candidate(self, name: str, merge: Merge) -> Candidate:
        arrays = {tensor: merge.read(tensor) for tensor in merge.plan.tensors}
        model = self.models.merged(arrays)
        return Candidate(name, merge, answers(model, self.held_out, device=self.models.device))

    def _corrected(self, merge: Merge, progress: Progress) -> Merge:
        """Return an averaged merge as its options ask to correct it on probes."""
        if not is_corrected_on_probes(merge.options):
            return merge
        few = next(self.probes.batches(FEW, self.models.device))
        weights = used_once(self.models, merge, few, self._weights)
        corrector = Corrector(self.models, merge, self.probes, weights, self.options.seed)
        return replace(merge, fitted=corrector.correct(progress))

    def _fitted(self, merge: Merge, progress: Progress) -> Merge:
        foldable = replace(merge, plan=replace(merge.plan, norms=self._norms))
        fitter = Fitter(
            self.models, foldable, self.probes, self.held_out, self._weights, self.options.seed
        )
        return replace(_with_units(merge, "fit"), fitted=fitter.fit(progress))

    @cached_property
    def _problem(self) -> Problem:
        """What there is to be matched, with responses unless weights alone are to be compared."""
        problem = problem_of(self.prepared, self.options, device=self.models.device)
        signature = self.options.signature or "both"
        if signature == "weights":
            return problem
        return replace(
            problem,
            responses=[self._responses(k) for k in range(len(self.clients))],
            response_share=RESPONSE_SHARE[signature],
        )

    @cached_property
    def _weights(self) -> frozenset[str]:
        """The weights whose rows are the same of every client."""
        return steady_weights(self.models, next(self.probes.batches(FEW, self.models.device)))

    @cached_property
    def _norms(self) -> tuple[Norm, ...]:
        """The batch norms that can be folded into the layers before them."""
        return own_norms(self.models, next(self.probes.batches(FEW, self.models.device)))

    @cached_property
    def _curves(self) -> dict[str, Curve]:
        return loss_curves(self._problem)

    def _solution(self, growth: float | None, progress: Progress) -> Solution:
        """Match all groups within a size budget."""
        problem = self._problem
        problem = replace(problem, dials=replace(problem.dials, max_growth=growth))
        return self._matched(problem, progress) if problem.responses else solve(problem, progress)

    def _matched(self, problem: Problem, progress: Progress) -> Solution:
        growth, limits = problem.dials.max_growth, {}
        if growth is not None:
            budget = int(growth * problem.parameters(problem.widest))
            limits = problem.limits(1.0) | choose_widths(problem, self._curves, budget)
            threshold = self.options.match_threshold or THRESHOLD
            problem = replace(problem, dials=replace(problem.dials, threshold=threshold))
        matchings = match_groups(problem, limits, progress)
        assert matchings is not None
        return Solution(matchings, None)

    def _responses(self, client: int) -> dict[str, FloatArray]:
        found = unit_responses(
            self.models.client(client),
            self.prepared.plan,
            self.prepared.client_widths[client],
            self.probes,
            names={m: n for m, n in self.models.own_names.items() if n in self._weights},
            seed=self.options.seed,
            device=self.models.device,
        )
        return {group: normalised(own) for group, own in found.items()}

    def agreement(self, outputs: Tensor) -> Agreement:
        """Compare outputs on the held-out probes with the ensemble's."""
        return agreement(outputs, self.ensemble)

    def _rank(self, candidate: Candidate) -> tuple[float, float]:
        return self.agreement(candidate.outputs).rank

    @property
    def _best_client(self) -> int:
        """The client that is most alike the ensemble."""
        ranks = [self.agreement(own).rank for own in self.clients]
        return ranks.index(max(ranks))

    @property
    def _is_free(self) -> bool:
        """Whether the user left everything open that a plain average would decide."""
        options = self.options
        is_corrected = options.correct in CORRECTING or is_corrected_on_probes(options)
        is_said = not (options.signature is options.lead is options.merge_units is None)
        return not (is_said or is_corrected)


def _by_class_or_alike(merge: Merge) -> Iterator[tuple[str, Merge]]:
    """Yield a merge as it is, and where classes are counted also one whose last layer ignores it.

    That is the better one where the match is poor. A fit has no need of it: its last layer has
    the ensemble's answers themselves for its target.
    """
    yield "mean", merge
    if merge.averaging.class_weights is not None:
        averaging = replace(merge.averaging, class_weights=None)
        options = replace(merge.options, class_counts=None)
        yield "mean, classes alike", replace(merge, averaging=averaging, options=options)


def _with_units(merge: Merge, units: Literal["mean", "fit"]) -> Merge:
    return replace(merge, options=replace(merge.options, merge_units=units))
