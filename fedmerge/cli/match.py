"""`fedmerge match`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.api import frontier, match
from fedmerge.checkpoint import adapter_folder, expand_paths, record_path, written_path
from fedmerge.cli.arguments import (
    given_plan,
    image_options,
    match_options,
    model_code,
    note_merged,
    probe_options,
)
from fedmerge.cli.command_line import CHECKED, NEEDED
from fedmerge.cli.commands import COMMANDS
from fedmerge.cli.folder_merges import merge_adapters_given, upload_command, width_lines
from fedmerge.cli.output import Terminal
from fedmerge.errors import UsageError
from fedmerge.measuring import predict_match
from fedmerge.merging.prediction import Prediction
from fedmerge.merging.result import Merge
from fedmerge.merging.session import Session
from fedmerge.probes.options import ProbeOptions
from fedmerge.values import wording
from fedmerge.values.wording import AVERAGES, percent

if TYPE_CHECKING:
    from fedmerge.merging.frontier import Frontier, Point


_MEASURED = (*NEEDED, "task")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")  # how classes of such end
_AS_GIVEN = ("force", "shard_size", "report", "require", "device")


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Merge the clients, write the result and say what it is."""
    if any(map(adapter_folder, expand_paths(given["clients"]))):
        merge_adapters_given(given, terminal)
        return
    options, probes = match_options(given), _probe_options(given)
    inputs: dict[str, Any] = {"options": options, "model": model_code(given)}
    inputs |= {"plan": given_plan(given), "base": given["base"]}
    if given["dry_run"]:
        _predict(given, inputs, terminal)
        return
    started, output = time.perf_counter(), given["output"]
    found: Frontier | None = None
    sessions: list[Session] = []
    with _working(given, terminal, sessions) as work:
        inputs |= {"probes": probes, "image": image_options(given), **work}
        inputs |= {name: given[name] for name in _AS_GIVEN}
        if given["frontier"] or given["frontier_plot"] is not None:
            if inputs.pop("base") is not None:
                raise UsageError("`frontier` and `base` exclude each other: changes do not grow")
            plot = given["frontier_plot"]
            found = frontier(given["clients"], output=output, frontier_plot=plot, **inputs)
        merge = found.merge if found else match(given["clients"], output=output, **inputs)
    for warning in merge.warnings[len(sessions[0].warnings) :]:
        terminal.warn(warning)
    output = written_path(output, sharded=given["shard_size"] is not None)
    result = {**merge.summary(), **({"frontier": found.to_json()} if found else {})}
    seconds = round(time.perf_counter() - started, 3)
    terminal.result({**result, "output": str(output), **page_of(given), "seconds": seconds})
    if found is not None:
        _show_frontier(found, given["frontier_plot"], terminal)
    _show_merge(merge, output, terminal)
    is_whole = len(merge.clients) == len(sessions[0].clients)
    clients = given["clients"] if is_whole else _files(merge)
    known = given if given["model"] else {**given, "model": _folder_code(merge)}
    terminal.line(_verdict(merge, output, clients, known))
    checked = [output, *_as_given(clients, _files(merge))]
    terminal.line(f"wrote {written(output)}; check it with:")
    terminal.line(COMMANDS["verify"].suggested(checked, given, CHECKED))
    say_page(given, terminal)
    if output.is_dir():
        terminal.line(f"upload it with: {upload_command(output)}")


def _predict(given: Mapping[str, Any], inputs: Mapping[str, Any], terminal: Terminal) -> None:
    with _working(given, terminal, []) as work:
        prepared, device = work["prepared"], given["device"]
        prediction = predict_match(given["clients"], prepared=prepared, device=device, **inputs)
    _show_prediction(prediction, terminal)


@contextmanager
def _working(
    given: Mapping[str, Any], terminal: Terminal, sessions: list[Session]
) -> Iterator[dict[str, Any]]:
    """Give the callbacks of a merge, of which the first also keeps the session."""
    note_merged(given["clients"], terminal)
    with terminal.working("reading clients") as work:

        def prepared(session: Session) -> None:
            sessions.append(session)
            details = [
                f"{client.name}: {note}" for client in session.clients for note in client.notes
            ]
            work.prepared(session.plan.notes, session.warnings, details)

        yield {"prepared": prepared, "progress": work.progress}


def _probe_options(given: Mapping[str, Any]) -> ProbeOptions:
    probes = probe_options(given)
    has_images = probes.data is not None or given["image"] is not None
    if not has_images and (given["normalize"] is not None or given["channels_last"]):
        raise UsageError("`normalize` and `channels_last` are for `probe_data` and `image`")
    return probes


def _show_frontier(found: Frontier, plot: Path | None, terminal: Terminal) -> None:
    """Print the sizes that were tried, and where they are drawn."""
    rows = [_row(f"client {point.name}", point) for point in found.clients]
    rows += [_row(_label(point), point) for point in found.merges]
    rows.append(_row("ensemble, all side by side", found.ensemble))
    quality = found.merge.quality
    assert quality is not None
    title = f"size against agreement with the ensemble on {quality.samples} held-out probes"
    terminal.table(title, ["model", "growth", "parameters", "agreement", "how"], rows)
    if plot is not None:
        terminal.line(f"drew {plot}")


def _row(model: str, point: Point) -> list[str]:
    how = "" if point.budget is None else point.name
    size = wording.count(point.parameters)
    return [model, f"{point.growth:.2f}", size, percent(point.agreement.decisions), how]


def _label(point: Point) -> str:
    return f"merge within {point.budget:g} ×"


def _show_merge(merge: Merge, output: Path, terminal: Terminal) -> None:
    names = wording.listed([client.name for client in merge.clients], wording.MOST_LISTED)
    if merge.quality is not None and merge.quality.is_client:  # what a reader has to know first
        terminal.line(merge.verdict)
    base = merge.session.base
    is_planless = not merge.groups and (base is not None or merge.options.method == "average")
    net = merge.plan.architecture or "one plan"
    how = f" of {net}"
    if base is not None:
        how = f", fine-tunes of {base.name}"
    elif is_planless:
        how = ", averaged element by element"
    elif merge.options.method == "ot":
        how += ", by optimal transport"
    title = f"{wording.count(len(merge.clients))} clients ({names}){how}"
    rows = [
        [
            group.name,
            wording.widths(group.client_widths),
            str(group.width),
            wording.whole_percent(group.match_rate),
            "" if group.scatter is None else f"{group.scatter:.2f}",
        ]
        for group in merge.groups
    ]
    if merge.is_program:
        terminal.line(f"{title}, as branches of one program: it returns their weighted mean")
    elif is_planless:
        terminal.line(title)
    else:
        terminal.table(title, ["group", "clients", "global", "matched", "scatter"], rows)
    config = merge.session.config
    said = [] if config is None or merge.is_program else width_lines(merge, config)
    for line in (*sizes(merge), *said, *ways_to_load(merge, output)):
        terminal.line(line)
    for line in _of_base(merge):
        terminal.line(line)
    if merge.shares_start:
        terminal.note(f"note: {_shared_start(merge)}")
    if merge.quality is not None:
        terminal.line(f"chosen of {len(merge.quality.candidates)}: {merge.quality.chosen}")
    if merge.options.client_weight:
        counts = [f"{name} {weight:g}" for name, weight in merge.options.client_weight.items()]
        terminal.line(f"clients count: {wording.listed(counts, wording.MOST_LISTED)}")


def _of_base(merge: Merge) -> Iterator[str]:
    """Say what clients changed of their base, and how much of it is in the merge."""
    base, scale = merge.session.base, merge.options.scale
    if base is None:
        return
    yield from base.lines(merge.clients)
    if scale is not None:
        yield f"the merge is {base.name} + {scale:g} × their mean change"


def _folder_code(merge: Merge) -> str | None:
    """Return what --model is where the clients' folders bring their code."""
    code = merge.session.model
    return None if code is None or merge.session.config is None else code.name


def _shared_start(merge: Merge) -> str:
    """Say why clients seem to have begun alike, and what follows."""
    said = (
        f"{wording.whole_percent(merge.in_place or 0.0)} of the units match at the same places: "
        "the clients seem to have begun with the same weights"
    )
    if merge.quality is not None and merge.quality.chosen in AVERAGES:
        kept = merge.quality.chosen
        return (
            f"{said}. Then averages may be better than their ensemble, so this one is kept: {kept} "
            "(`merge_units` fit goes by the ensemble)"
        )
    if merge.quality is None and merge.stays_in_place and merge.growth == 1:
        return f"{said}, so this is their average (--set match_threshold keeps apart what drifted)"
    return said


def _files(merge: Merge) -> list[Path]:
    """Return the files of the clients that were merged, which are not those that were left out."""
    return [client.path for client in merge.clients if client.path is not None]


def _as_given(clients: Sequence[Path], paths: Sequence[Path]) -> Sequence[Path]:
    """Return the clients' files, or where they are many, the folders and globs that mean them."""
    is_short = len(paths) <= max(wording.MOST_LISTED, len(clients))
    return paths if is_short or expand_paths(clients) != paths else clients


def written(output: Path) -> str:
    """Return which files were written."""
    if output.is_dir():
        return f"{output}, a folder that its library loads"
    if output.suffix == ".json":
        return f"{output} and the shards that it names"
    return str(output) if output.suffix == ".safetensors" else f"{output} and {record_path(output)}"


def sizes(merge: Merge) -> list[str]:
    """Say how large a merged model is, and what held it."""
    size, together = merge.parameters, merge.session.ensemble_parameters
    line = f"parameters: {wording.count(size)} (growth {merge.growth:.2f}"
    line += (
        f"; the {wording.count(len(merge.clients))} clients together: {wording.count(together)})"
    )
    lines = [line]
    if merge.width_limit is not None and merge.growth > 1:
        lines.append(
            f"every group was held to {merge.width_limit:.2f} × its widest client "
            f"to stay within --max-growth {merge.session.dials.max_growth:g}"
        )
    if merge.options.method == "ensemble" and not merge.is_program:
        lines.append(
            f"side by side in one net: {size / together:.1f} × the parameters, and about as many "
            "times the multiplications, of the clients as they are; a program costs what they do: "
            "-o FILE.pt2 --model M"
        )
    elif size > together:
        lines.append("larger than all clients together: keeping them as an ensemble is cheaper")
    return lines


def ways_to_load(merge: Merge, output: Path) -> list[str]:
    """Say what to do with a model that is wider than the clients, or is a program."""
    if merge.is_program:
        return [f'run it without fedmerge: torch.export.load("{output}").module()']
    widest = {g.name: max(g.client_widths) for g in merge.groups}
    wider = [
        f"{g.name} {widest[g.name]} → {g.width}" for g in merge.groups if g.width > widest[g.name]
    ]
    if not wider:
        return []
    if output.is_dir():
        return [f'wider than the clients, as its config.json says: from_pretrained("{output}")']
    load = f'load it with fedmerge.load_model(build, "{output}")'
    is_free = merge.options.method == "fedma"
    return [
        f"wider than the clients: {', '.join(wider)}",
        f"{load}, or keep the widths with --max-growth 1" if is_free else load,
    ]


def _verdict(merge: Merge, output: Path, clients: Sequence[Path], given: Mapping[str, Any]) -> str:
    """Say in one line how good the merge is, as far as it is known, and how to measure it."""
    files: list[str | Path] = [*map(Path, clients), "--global", output]
    needed = {**given, "model": given["model"] or "M"}
    if (merge.plan.architecture or "").endswith(_LANGUAGE_MODELS):
        needed["task"] = "language-model"
    measure = f"measure it: {COMMANDS['compare'].suggested(files, needed, _MEASURED)} --data FILE"
    found = merge.quality
    if merge.is_program:
        return f"quality: it is the clients' ensemble itself; {measure}"
    if found is None:
        return f"quality: unknown without data; {measure}"
    ranked = sorted(found.clients.items(), key=lambda own: own[1].rank, reverse=True)
    alone = [f"{percent(own.decisions)} ({name})" for name, own in ranked]
    return (
        f"quality, predicted: {found.position.words}; decides as the ensemble does on "
        f"{percent(found.merged.decisions)} of {found.samples} held-out probes ({found.source}), "
        f"the clients alone on {wording.listed(alone, wording.MOST_LISTED)}; {measure}"
    )


def _show_prediction(prediction: Prediction, terminal: Terminal) -> None:
    terminal.result({"dry_run": True, **prediction.to_json()})
    rows = [
        [g.name, wording.widths(g.client_widths), f"{g.narrowest} to {g.widest}"]
        for g in prediction.groups
    ]
    terminal.table("dry run: nothing is matched or written", ["group", "clients", "global"], rows)
    fewest, most = map(wording.count, (prediction.fewest_parameters, prediction.most_parameters))
    terminal.line(f"parameters: {fewest} to {most}")
    terminal.line(f"memory: about {wording.megabytes(prediction.memory)} beyond the libraries")
    terminal.line(f"to read: {wording.megabytes(prediction.read)}; rounds with clients: none")


def page_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Return where the page of --report is, as `--json` prints it."""
    return {} if given["report"] is None else {"report": str(given["report"])}


def say_page(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Say where the page of --report is, if there is one."""
    if given["report"] is not None:
        terminal.line(f"wrote {given['report']}, a page about it")
