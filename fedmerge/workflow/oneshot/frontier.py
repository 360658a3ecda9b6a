"""What a merge's size buys: agreement with the clients' ensemble at a range of size budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedmerge.errors import UsageError
from fedmerge.types.plans import Plan
from fedmerge.types.progress import Progress, silent
from fedmerge.workflow.clients import Source, expand_sources, open_clients
from fedmerge.workflow.match import is_probed
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.agreement import Agreement
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.oneshot import described, set_scene
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.oneshot.scene import Scene
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.prepared import Prepared, prepare

if TYPE_CHECKING:
    from fedmerge.workflow.models import ModelCode

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
    merges: tuple[Point, ...]  # from the smallest budget to the largest, not distilled
    ensemble: Point  # of all clients, side by side

    def to_json(self) -> dict[str, Any]:
        """Return all points as JSON values, without the merge."""
        return {
            "clients": [point.to_json() for point in self.clients],
            "points": [point.to_json() for point in (*self.merges, self.ensemble)],
        }


def frontier(
    sources: Sequence[Source],
    options: MatchOptions | None = None,
    *,
    plan: Plan | None = None,
    model: ModelCode | None = None,
    probes: ProbeOptions | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Frontier:
    """Merge clients as `match` does, and tell what other size budgets would give."""
    options = options or MatchOptions()
    clients = open_clients(expand_sources(sources), options.reading)
    prepared = prepare(clients, options, plan=plan, model=model)
    return frontier_of(prepared, options, probes=probes, device=device, progress=progress)


def frontier_of(
    prepared: Prepared,
    options: MatchOptions,
    *,
    probes: ProbeOptions | None = None,
    device: str,
    progress: Progress,
) -> Frontier:
    """Return the frontier of prepared clients; probes, responses and loss curves are made once."""
    probes = probes or ProbeOptions()
    if not is_probed(prepared, options, probes, "--frontier"):
        raise UsageError("--frontier: the clients have no hidden units that could be matched")
    models = Models(prepared, prepared.model, device)
    return _surveyed(set_scene(models, options, probes, progress), probes, progress)


def _surveyed(scene: Scene, probes: ProbeOptions, progress: Progress) -> Frontier:
    """Return the frontier of a scene's clients."""
    merge = described(scene.best(progress), probes)
    survey = _Survey(scene, merge)
    found = Frontier(
        merge=merge,
        clients=tuple(survey.clients()),
        merges=tuple(survey.merges(progress)),
        ensemble=survey.point(ENSEMBLE, merge.ensemble_parameters, scene.ensemble),
    )
    return replace(found, merge=replace(merge, frontier=found.to_json()))


@dataclass(frozen=True)
class _Survey:
    """Looks at sizes in a scene, beside the merge that was chosen there."""

    scene: Scene
    chosen: Merge

    def clients(self) -> Iterator[Point]:
        """Yield what every client has alone."""
        each = zip(self.chosen.clients, self.chosen.client_widths, self.scene.clients, strict=True)
        for client, widths, outputs in each:
            yield self.point(client.name, self.chosen.parameters(widths), outputs)

    def merges(self, progress: Progress) -> Iterator[Point]:
        """Yield the better of mean and fit at every budget that buys more units than the last.

        The client that leads is the chosen merge's.
        """
        budgets, lead, before = self._budgets(), self.chosen.averaging.lead, None
        for number, budget in enumerate(budgets):
            progress("trying sizes", number, len(budgets))
            matched = self.scene.matched(budget, progress)
            if matched.widths != before:
                before = matched.widths
                ways = self.scene.ways(matched, lead, progress)
                best = max(ways, key=lambda way: self.scene.agreement(way.outputs).rank)
                size = matched.parameters(matched.widths)
                yield replace(self.point(best.name, size, best.outputs), budget=budget)
        progress("trying sizes", len(budgets), len(budgets))

    def _budgets(self) -> list[float]:
        """Return the growths to try: a merge larger than all clients together is of no use."""
        most = self.chosen.ensemble_parameters / self.chosen.widest_parameters
        asked = self.chosen.dials.max_growth
        growths = {growth for growth in GROWTHS if growth <= most}
        return sorted(growths if asked is None else growths | {asked})

    def point(self, name: str, parameters: int, outputs: Tensor) -> Point:
        """Return the point of a model by its outputs on the held-out probes."""
        agreed = self.scene.agreement(outputs)
        return Point(name, None, parameters / self.chosen.widest_parameters, parameters, agreed)
