"""`fedmerge retrain`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from fedmerge.checkpoint import parse_size
from fedmerge.cli import show
from fedmerge.cli.applicable import asked_by_user, check_applicable
from fedmerge.cli.arguments import given_plan, match_options, model_code, note_merged
from fedmerge.cli.match import as_argument, sizes, ways_to_load, written
from fedmerge.cli.report import also_report, check_also, say_report
from fedmerge.cli.retrain_progress import check_events, listening
from fedmerge.cli.scores import metric, metric_title
from fedmerge.cli.terminal import Terminal
from fedmerge.workflow.retrain.history import WHY_MISSING, RoundEntry
from fedmerge.workflow.retrain.options import RetrainOptions, retrain_options
from fedmerge.workflow.retrain.predict import RetrainPrediction, predict_run
from fedmerge.workflow.retrain.prepare import Run, prepare_run
from fedmerge.workflow.retrain.result import Retrained
from fedmerge.workflow.retrain.retrain import check_retrained_output, run_prepared
from fedmerge.workflow.retrain.running import Running, running_options
from fedmerge.workflow.retrain.state import WorkDir, default_work_dir

CLIENTS_MISSING = 5
STOPPED = "stopped; the same command with --resume goes on after the last full round"


def run(given: Mapping[str, Any], terminal: Terminal) -> int:
    """Run the rounds, write the global model, and return the exit code."""
    started = time.perf_counter()
    check_applicable(given, asked_by_user(given["context"]))
    options = retrain_options(given, match_options({**given, "method": None}))
    running, output = running_options(given), Path(given["output"])
    shard_size = parse_size(given["shard_size"])
    work_dir = WorkDir(given["work_dir"] or default_work_dir(output))
    if given["dry_run"]:
        prepared = _prepared(given, options, running, terminal)
        _show_prediction(predict_run(prepared), terminal)
        return 0
    with work_dir.held():
        _check_places(given, output, work_dir)
        prepared = _prepared(given, options, running, terminal)
        with listening(given, terminal) as hear:
            retrained = run_prepared(
                prepared,
                data=given["data"],
                work_dir=work_dir,
                output=output,
                running=running,
                hear=hear,
            )
            force, again = given["force"], given["resume"]
            output = retrained.write(output, force=force, again=again, shard_size=shard_size)
            page = also_report(given, output, work_dir=work_dir.path)
    seconds = round(time.perf_counter() - started, 3)
    terminal.result({**retrained.summary(), "output": str(output), **page, "seconds": seconds})
    _show_retrained(retrained, output, terminal)
    say_report(page, terminal)
    return CLIENTS_MISSING if retrained.missing else 0


def _check_places(given: Mapping[str, Any], output: Path, work_dir: WorkDir) -> None:
    """Refuse an output or a work dir that must not be written, before any work."""
    check_retrained_output(
        output,
        given["clients"] or [],
        given["shards"],
        data=given["data"],
        force=given["force"],
        sharded=given["shard_size"] is not None,
        work_dir=work_dir if given["resume"] else None,
    )
    clients = [Path(path) for path in given["clients"] or ()]
    check_also(given, clients)
    check_events(given, inputs=clients)
    if not given["resume"]:
        work_dir.check_free()


def _prepared(
    given: Mapping[str, Any], options: RetrainOptions, running: Running, terminal: Terminal
) -> Run:
    """Open clients and shards, and say what there is to say about them."""
    code = model_code(given)
    assert code is not None, "--model is required"
    note_merged(given["clients"] or [], terminal)
    # The user's code may print.
    with terminal.busy("reading clients and shards"), redirect_stdout(sys.stderr):
        prepared = prepare_run(
            given["clients"] or [],
            given["shards"],
            options,
            model=code,
            plan=given_plan(given),
            data=given["data"],
            running=running,
        )
    for note in prepared.notes:
        terminal.note(f"note: {note}")
    for warning in prepared.warnings:
        terminal.warn(warning)
    return prepared


def _show_retrained(retrained: Retrained, output: Path, terminal: Terminal) -> None:
    names = show.listed([client.name for client in retrained.clients], show.MOST_LISTED)
    clients = show.count(len(retrained.clients))
    title = f"{retrained.retraining.method} with {clients} clients ({names})"
    metrics = list(dict.fromkeys(m for e in retrained.rounds for m in e.metrics or {}))
    rows = [_row(entry, metrics) for entry in retrained.rounds]
    measured = map(metric_title, metrics)
    columns = ["round", "layer", "width", "local loss", *measured, "up", "down", "missing"]
    terminal.table(title, columns, rows)
    for line in (*sizes(retrained), *ways_to_load(retrained, output), *_absences(retrained)):
        terminal.line(line)
    terminal.line(f"wrote {written(output)}; check it with:")
    terminal.line(shlex.join(["fedmerge", "verify", as_argument(output)]))


def _row(entry: RoundEntry, metrics: Sequence[str]) -> list[str]:
    return [
        str(entry.number),
        entry.layer,
        str(entry.widths.get(entry.layer, "")),
        "" if entry.loss is None else f"{entry.loss:.4f}",
        *(metric(m, entry.metrics[m]) if entry.metrics else "" for m in metrics),
        show.traffic(entry.bytes_up),
        show.traffic(entry.bytes_down),
        show.listed(list(entry.missing), show.MOST_LISTED),
    ]


def _absences(retrained: Retrained) -> Sequence[str]:
    return [
        f"round {number} was done without {show.listed(_reasons(names), show.MOST_LISTED)}"
        for number, names in retrained.missing.items()
    ]


def _reasons(names: Mapping[str, str]) -> list[str]:
    return [f"{name} ({WHY_MISSING.get(why, why)})" for name, why in names.items()]


def _show_prediction(prediction: RetrainPrediction, terminal: Terminal) -> None:
    terminal.result({"dry_run": True, **prediction.to_json()})
    groups = prediction.merge.groups
    rows = [[g.name, show.widths(g.client_widths), f"{g.narrowest} to {g.widest}"] for g in groups]
    terminal.table("dry run: nothing is trained or written", ["group", "clients", "global"], rows)
    fewest = show.count(prediction.merge.fewest_parameters)
    terminal.line(f"parameters: {fewest} to {show.count(prediction.merge.most_parameters)}")
    terminal.line(f"rounds: {len(prediction.rounds)} ({show.listed(prediction.rounds, 8)})")
    terminal.line(f"epochs of each client: {prediction.epochs}")
    up, down = show.traffic(prediction.bytes_up), show.traffic(prediction.bytes_down)
    terminal.line(f"to exchange if no layer grows: {up} up, {down} down")
