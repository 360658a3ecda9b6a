"""What a run tells while it goes on: to the terminal and to a file of events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from fedmerge.cli import show
from fedmerge.cli.scores import metric, metric_title
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import UsageError
from fedmerge.types.progress import Progress
from fedmerge.workflow.retrain.events import (
    ClientFailed,
    ClientFinished,
    ClientStarted,
    Event,
    HearEvent,
    RoundDone,
    RoundStarted,
    RunStarted,
    event_to_json,
)

MOST_AT_WORK = 2  # clients that the bar names


@contextmanager
def listening(events: Path | None, terminal: Terminal, resume: bool) -> Iterator[HearEvent]:
    """Give someone who hears all events; an events file is continued where a run is."""
    with ExitStack() as stack:
        file = None
        if events is not None:
            try:
                file = stack.enter_context(events.open("a" if resume else "w", encoding="utf-8"))
            except OSError as error:
                raise UsageError(
                    f"--events {events}: can't be written ({error.strerror})"
                ) from None
        shown = Shown(terminal, stack.enter_context(terminal.progress(one_bar=True)))

        def hear(event: Event) -> None:
            if file is not None:
                _write(file, event)
            shown.hear(event)

        yield hear


def _write(file: IO[str], event: Event) -> None:
    json.dump({"time": round(time.time(), 3), **event_to_json(event)}, file)
    file.write("\n")
    file.flush()


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
        parts.append(f"{show.traffic(event.bytes_up)} up")
        parts.append(f"{show.traffic(event.bytes_down)} down")
        if event.round < event.rounds:
            parts.append(f"about {show.duration(event.seconds_left)} left")
        self._terminal.note(
            f"round {event.round}/{event.rounds} ({event.layer}): {', '.join(parts)}"
        )
        self._done = event.round * self._clients
        self._draw()

    def _draw(self) -> None:
        """Draw the bar: the round, who trains, and the latest loss."""
        names = show.listed(self._training, MOST_AT_WORK)
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
