"""`match`: checkpoints to one global model, in one shot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedmerge.checkpoint import check_output, parse_size
from fedmerge.errors import UsageError
from fedmerge.types.plans import Plan
from fedmerge.types.progress import Progress, silent
from fedmerge.workflow.clients import Source, expand_sources, open_clients
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.options import MatchOptions, needs_probes
from fedmerge.workflow.prepared import Prepared, line_up, merge_of, prepare
from fedmerge.workflow.weights import merge_by_weights

if TYPE_CHECKING:
    from fedmerge.workflow.models import ModelCode


def match(
    sources: Sequence[Source],
    options: MatchOptions | None = None,
    *,
    plan: Plan | None = None,
    model: ModelCode | None = None,
    output: str | Path | None = None,
    force: bool = False,
    shard_size: str | int | None = None,
    probes: ProbeOptions | None = None,
    device: str = "cpu",
    progress: Progress = silent,
) -> Merge:
    """Merge clients (paths, folders, globs or state dicts) and write the result if asked to.

    With the model's code the clients are also compared by what they do, on `probes`.
    """
    options = options or MatchOptions()
    sharded = parse_size(shard_size) is not None
    expanded = expand_sources(sources)
    if output is not None:
        inputs = [source for source in expanded if isinstance(source, Path)]
        check_output(Path(output), inputs=inputs, force=force, sharded=sharded)
    clients = open_clients(expanded, options.reading)
    prepared = prepare(clients, options, plan=plan, model=model)
    merge = merge_prepared(prepared, options, probes=probes, device=device, progress=progress)
    if output is not None:
        merge.write(output, force=force, shard_size=shard_size)
    return merge


def plan(
    sources: Sequence[Source],
    options: MatchOptions | None = None,
    *,
    given: Plan | None = None,
    model: ModelCode | None = None,
) -> Plan:
    """Return the plan that a merge of these clients would use."""
    options = options or MatchOptions()
    clients = open_clients(expand_sources(sources, least=1), options.reading)
    return prepare(clients, options, plan=given, model=model).plan


def merge_prepared(
    prepared: Prepared,
    options: MatchOptions,
    *,
    probes: ProbeOptions | None = None,
    device: str,
    progress: Progress,
) -> Merge:
    """Match every group, and decide the global model from the assignments."""
    probes = probes or ProbeOptions()
    runs = is_probed(prepared, options, probes)
    if options.method == "average":
        return merge_of(prepared, options, line_up(prepared), is_compared=False)
    if runs:
        from fedmerge.workflow.oneshot.oneshot import merge_probed  # files alone do without

        return merge_probed(prepared, options, probes, device=device, progress=progress)
    return merge_by_weights(prepared, options, device=device, progress=progress)


def is_probed(
    prepared: Prepared, options: MatchOptions, probes: ProbeOptions, *wishes: str
) -> bool:
    """Return whether the clients are run: they can be, and no fixed prior is asked for.

    Wishes are what else only clients that are run can fulfil.
    """
    wished = [*wishes, *needs_probes(options), *probes.asked_for]
    if wished and not prepared.can_run:
        raise UsageError(
            f"{wished[0]}: the clients have to be run for it",
            "give the model's code with --model, or a .pt2 file",
        )
    is_fixed = options.method != "fedma" or options.preset is not None or options.sigma is not None
    is_off = probes.source == "none" or is_fixed
    if wished and is_off:
        raise UsageError(
            f"{wished[0]}: the clients are not run with --probe none, a fixed prior, "
            "or a --method other than fedma"
        )
    return prepared.can_run and not is_off and bool(prepared.plan.groups)
