"""What a run tells while it goes on: to the terminal and to a file of events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from fedmerge.cli import show
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import UsageError
from fedmerge.types.progress import Progress
from fedmerge.workflow.retrain.events import (
    ClientFailed,
    ClientFinished,
    Event,
    HearEvent,
    RoundDone,
    RunStarted,
    event_to_json,
)


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
        shown = _Shown(terminal, stack.enter_context(terminal.progress()))

        def hear(event: Event) -> None:
            if file is not None:
                _write(file, event)
            shown.hear(event)

        yield hear


def _write(file: IO[str], event: Event) -> None:
    json.dump({"time": round(time.time(), 3), **event_to_json(event)}, file)
    file.write("\n")
    file.flush()


class _Shown:
    """Events as lines on stderr, and a bar on a terminal."""

    def __init__(self, terminal: Terminal, progress: Progress) -> None:
        self._terminal, self._progress = terminal, progress
        self._rounds = self._clients = 1
        self._delivered = 0  # clients of this round

    def hear(self, event: Event) -> None:
        """Show what is worth a line."""
        if (show_event := _SHOWN.get(type(event))) is not None:
            show_event(self, event)

    def started(self, event: RunStarted) -> None:
        """Draw the bar."""
        self._rounds, self._clients = event.rounds, len(event.clients)
        if event.resumed:
            self._terminal.note(f"resumed after round {event.resumed} of {event.rounds}")
        self._advance(event.resumed)

    def client_finished(self, event: ClientFinished) -> None:
        """Say how one client did."""
        self._terminal.detail(
            f"round {event.round}: {event.client} trained on {event.samples} samples in "
            f"{event.seconds:.1f} s, loss {event.loss:.4f}"
        )
        self._delivered += 1
        self._progress("clients of this round", self._delivered, self._clients)

    def client_failed(self, event: ClientFailed) -> None:
        """Say what became of a client."""
        what = "is left out" if event.is_last else "is tried again"
        self._terminal.warn(
            f"round {event.round}: {event.client} {what} ({event.status}): {event.message}"
        )

    def round_done(self, event: RoundDone) -> None:
        """Say how far the run is."""
        parts = [] if event.loss is None else [f"local loss {event.loss:.4f}"]
        parts += [f"{name} {show.metric(value)}" for name, value in (event.metrics or {}).items()]
        parts.append(f"{show.traffic(event.bytes_up)} up")
        parts.append(f"{show.traffic(event.bytes_down)} down")
        if event.round < event.rounds:
            parts.append(f"about {show.duration(event.seconds_left)} left")
        self._terminal.note(
            f"round {event.round}/{event.rounds} ({event.layer}): {', '.join(parts)}"
        )
        self._advance(event.round)

    def _advance(self, rounds: int) -> None:
        self._delivered = 0
        self._progress("rounds", rounds, self._rounds)


_SHOWN: Mapping[type[object], Callable[[_Shown, Any], None]] = {
    RunStarted: _Shown.started,
    ClientFinished: _Shown.client_finished,
    ClientFailed: _Shown.client_failed,
    RoundDone: _Shown.round_done,
}
