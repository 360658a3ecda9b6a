"""Runs of which every state is seen, on any engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedmerge
from fedmerge.engines import Engine, LocalEngine
from fedmerge.federated import Event, Rounds, Run, SavedState, open_run, prepare_run
from tests.unit.federated.nets import FULL_BATCH


def options_for(
    *, epochs: int = 1, rate: float = 0.05, batch_size: int = FULL_BATCH, **settings: Any
) -> fedmerge.RetrainOptions:
    """Return options with all samples in one batch, so that shuffling changes nothing."""
    training = fedmerge.TrainSettings(epochs=epochs, learning_rate=rate, batch_size=batch_size)
    return fedmerge.RetrainOptions(training=training, **settings)


def watched_run(
    sources: Sequence[Path],
    shards: Path,
    options: fedmerge.RetrainOptions,
    *,
    model: fedmerge.ModelCode,
    engine: Engine | None = None,
    policy: fedmerge.RetryPolicy | None = None,
    data: Path | None = None,
) -> tuple[Run, list[SavedState], list[Event]]:
    """Run all rounds, and return the run, the state after each of them, and all events."""
    opened = open_run(sources, [shards], options, model=model)
    run = prepare_run(opened, engine or LocalEngine(opened.clients))
    states: list[SavedState] = []
    events: list[Event] = []
    running = fedmerge.Running(device="cpu", policy=policy or fedmerge.RetryPolicy())
    rounds = Rounds(
        run,
        engine or LocalEngine(run.clients),
        running,
        None if data is None else str(data),
        states.append,
        events.append,
    )
    rounds.finish(SavedState(run.method.start(), ()))
    return run, states, events
