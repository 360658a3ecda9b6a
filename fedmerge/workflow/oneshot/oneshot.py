"""A one-shot merge that looks at what the clients do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedmerge.errors import FedmergeError, UsageError
from fedmerge.types.progress import Progress
from fedmerge.workflow.layers import solve
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.oneshot.probes import ProbeMaker
from fedmerge.workflow.oneshot.scene import Scene
from fedmerge.workflow.oneshot.symmetries.rewritten import settled, stored
from fedmerge.workflow.oneshot.symmetries.scene import made_alike
from fedmerge.workflow.options import MatchOptions, needs_probes, without_clients
from fedmerge.workflow.prepared import Prepared, merge_of, prepare, problem_of

FEWEST_CLIENTS = 2  # that there is something to be merged of


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
        scene = set_scene(models, options, probing, progress)
    except UsageError:
        raise
    except FedmergeError as error:
        if probing.asked_for or needs_probes(options):
            raise
        return _by_weights(prepared, options, error, device=device, progress=progress)
    return described(scene.best(progress), probing)


def set_scene(
    models: Models, options: MatchOptions, probing: ProbeOptions, progress: Progress
) -> Scene:
    """Let the clients answer probes, and make those alike that have symmetries."""
    scene = _asked(models, options, probing, progress)
    return made_alike(scene) if options.symmetries else scene


def _asked(
    models: Models, options: MatchOptions, probing: ProbeOptions, progress: Progress
) -> Scene:
    """Let the clients answer probes; those that are to be left out for their answers are."""
    diverged: list[str] = []
    if options.drop_outliers:
        diverged = [client.name for client in models.prepared.clients if not client.is_finite()]
        models, options = _without(models, options, diverged)
    maker = ProbeMaker(models, probing, options.seed)
    probes = maker.probes(progress)
    neutral = maker.neutral(probes)
    scene = Scene.on(models, options, probes, neutral)
    odd = [models.prepared.clients[k].name for k in scene.outliers if options.drop_outliers]
    if odd:
        scene = Scene.on(*_without(models, options, odd), probes, neutral)
    return replace(scene, dropped=(*diverged, *odd))


def _without(
    models: Models, options: MatchOptions, dropped: Sequence[str]
) -> tuple[Models, MatchOptions]:
    """Return what is left of clients and options without some clients."""
    if not dropped:
        return models, options
    prepared, model = models.prepared, models.prepared.model
    kept = [client for client in prepared.clients if client.name not in dropped]
    if len(kept) < FEWEST_CLIENTS:
        raise UsageError(f"--drop-outliers leaves fewer than {FEWEST_CLIENTS} clients")
    options = without_clients(options, dropped)
    rest = prepare(kept, options, plan=prepared.plan, model=model)
    graph = None if model is not None else models.program  # of a client that may be left out
    return Models(rest, model, models.device, graph), options


def described(merge: Merge, probing: ProbeOptions) -> Merge:
    """Return a merge with what its record says of probes, and what speaks against it."""
    assert merge.quality is not None
    warnings = (*merge.warnings, *merge.quality.warnings())
    as_stored = settled(merge, [stored(client) for client in merge.aligned])
    return replace(as_stored, probes=probing.to_json(), warnings=warnings)


def _by_weights(
    prepared: Prepared,
    options: MatchOptions,
    error: FedmergeError,
    *,
    device: str,
    progress: Progress,
) -> Merge:
    merge = merge_of(
        prepared, options, solve(problem_of(prepared, options, device=device), progress)
    )
    note = f"units were matched by their weights alone, as no probes run: {error.brief}"
    return replace(merge, warnings=(*merge.warnings, note))
