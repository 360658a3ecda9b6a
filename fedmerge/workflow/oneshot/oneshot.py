"""A one-shot merge that looks at what the clients do: candidates, and the best of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from torch import Tensor

from fedmerge.errors import ArchitectureError
from fedmerge.probing import Probes
from fedmerge.probing.signatures import normalised, unit_responses
from fedmerge.types.arrays import FloatArray
from fedmerge.types.progress import Progress
from fedmerge.workflow.layers import Problem, Solution, match_groups, solve
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.agreement import Agreement, agreement, answers, mean_answers
from fedmerge.workflow.oneshot.curves import choose_widths
from fedmerge.workflow.oneshot.fit import Fitter
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.oneshot.probes import ProbeMaker
from fedmerge.workflow.oneshot.quality import Quality, outliers
from fedmerge.workflow.options import NO_LEAD, MatchOptions
from fedmerge.workflow.prepared import Prepared, line_up, merge_of, prepare, problem_of

HELD_OUT = 0.2  # of the probes: they choose ridges and candidates, and tell the quality
RESPONSE_SHARE = {"both": 0.9, "activations": 1.0}  # of responses in what units have in common
THRESHOLD = 0.95  # correlation from which units are merged though the budget would keep them


def merge_probed(
    prepared: Prepared,
    options: MatchOptions,
    probing: ProbeOptions,
    *,
    device: str,
    progress: Progress,
) -> Merge:
    """Return the candidate that decides most like the ensemble on held-out probes.

    Where nobody asked for probes and the model can't be run on them, weights alone are matched.
    """
    models = Models(prepared, prepared.model, device)
    try:
        probes = ProbeMaker(models, probing, options.seed).probes(progress)
        scene = Scene.on(models, options, probes)
    except (ArchitectureError, RuntimeError, TypeError, ValueError, IndexError) as error:
        if probing.is_asked_for:
            raise
        return _by_weights(prepared, options, error, device=device, progress=progress)
    outlying = scene.outliers
    if outlying and options.drop_outliers:
        kept = [c for k, c in enumerate(prepared.clients) if k not in outlying]
        rest = prepare(kept, options, plan=prepared.plan, model=prepared.model)
        scene = Scene.on(Models(rest, rest.model, device), options, probes)
        dropped = tuple(prepared.clients[k].name for k in outlying)
        return _described(scene.best(progress, dropped=dropped), probing)
    return _described(scene.best(progress), probing)


def _described(merge: Merge, probing: ProbeOptions) -> Merge:
    assert merge.quality is not None
    warnings = (*merge.warnings, *merge.quality.warnings())
    return replace(merge, probes=probing.to_json(), warnings=warnings)


def _by_weights(
    prepared: Prepared,
    options: MatchOptions,
    error: Exception,
    *,
    device: str,
    progress: Progress,
) -> Merge:
    merge = merge_of(
        prepared, options, solve(problem_of(prepared, options, device=device), progress)
    )
    reason = str(error).strip().splitlines()[:1]
    note = f"units were matched by their weights alone, as no probes run: {''.join(reason)}"
    return replace(merge, warnings=(*merge.warnings, note))


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
    clients: tuple[Tensor, ...]  # every client's outputs on the held-out probes

    @classmethod
    def on(cls, models: Models, options: MatchOptions, probes: Probes) -> Scene:
        """Let every client answer the held-out part of the probes."""
        kept, held_out = probes.split(int(HELD_OUT * len(probes)), seed=options.seed)
        numbers = range(len(models.prepared.clients))
        each = (answers(models.client(k), held_out, device=models.device) for k in numbers)
        return cls(models, options, kept, held_out, tuple(each))

    @property
    def prepared(self) -> Prepared:
        """The clients that are merged."""
        return self.models.prepared

    @cached_property
    def ensemble(self) -> Tensor:
        """The clients' mean answers."""
        return mean_answers(self.clients, self.prepared.averaging.client_weights)

    @cached_property
    def outliers(self) -> list[int]:
        """The clients that answer unlike the others."""
        weights = self.prepared.averaging.client_weights

        def with_others(number: int) -> float:
            others = [k for k in range(len(self.clients)) if k != number]
            wanted = mean_answers([self.clients[k] for k in others], [weights[k] for k in others])
            return agreement(self.clients[number], wanted).decisions

        return outliers([with_others(number) for number in range(len(self.clients))])

    def best(self, progress: Progress, *, dropped: tuple[str, ...] = ()) -> Merge:
        """Return the best candidate, with what is known of its quality."""
        found = {c.name: (c, self._agreement(c.outputs)) for c in self.candidates(progress)}
        chosen, own = max(found.values(), key=lambda pair: pair[1].rank)
        names = [client.name for client in self.prepared.clients]
        quality = Quality(
            source=self.probes.source,
            samples=len(self.held_out),
            merged=own,
            clients=dict(zip(names, map(self._agreement, self.clients), strict=True)),
            candidates={name: agreed for name, (_, agreed) in found.items()},
            chosen=chosen.name,
            outliers=tuple(names[k] for k in self.outliers),
            dropped=dropped,
        )
        return replace(chosen.merge, quality=quality)

    def candidates(self, progress: Progress) -> Iterator[Candidate]:
        """Yield ways to merge, the plainest first: the earlier one wins where they are equal."""
        if self._is_free and self._is_equally_wide:
            plain = merge_of(self.prepared, self.options, line_up(self.prepared), is_compared=False)
            yield self._candidate("element-wise average", plain)
        matched = merge_of(self.prepared, self.options, self._solution(progress))
        leads = (
            (None, self._best_client) if self.options.lead is None else (matched.averaging.lead,)
        )
        for lead in leads:
            averaging = replace(matched.averaging, lead=lead)
            name = NO_LEAD if lead is None else self.prepared.clients[lead].name
            led = replace(matched, averaging=averaging, options=replace(self.options, lead=name))
            label = "equal clients" if lead is None else f"{name} leads"
            if self.options.merge_units in (None, "mean"):
                yield self._candidate(f"{label}, mean", _with_units(led, "mean"))
            if self.options.merge_units in (None, "fit"):
                yield self._candidate(f"{label}, fit", self._fitted(led, progress))

    def _candidate(self, name: str, merge: Merge) -> Candidate:
        arrays = {tensor: merge.read(tensor) for tensor in merge.plan.tensors}
        model = self.models.merged(arrays)
        return Candidate(name, merge, answers(model, self.held_out, device=self.models.device))

    def _fitted(self, merge: Merge, progress: Progress) -> Merge:
        fitter = Fitter(self.models, merge, self.probes, self.held_out, self.options.seed)
        return replace(_with_units(merge, "fit"), fitted=fitter.fit(progress))

    def _solution(self, progress: Progress) -> Solution:
        """Match all groups, by the share of responses that the signature stands for."""
        problem = problem_of(self.prepared, self.options, device=self.models.device)
        signature = self.options.signature or "both"
        if signature == "weights":
            return solve(problem, progress)
        problem = replace(
            problem,
            responses=[self._responses(k) for k in range(len(self.clients))],
            response_share=RESPONSE_SHARE[signature],
        )
        return self._matched(problem, progress)

    def _matched(self, problem: Problem, progress: Progress) -> Solution:
        growth, limits = problem.dials.max_growth, {}
        if growth is not None:
            budget = int(growth * problem.parameters(problem.widest))
            limits = choose_widths(problem, budget)
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
            names=self.models.own_names,
            seed=self.options.seed,
            device=self.models.device,
        )
        return {group: normalised(own) for group, own in found.items()}

    def _agreement(self, outputs: Tensor) -> Agreement:
        return agreement(outputs, self.ensemble)

    @property
    def _best_client(self) -> int:
        """The client that is most alike the ensemble."""
        ranks = [self._agreement(own).rank for own in self.clients]
        return ranks.index(max(ranks))

    @property
    def _is_free(self) -> bool:
        """Whether the user left everything open that a plain average would decide."""
        options = self.options
        return options.signature is options.lead is options.merge_units is None

    @property
    def _is_equally_wide(self) -> bool:
        first, *others = self.prepared.client_widths
        return all(widths == first for widths in others)


def _with_units(merge: Merge, units: Literal["mean", "fit"]) -> Merge:
    return replace(merge, options=replace(merge.options, merge_units=units))
