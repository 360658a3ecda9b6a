"""`fedmerge match`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.checkpoint import check_output, parse_size, record_path
from fedmerge.cli import show
from fedmerge.cli.arguments import (
    given_plan,
    match_options,
    model_code,
    note_merged,
    probe_options,
)
from fedmerge.cli.frontier import is_asked_for, show_frontier
from fedmerge.cli.report import also_report, check_also, say_report
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import UsageError
from fedmerge.types.progress import Progress
from fedmerge.types.words import AVERAGES, percent
from fedmerge.workflow.clients import expand_sources, open_clients
from fedmerge.workflow.devices import choose_device
from fedmerge.workflow.match import merge_prepared
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.predict import Prediction, predict
from fedmerge.workflow.prepared import Prepared, prepare

if TYPE_CHECKING:
    from fedmerge.workflow.oneshot.frontier import Frontier


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Merge the clients, write the result and say what it is."""
    started = time.perf_counter()
    options, probes = match_options(given), probe_options(given)
    has_images = probes.data is not None or given["image"] is not None
    if not has_images and (given["normalize"] is not None or given["channels_last"]):
        raise UsageError("--normalize and --channels-last are for --probe-data and --image")
    output, device = Path(given["output"]), choose_device(given["device"])
    shard_size = parse_size(given["shard_size"])
    paths = [path for path in expand_sources(given["clients"]) if isinstance(path, Path)]
    wants_frontier = is_asked_for(given, paths)
    if not given["dry_run"]:
        sharded = shard_size is not None
        check_output(output, inputs=paths, force=given["force"], sharded=sharded)
        check_also(given, paths)
    prepared = _prepared(given, paths, options, terminal)
    if given["dry_run"]:
        _show_prediction(predict(prepared, options), terminal)
        return
    with terminal.progress() as progress:
        decide = _surveyed if wants_frontier else _merged
        merge, found = decide(prepared, options, probes, device=device, progress=progress)
        output = merge.write(output, force=given["force"], shard_size=shard_size, progress=progress)
        page = also_report(given, output, clients=paths, progress=progress)
    for warning in merge.warnings[len(prepared.warnings) :]:
        terminal.warn(warning)
    seconds = round(time.perf_counter() - started, 3)
    sizes_tried = {} if found is None else {"frontier": found.to_json()}
    found_all = {**merge.summary(), **sizes_tried, "output": str(output), **page}
    terminal.result({**found_all, "seconds": seconds})
    if found is not None:
        show_frontier(found, given, terminal)
    _show_merge(merge, output, terminal)
    is_whole = len(merge.clients) == len(paths)
    given_clients = given["clients"] if is_whole else _files(merge)
    trust = [part for name in options.allow_global for part in ("--allow-global", name)]
    terminal.line(_verdict(merge, output, given_clients, given["model"], trust))
    _say_how_to_check(output, _as_given(given_clients, _files(merge)), trust, terminal)
    say_report(page, terminal)


def _prepared(
    given: Mapping[str, Any], paths: Sequence[Path], options: MatchOptions, terminal: Terminal
) -> Prepared:
    """Open the clients and plan their merge, and say what there is to say about them."""
    plan, code = given_plan(given), model_code(given)
    note_merged(given["clients"], terminal)
    with terminal.busy("reading clients"):
        prepared = prepare(open_clients(paths, options.reading), options, plan=plan, model=code)
    for client in prepared.clients:
        for note in client.notes:
            terminal.detail(f"{client.name}: {note}")
    for note in prepared.plan.notes:
        terminal.note(f"note: {note}")
    for warning in prepared.warnings:
        terminal.warn(warning)
    return prepared


def _merged(
    prepared: Prepared,
    options: MatchOptions,
    probes: ProbeOptions,
    *,
    device: str,
    progress: Progress,
) -> tuple[Merge, None]:
    return merge_prepared(prepared, options, probes=probes, device=device, progress=progress), None


def _surveyed(
    prepared: Prepared,
    options: MatchOptions,
    probes: ProbeOptions,
    *,
    device: str,
    progress: Progress,
) -> tuple[Merge, Frontier]:
    from fedmerge.workflow.oneshot.frontier import frontier_of  # most merges do without

    found = frontier_of(prepared, options, probes=probes, device=device, progress=progress)
    return found.merge, found


def _show_merge(merge: Merge, output: Path, terminal: Terminal) -> None:
    names = show.listed([client.name for client in merge.clients], show.MOST_LISTED)
    clients, net = show.count(len(merge.clients)), merge.plan.architecture or "one plan"
    title = f"{clients} clients ({names}) of {net}"
    rows = [
        [
            group.name,
            show.widths(group.client_widths),
            str(group.width),
            show.percent(group.match_rate),
            "" if group.scatter is None else f"{group.scatter:.2f}",
        ]
        for group in merge.groups
    ]
    terminal.table(title, ["group", "clients", "global", "matched", "scatter"], rows)
    for line in (*sizes(merge), *ways_to_load(merge, output)):
        terminal.line(line)
    if merge.shares_start:
        terminal.note(f"note: {_shared_start(merge)}")
    if merge.quality is not None:
        terminal.line(f"chosen of {len(merge.quality.candidates)}: {merge.quality.chosen}")


def _shared_start(merge: Merge) -> str:
    """Say why clients seem to have begun alike, and what follows."""
    said = (
        f"{show.percent(merge.in_place or 0.0)} of the units match at the same places: "
        "the clients seem to have begun with the same weights"
    )
    if merge.quality is not None and merge.quality.chosen in AVERAGES:
        kept = merge.quality.chosen
        return (
            f"{said}. Then averages may be better than their ensemble, so this one is kept: {kept} "
            "(--merge-units fit goes by the ensemble)"
        )
    if merge.quality is None and merge.stays_in_place and merge.growth == 1:
        return f"{said}, so this is their average (--match-threshold keeps apart what drifted)"
    return said


def _say_how_to_check(
    output: Path, clients: Sequence[Path], trust: Sequence[str], terminal: Terminal
) -> None:
    """Name what was written, and end with a command that checks it."""
    terminal.line(f"wrote {written(output)}; check it with:")
    files = map(as_argument, [output, *clients])
    terminal.line(shlex.join(["fedmerge", "verify", *files, *trust]))


def _files(merge: Merge) -> list[Path]:
    """Return the files of the clients that were merged, which are not those that were left out."""
    return [client.path for client in merge.clients if client.path is not None]


def _as_given(clients: Sequence[Path], paths: Sequence[Path]) -> Sequence[Path]:
    """Return the clients' files, or where they are many, the folders and globs that mean them."""
    is_short = len(paths) <= max(show.MOST_LISTED, len(clients))
    return paths if is_short or expand_sources(clients) != paths else clients


def written(output: Path) -> str:
    """Return which files were written."""
    if output.suffix == ".json":
        return f"{output} and the shards that it names"
    return str(output) if output.suffix == ".safetensors" else f"{output} and {record_path(output)}"


def as_argument(path: Path) -> str:
    """Return a path that is no option, whatever its name starts with."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def sizes(merge: Merge) -> list[str]:
    """Say how large a merged model is, and what held it."""
    size, together = merge.parameters(merge.widths), merge.ensemble_parameters
    line = f"parameters: {show.count(size)} (growth {merge.growth:.2f}"
    line += f"; the {show.count(len(merge.clients))} clients together: {show.count(together)})"
    lines = [line]
    if merge.width_limit is not None and merge.growth > 1:
        lines.append(
            f"every group was held to {merge.width_limit:.2f} × its widest client "
            f"to stay within --max-growth {merge.dials.max_growth:g}"
        )
    if size > together:
        lines.append("larger than all clients together: keeping them as an ensemble is cheaper")
    return lines


def ways_to_load(merge: Merge, output: Path) -> list[str]:
    """Say what to do with a model that is wider than the clients."""
    widest = {g.name: max(g.client_widths) for g in merge.groups}
    wider = [
        f"{g.name} {widest[g.name]} → {g.width}" for g in merge.groups if g.width > widest[g.name]
    ]
    if not wider:
        return []
    load = f'load it with fedmerge.load_model(build, "{output}")'
    is_free = merge.options.method == "fedma"
    return [
        f"wider than the clients: {', '.join(wider)}",
        f"{load}, or keep the widths with --max-growth 1" if is_free else load,
    ]


def _verdict(
    merge: Merge, output: Path, clients: Sequence[Path], model: str | None, trust: Sequence[str]
) -> str:
    """Say in one line how good the merge is, as far as it is known, and how to measure it."""
    files = [
        *map(as_argument, map(Path, clients)),
        "--global",
        as_argument(output),
        "--model",
        model or "M",
        *trust,
    ]
    measure = f"measure it: {shlex.join(['fedmerge', 'compare', *files])} --data FILE"
    found = merge.quality
    if found is None:
        return f"quality: unknown without data; {measure}"
    ranked = sorted(found.clients.items(), key=lambda own: own[1].rank, reverse=True)
    alone = [f"{percent(own.decisions)} ({name})" for name, own in ranked]
    return (
        f"quality: decides as the ensemble does on {percent(found.merged.decisions)} of "
        f"{found.samples} held-out probes ({found.source}), the clients alone on "
        f"{show.listed(alone, show.MOST_LISTED)}; a prediction, {measure}"
    )


def _show_prediction(prediction: Prediction, terminal: Terminal) -> None:
    terminal.result({"dry_run": True, **prediction.to_json()})
    rows = [
        [g.name, show.widths(g.client_widths), f"{g.narrowest} to {g.widest}"]
        for g in prediction.groups
    ]
    terminal.table("dry run: nothing is matched or written", ["group", "clients", "global"], rows)
    fewest, most = map(show.count, (prediction.fewest_parameters, prediction.most_parameters))
    terminal.line(f"parameters: {fewest} to {most}")
    terminal.line(f"memory: about {show.megabytes(prediction.memory)} beyond the libraries")
    terminal.line(f"to read: {show.megabytes(prediction.read)}; rounds with clients: none")
