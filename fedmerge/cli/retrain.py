"""`fedmerge retrain`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from fedmerge.api import retrain
from fedmerge.checkpoint import check_targets, written_path
from fedmerge.cli.arguments import (
    asked_by_user,
    check_applicable,
    client_names,
    given_plan,
    image_options,
    match_options,
    model_code,
    note_merged,
)
from fedmerge.cli.commands import COMMANDS
from fedmerge.cli.match import page_of, say_page, sizes, ways_to_load, written
from fedmerge.cli.output import Terminal, metric, metric_title
from fedmerge.errors import UsageError
from fedmerge.federated.events import (
    ClientFailed,
    ClientFinished,
    ClientStarted,
    Event,
    RoundDone,
    RoundStarted,
    RunStarted,
    event_to_json,
)
from fedmerge.federated.options import retrain_options, running_options
from fedmerge.federated.preparation import Run
from fedmerge.federated.retraining import Retrained, RetrainPrediction
from fedmerge.federated.run_folder import default_work_dir
from fedmerge.measuring import predict_retrain
from fedmerge.merging.record_schema import WHY_MISSING, RoundEntry
from fedmerge.values import wording
from fedmerge.values.wording import Progress

MOST_AT_WORK = 2  # clients that the bar names


def check_events(given: Mapping[str, Any], *, inputs: Sequence[Path]) -> None:
    """Refuse a file of events that must not be written, before any work."""
    if given["events"] is None:
        return
    try:
        may_exist = given["force"] or given["resume"]
        check_targets([given["events"]], inputs=inputs, force=may_exist)
    except UsageError as error:
        raise UsageError(f"--events {error.problem}", error.hint) from None


class EventFile:
    """The file of --events: a line of JSON per event; a run that goes on continues it."""

    def __init__(self, given: Mapping[str, Any], terminal: Terminal) -> None:
        self._path: Path | None = given["events"]
        self._mode = "a" if given["resume"] else "w" if given["force"] else "x"
        self._terminal = terminal
        self._file: IO[str] | None = None

    def open(self) -> None:
        """Open the file, if there is to be one."""
        path = self._path
        if path is None:
            return
        try:
            self._file = path.open(self._mode, encoding="utf-8")
        except FileExistsError:
            raise UsageError(
                f"--events {path}: exists already, it was written meanwhile",
                "overwrite it with --force",
            ) from None
        except OSError as error:
            raise UsageError(f"--events {path}: can't be written ({error.strerror})") from None

    def hear(self, event: Event) -> None:
        """Write an event at once."""
        if self._file is not None:
            value = self._terminal.spoken(event_to_json(event))
            json.dump({"time": round(time.time(), 3), **value}, self._file)
            self._file.write("\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


class Shown:
    """Events as lines on stderr, and a bar on a terminal."""

    def __init__(self, terminal: Terminal, progress: Progress) -> None:
        self._terminal, self._progress = terminal, progress
        self._rounds = self._clients = 1
        self._done = 0  # of the clients of all rounds
        self._round = self._loss = ""
        self._training: list[str] = []  # clients that are at it

    def hear(self, event: Event) -> None:
        """Show what is worth a line."""
        if (show_event := _SHOWN.get(type(event))) is not None:
            show_event(self, event)

    def started(self, event: RunStarted) -> None:
        """Draw the bar."""
        self._rounds, self._clients = event.rounds, len(event.clients)
        if event.resumed:
            self._terminal.note(f"resumed after round {event.resumed} of {event.rounds}")
        self._done = event.resumed * self._clients

    def round_started(self, event: RoundStarted) -> None:
        """Say which round it is."""
        self._round = f"round {event.round}/{self._rounds} ({event.layer})"
        self._loss = ""
        self._draw()

    def client_started(self, event: ClientStarted) -> None:
        """Say who trains."""
        self._training.append(event.client)
        self._draw()

    def client_finished(self, event: ClientFinished) -> None:
        """Say how one client did."""
        self._terminal.detail(
            f"round {event.round}: {event.client} trained on {event.samples} samples in "
            f"{event.seconds:.1f} s, loss {event.loss:.4f}"
        )
        self._loss = f"{event.client}: loss {event.loss:.4f}"
        self._training.remove(event.client)
        self._done += 1
        self._draw()

    def client_failed(self, event: ClientFailed) -> None:
        """Say what became of a client."""
        if event.client in self._training:  # else there was no place for it
            self._training.remove(event.client)
        what = "is left out" if event.is_last else "is tried again"
        self._terminal.warn(
            f"round {event.round}: {event.client} {what} ({event.status}): {event.message}"
        )
        if event.details:
            self._terminal.detail(event.details)

    def round_done(self, event: RoundDone) -> None:
        """Say how far the run is."""
        parts = [] if event.loss is None else [f"local loss {event.loss:.4f}"]
        metrics = (event.metrics or {}).items()
        parts += [f"{metric_title(name)} {metric(name, value)}" for name, value in metrics]
        parts.append(f"{wording.traffic(event.bytes_up)} up")
        parts.append(f"{wording.traffic(event.bytes_down)} down")
        if event.round < event.rounds:
            parts.append(f"about {wording.duration(event.seconds_left)} left")
        self._terminal.note(
            f"round {event.round}/{event.rounds} ({event.layer}): {', '.join(parts)}"
        )
        self._done = event.round * self._clients
        self._draw()

    def _draw(self) -> None:
        """Draw the bar: the round, who trains, and the latest loss."""
        names = wording.listed(self._training, MOST_AT_WORK)
        verb = "train" if len(self._training) > 1 else "trains"
        parts = [self._round, *([f"{names} {verb}"] if names else []), self._loss]
        self._progress(", ".join(filter(None, parts)), self._done, self._rounds * self._clients)


_SHOWN: Mapping[type[object], Callable[[Shown, Any], None]] = {
    RunStarted: Shown.started,
    RoundStarted: Shown.round_started,
    ClientStarted: Shown.client_started,
    ClientFinished: Shown.client_finished,
    ClientFailed: Shown.client_failed,
    RoundDone: Shown.round_done,
}


CLIENTS_MISSING = 5
READING = "reading clients and shards"
STOPPED = "stopped; the same command with --resume goes on after the last full round"


def run(given: Mapping[str, Any], terminal: Terminal) -> int:
    """Run the rounds, write the global model, and return the exit code."""
    started = time.perf_counter()
    check_applicable(given, asked_by_user(given["context"]))
    inputs: dict[str, Any] = {
        "clients": given["clients"] or (),
        "shards": given["shards"],
        "options": retrain_options(given, match_options({**given, "method": None})),
        "model": model_code(given),
        "plan": given_plan(given),
        "data": given["data"],
        "client_names": client_names(given),
        "running": running_options(given),
    }
    note_merged(inputs["clients"], terminal)
    if given["dry_run"]:
        with terminal.working(READING) as work:
            prediction = predict_retrain(
                **inputs, prepared=lambda run: work.prepared(run.notes, run.warnings)
            )
        _show_prediction(prediction, terminal)
        return 0
    retrained = _retrained(given, inputs, terminal)
    output = written_path(given["output"], sharded=given["shard_size"] is not None)
    seconds = round(time.perf_counter() - started, 3)
    result = {**retrained.summary(), "output": str(output), **page_of(given)}
    terminal.result({**result, "seconds": seconds})
    _show_retrained(retrained, output, terminal)
    say_page(given, terminal)
    return CLIENTS_MISSING if retrained.missing else 0


def _retrained(
    given: Mapping[str, Any], inputs: Mapping[str, Any], terminal: Terminal
) -> Retrained:
    """Run the rounds while events are shown and written."""
    check_events(given, inputs=[Path(path) for path in inputs["clients"]])
    with (
        terminal.working(READING, one_bar=True) as work,
        closing(EventFile(given, terminal)) as events,
    ):
        shown = Shown(terminal, work.progress)

        def prepared(run: Run) -> None:
            work.prepared(run.notes, run.warnings)
            events.open()

        def hear(event: Event) -> None:
            events.hear(event)
            shown.hear(event)

        return retrain(
            **inputs,
            **{name: given[name] for name in ("output", "force", "shard_size", "report", "resume")},
            image=image_options(given),
            work_dir=given["work_dir"] or default_work_dir(given["output"]),
            logger=given["logger"],
            prepared=prepared,
            hear=hear,
        )


def _show_retrained(retrained: Retrained, output: Path, terminal: Terminal) -> None:
    names = wording.listed([client.name for client in retrained.clients], wording.MOST_LISTED)
    clients = wording.count(len(retrained.clients))
    title = f"{retrained.retraining.method} with {clients} clients ({names})"
    metrics = list(dict.fromkeys(m for e in retrained.rounds for m in e.metrics or {}))
    rows = [_row(entry, metrics) for entry in retrained.rounds]
    measured = map(metric_title, metrics)
    columns = ["round", "layer", "width", "local loss", *measured, "up", "down", "missing"]
    terminal.table(title, columns, rows)
    for line in (*sizes(retrained), *ways_to_load(retrained, output), *_absences(retrained)):
        terminal.line(line)
    terminal.line(f"wrote {written(output)}; check it with:")
    terminal.line(COMMANDS["verify"].suggested([output], {}))


def _row(entry: RoundEntry, metrics: Sequence[str]) -> list[str]:
    return [
        str(entry.number),
        entry.layer,
        str(entry.widths.get(entry.layer, "")),
        "" if entry.loss is None else f"{entry.loss:.4f}",
        *(metric(m, entry.metrics[m]) if entry.metrics else "" for m in metrics),
        wording.traffic(entry.bytes_up),
        wording.traffic(entry.bytes_down),
        wording.listed(list(entry.missing), wording.MOST_LISTED),
    ]


def _absences(retrained: Retrained) -> Sequence[str]:
    return [
        f"round {number} was done without {wording.listed(_reasons(names), wording.MOST_LISTED)}"
        for number, names in retrained.missing.items()
    ]


def _reasons(names: Mapping[str, str]) -> list[str]:
    return [f"{name} ({WHY_MISSING.get(why, why)})" for name, why in names.items()]


def _show_prediction(prediction: RetrainPrediction, terminal: Terminal) -> None:
    terminal.result({"dry_run": True, **prediction.to_json()})
    groups = prediction.merge.groups
    rows = [
        [g.name, wording.widths(g.client_widths), f"{g.narrowest} to {g.widest}"] for g in groups
    ]
    terminal.table("dry run: nothing is trained or written", ["group", "clients", "global"], rows)
    fewest = wording.count(prediction.merge.fewest_parameters)
    terminal.line(f"parameters: {fewest} to {wording.count(prediction.merge.most_parameters)}")
    terminal.line(f"rounds: {len(prediction.rounds)} ({wording.listed(prediction.rounds, 8)})")
    terminal.line(f"epochs of each client: {prediction.epochs}")
    up, down = wording.traffic(prediction.bytes_up), wording.traffic(prediction.bytes_down)
    terminal.line(f"to exchange if no layer grows: {up} up, {down} down")
