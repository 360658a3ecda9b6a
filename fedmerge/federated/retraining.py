"""`retrain`: rounds of matching and training, and the model that they make."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedmerge.architecture import count_parameters
from fedmerge.checkpoint import Values
from fedmerge.engines import Engine
from fedmerge.federated.events import HearEvent, RunFinished, RunStarted
from fedmerge.federated.federation import pad_ties
from fedmerge.federated.options import RetrainOptions, Running
from fedmerge.federated.preparation import Run
from fedmerge.federated.rounds import Keep, Rounds, keep_nothing, whole_model
from fedmerge.federated.run_folder import WorkDir
from fedmerge.federated.state import SavedState
from fedmerge.federated.work_dir import keep_layer
from fedmerge.merging.prediction import Prediction, predict
from fedmerge.merging.record_schema import RoundEntry, ShardEntry
from fedmerge.merging.result import Merge
from fedmerge.values.arrays import Array
from fedmerge.values.clients import Client
from fedmerge.values.plans import Assignment, Plan, axis_size, equal_widths
from fedmerge.values.work import Arrays


@dataclass(frozen=True, kw_only=True, repr=False)
class Retrained(Merge):
    """A merge whose global tensors were trained, not computed from the clients' files."""

    arrays: Arrays  # every tensor of the global model under the clients' names
    retraining: RetrainOptions
    shards: Sequence[ShardEntry]
    rounds: tuple[RoundEntry, ...]
    continued: str | None  # SHA-256 of the merged file that the clients were cut out of

    def read(self, name: str) -> Array:
        """Return one global tensor."""
        return self.arrays[self.session.aligned[0].aliases.get(name, name)]

    def values(self, name: str) -> Values:
        """Return one global tensor for its file: no mean of the clients' files."""
        return self.read(name)

    @property
    def missing(self) -> Mapping[int, Mapping[str, str]]:
        """Who was left out of which round, and why."""
        return {entry.number: entry.missing for entry in self.rounds if entry.missing}

    def summary(self) -> dict[str, Any]:
        """Return what a script wants to know of the run."""
        return {
            **super().summary(),
            "method": self.retraining.method,
            "rounds": [asdict(entry) for entry in self.rounds],
            "bytes_up": sum(entry.bytes_up for entry in self.rounds),
            "bytes_down": sum(entry.bytes_down for entry in self.rounds),
            "missing": {str(number): dict(names) for number, names in self.missing.items()},
        }

    def record(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Return the merge record, with what was trained on what in which rounds."""
        retraining = {
            "options": self.retraining.to_json(),
            "continued_from": self.continued,
            "shards": [asdict(entry) for entry in self.shards],
            "rounds": [entry.to_record() for entry in self.rounds],
        }
        return {**super().record(digests), "retrain": retraining}


def run_prepared(
    run: Run,
    engine: Engine,
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
    save = (lambda state: None) if work_dir is None else partial(work_dir.save, run)
    keep: Keep = keep_nothing
    if work_dir is not None:
        keep = partial(keep_layer, work_dir.path, run.session.plan)
    state = Rounds(run, engine, running, data, save, hear, keep).finish(state)
    hear(RunFinished(rounds, round(time.monotonic() - began, 3)))
    return _retrained(run, state)


def _retrained(run: Run, state: SavedState) -> Retrained:
    """Return the global model of a run whose rounds are over."""
    session, federation = run.session, state.federation
    widths = equal_widths(federation.widths, session.plan.same_width)
    entries = {entry.name: entry for entry in federation.groups}
    return Retrained(
        session=session,
        widths=widths,
        placements=[
            {group: Assignment(a.indices, widths[group]) for group, a in placement.items()}
            for placement in federation.placements
        ],
        groups=tuple(
            replace(entries[name], width=width, padding=width - entries[name].width)
            for name, width in widths.items()
        ),
        width_limit=None,
        warnings=run.warnings,
        probes=run.options.probes.to_json() if run.options.init == "matched" else None,
        arrays=pad_ties(whole_model(federation), session.plan, federation.widths),
        retraining=run.options,
        shards=run.shards,
        rounds=state.rounds,
        continued=run.start.continued,
    )


@dataclass(frozen=True)
class RetrainPrediction:
    """The sizes of a run; bytes are those of layers that do not grow."""

    merge: Prediction
    rounds: tuple[str, ...]  # what each decides
    epochs: int  # of local training, all rounds of one client together
    bytes_up: int  # of all clients and rounds
    bytes_down: int

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        own = {**vars(self), "rounds": list(self.rounds)}
        del own["merge"]
        return {**self.merge.to_json(), **own}


def predict_run(run: Run) -> RetrainPrediction:
    """Return what a run would exchange with its clients, and how large its result may be."""
    session, rounds = run.session, run.method.rounds
    whole = sum(current.completes for current in rounds)  # each has exchanged every tensor once
    first = session.aligned[0]
    up = [_bytes(session.plan, own, first) for own in session.client_widths]
    return RetrainPrediction(
        merge=predict(session),
        rounds=tuple(current.layer.label for current in rounds),
        epochs=sum(current.epochs for current in rounds),
        bytes_up=whole * sum(up),
        bytes_down=whole * len(up) * _bytes(session.plan, session.widest, first),
    )


def _bytes(plan: Plan, widths: Mapping[str, int], first: Client) -> int:
    """Return the bytes of all planned tensors at some widths, as they are in memory."""
    double = [name for name in plan.tensors if first.tensors[name].dtype == "float64"]
    sizes = [
        int(np.prod([axis_size(axis, widths) for axis in plan.tensors[name].axes]))
        for name in double
    ]
    return 4 * (count_parameters(plan, widths) + sum(sizes))
