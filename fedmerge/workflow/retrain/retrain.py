"""`retrain`: FedMA and its baselines over the clients' own data, in rounds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedmerge.checkpoint import check_output, parse_size
from fedmerge.types.assignments import Assignment
from fedmerge.types.plans import Plan, equal_widths
from fedmerge.workflow.clients import Source, expand_sources
from fedmerge.workflow.models import ModelCode
from fedmerge.workflow.retrain.events import HearEvent, RunFinished, RunStarted, ignore
from fedmerge.workflow.retrain.inputs import expand_shards
from fedmerge.workflow.retrain.kept import keep_layer
from fedmerge.workflow.retrain.locals import pad_ties
from fedmerge.workflow.retrain.options import RetrainOptions
from fedmerge.workflow.retrain.prepare import Run, matching_options, prepare_run
from fedmerge.workflow.retrain.result import Retrained
from fedmerge.workflow.retrain.rounds import Keep, Rounds, keep_nothing, whole_model
from fedmerge.workflow.retrain.running import Running
from fedmerge.workflow.retrain.saved import SavedState
from fedmerge.workflow.retrain.state import WorkDir


def retrain(
    sources: Sequence[Source],
    shards: str | Path | Sequence[str | Path],
    options: RetrainOptions | None = None,
    *,
    model: ModelCode,
    plan: Plan | None = None,
    data: str | Path | None = None,
    output: str | Path | None = None,
    force: bool = False,
    shard_size: str | int | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    running: Running | None = None,
    hear: HearEvent = ignore,
) -> Retrained:
    """Train and match clients in rounds, and write the global model if asked to.

    `sources` are the clients' checkpoints; none at all, and clients are trained from the start;
    one file that `match` or `retrain` wrote, and its clients go on from it. `shards` are files,
    folders or a function by reference, `data` is what global models are evaluated on. With
    `work_dir`, the state after every round is kept there for `resume`. With `shard_size` (bytes,
    or text such as "2GB") the output is safetensors shards and their index.
    """
    options, running = options or RetrainOptions(), running or Running()
    listed = [shards] if isinstance(shards, str | Path) else list(shards)
    place = None if work_dir is None else WorkDir(Path(work_dir))
    evaluation = None if data is None else str(data)
    sharded = parse_size(shard_size) is not None
    with nullcontext() if place is None else place.held():
        if output is not None:
            check_retrained_output(
                Path(output),
                sources,
                listed,
                data=evaluation,
                force=force,
                sharded=sharded,
                work_dir=place,
            )
        if place is not None and not resume:
            place.check_free()
        run = prepare_run(
            sources,
            listed,
            options,
            model=model,
            plan=plan,
            data=evaluation,
            running=running,
        )
        retrained = run_prepared(
            run, data=evaluation, work_dir=place, output=output, running=running, hear=hear
        )
        if output is not None:
            retrained.write(output, force=force, again=resume, shard_size=shard_size)
    return retrained


def check_retrained_output(
    output: Path,
    sources: Sequence[Source],
    shards: Sequence[str | Path],
    *,
    data: str | None,
    force: bool,
    sharded: bool,
    work_dir: WorkDir | None,
) -> None:
    """Refuse an output that exists, unless the run in the work dir wrote it, or is an input."""
    files = [path for path in expand_sources(sources, least=0) if isinstance(path, Path)]
    inputs = [*files, *map(Path, expand_shards(shards)), *([] if data is None else [Path(data)])]
    is_own = work_dir is not None and work_dir.is_own(output)
    check_output(output, inputs=inputs, force=force or is_own, sharded=sharded)


def run_prepared(
    run: Run,
    *,
    data: str | None,
    work_dir: WorkDir | None,
    output: str | Path | None,
    running: Running,
    hear: HearEvent,
) -> Retrained:
    """Run all rounds, or those that the work dir's run has left, and return the global model."""
    began = time.monotonic()
    state = SavedState(run.method.start(), ())
    if work_dir is not None:
        state = work_dir.begin(run, None if output is None else Path(output)) or state
    rounds = len(run.method.rounds)
    hear(RunStarted(run.options.method, run.clients, rounds, len(state.rounds)))
    engine = running.start_engine(run.clients)
    save = (lambda state: None) if work_dir is None else partial(work_dir.save, run)
    keep: Keep = keep_nothing
    if work_dir is not None:
        keep = partial(keep_layer, work_dir.path, run.prepared.plan)
    try:
        state = Rounds(run, engine, running, data, save, hear, keep).finish(state)
    finally:
        engine.close()
    hear(RunFinished(rounds, round(time.monotonic() - began, 3)))
    return _retrained(run, state)


def _retrained(run: Run, state: SavedState) -> Retrained:
    """Return the global model of a run whose rounds are over."""
    prepared, federation = run.prepared, state.federation
    widths = equal_widths(federation.widths, prepared.plan.same_width)
    entries = {entry.name: entry for entry in federation.groups}
    return Retrained(
        clients=prepared.clients,
        aligned=prepared.aligned,
        plan=prepared.plan,
        options=matching_options(run.options),
        dials=prepared.dials,
        client_widths=prepared.client_widths,
        widths=widths,
        placements=[
            {group: Assignment(a.indices, widths[group]) for group, a in placement.items()}
            for placement in federation.placements
        ],
        averaging=prepared.averaging,
        groups=tuple(
            replace(entries[name], width=width, padding=width - entries[name].width)
            for name, width in widths.items()
        ),
        width_limit=None,
        warnings=run.warnings,
        arrays=pad_ties(whole_model(federation), prepared.plan, federation.widths),
        retraining=run.options,
        shards=run.shards,
        rounds=state.rounds,
        continued=run.start.continued,
    )
