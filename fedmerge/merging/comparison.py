"""`compare`: a merge next to what it has to beat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import Tensor

from fedmerge.architecture.model_code import ModelCode
from fedmerge.checkpoint import (
    Checkpoint,
    ReadOptions,
    client_names,
    expand_paths,
    from_state_dict,
    has_record,
    open_checkpoint,
)
from fedmerge.errors import ArchitectureError
from fedmerge.merging.evaluations import Judge, count_floats
from fedmerge.merging.methods import average_to_beat, merge_session
from fedmerge.merging.options import Method
from fedmerge.merging.quality import Position, compared_rows, distance, same_decisions
from fedmerge.merging.result import Merge
from fedmerge.merging.session import Session
from fedmerge.probes.options import ProbeOptions
from fedmerge.training import Evaluation
from fedmerge.training.evaluation import InferenceCost
from fedmerge.training.tasks import Classification
from fedmerge.values.wording import AVERAGE, Progress, percent

Kind: TypeAlias = Literal[
    "client", "mean", "best", "average", "ensemble", "match", "global", "baseline"
]  # baselines are other runs in rounds, which a report adds

_NAMES: Mapping[Kind, str] = {
    "mean": "mean of the clients",
    "best": "best client",
    "average": AVERAGE,
    "ensemble": "ensemble",
    "match": "one-shot match",
}
WITH_ROWS: tuple[Method, ...] = ("average", "ensemble")  # methods that are compared in any case
_MERGES: tuple[Kind, ...] = ("match", "global")  # whoever asks for them wants to use them
ACCURACY = "accuracy"  # the metric by which models are better or worse, if there is it
ROUNDING = 1e-9  # means of the same predictions in batches differ by less


@dataclass(frozen=True)
class Row:
    """One model of a comparison, or why there is none."""

    kind: Kind
    model: str
    evaluation: Evaluation | None = None
    parameters: int | None = None
    growth: float | None = None  # parameters ÷ those of a net as wide as the widest client
    reason: str = ""  # why it could not be evaluated
    pull: float | None = None  # 0: as far from the ensemble as the nearest client; 1: there
    gain: float | None = None  # 0: as good as the best client; 1: as the ensemble
    copied_client: str | None = None  # the client that it is, though it is a merge

    def to_json(self) -> dict[str, Any]:
        """Return the row as `--json` prints it."""
        found, cost = self.evaluation, self.cost
        return {
            "kind": self.kind,
            "model": self.model,
            "loss": None if found is None else found.loss,
            "metrics": None if found is None else dict(found.metrics),
            "parameters": self.parameters,
            "growth": self.growth,
            "pull": self.pull,
            "gain": self.gain,
            "copied_client": self.copied_client,
            "seconds_per_1000": None if cost is None else cost.seconds,
            "parameter_bytes": None if cost is None else cost.parameter_bytes,
            "activation_bytes": None if cost is None else cost.activation_bytes,
            "reason": self.reason or None,
        }

    @property
    def cost(self) -> InferenceCost | None:
        """What the model costs to run, where that was measured."""
        return None if self.evaluation is None else self.evaluation.cost


@dataclass(frozen=True)
class Comparison:
    """Clients, what they give together, and merges of them, all on the same samples."""

    rows: tuple[Row, ...]
    samples: int
    best_client: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        """Return the comparison in one line."""
        return (
            f"<Comparison of {len(self.rows)} models on {self.samples:,} samples: the best client "
            f"is {self.best_client}>"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as `--json` prints it."""
        return {
            "samples": self.samples,
            "best_client": self.best_client,
            "rows": [row.to_json() for row in self.rows],
            "warnings": list(self.warnings),
        }


def compare(
    session: Session,
    judge: Judge,
    model: ModelCode,
    *,
    merged: Sequence[str | Path],
    probes: ProbeOptions,
    is_matched: bool,
    progress: Progress,
    is_timed: bool = True,
) -> Comparison:
    """Evaluate clients, their average, ensemble and one-shot match, and merged files.

    `is_timed`: what they cost to run is measured, too. One model is in memory at a time.
    """
    files = expand_paths(merged)
    others = _open_merged(files, session.options.reading)
    table = _Table(replace(judge, keep=compared_rows, is_timed=is_timed), model, session, probes)
    rows = [
        *table.client_rows(progress),
        table.average_row(),
        *([table.match_row(progress)] if is_matched else []),
        *(table.merged_row("global", other.name, other) for other in others),
    ]
    ordered = sorted(rows, key=lambda row: _ORDER.index(row.kind))
    ordered = _measured(ordered, are_classes=isinstance(judge.task, Classification))
    best = _best([row for row in ordered if row.kind == "client"])
    return Comparison(
        rows=tuple(ordered),
        samples=len(judge.shard),
        best_client=best.model,
        notes=session.plan.notes,
        warnings=(*session.warnings, *_warnings(ordered, best)),
    )


_ORDER: tuple[Kind, ...] = ("client", "mean", "best", "average", "ensemble", "match", "global")


def _open_merged(files: Sequence[Path], reading: ReadOptions) -> list[Checkpoint]:
    """Open merged files: what fedmerge wrote is plain, whatever the clients' files are."""
    return [
        open_checkpoint(path, ReadOptions() if has_record(path) else reading, name=name)
        for path, name in zip(files, client_names(files), strict=True)
    ]


@dataclass(frozen=True)
class _Table:
    """Makes the rows of a session."""

    judge: Judge
    code: ModelCode
    session: Session
    probes: ProbeOptions  # of the match

    def client_rows(self, progress: Progress) -> Iterator[Row]:
        """Yield a row for every client, their mean, the best of them and their ensemble."""
        clients = self.session.clients
        weights = self.session.averaging.client_weights
        found = self.judge.evaluate_together(self.code, clients, weights=weights, progress=progress)
        rows = [
            self._row("client", client.name, own, count_floats(client))
            for client, own in zip(clients, found.alone, strict=True)
        ]
        yield from rows
        yield Row("mean", _NAMES["mean"], _mean(found.alone))
        best = _best(rows)
        assert best.evaluation is not None
        by = "" if ACCURACY in best.evaluation.metrics else ", by loss"
        yield replace(best, kind="best", model=f"{_NAMES['best']} ({best.model}{by})")
        together = sum(count_floats(client) for client in clients)
        yield self._row("ensemble", _NAMES["ensemble"], found.together, together)

    def average_row(self) -> Row:
        """Return the row of the element-wise average, of equally wide clients only."""
        try:
            merge = average_to_beat(self.session)
        except ArchitectureError as error:
            return Row("average", _NAMES["average"], reason=error.problem)
        return self._merge_row("average", merge, _NAMES["average"])

    def match_row(self, progress: Progress) -> Row:
        """Return the row of the match, made in memory."""
        method = self.session.options.method
        name = _NAMES["match"] if method == "fedma" else f"{_NAMES['match']} ({method})"
        return self._merge_row("match", merge_session(self.session, self.probes, progress), name)

    def merged_row(self, kind: Kind, name: str, checkpoint: Checkpoint) -> Row:
        """Return the row of a merged model."""
        found = self.judge.evaluate(self.code, checkpoint)
        return self._row(kind, name, found, count_floats(checkpoint))

    def _merge_row(self, kind: Kind, merge: Merge, name: str) -> Row:
        return self.merged_row(kind, name, from_state_dict(merge.state_dict(), name=name))

    def _row(self, kind: Kind, name: str, found: Evaluation, parameters: int) -> Row:
        return Row(kind, name, found, parameters, parameters / self.session.widest_parameters)


def _measured(rows: Sequence[Row], *, are_classes: bool) -> list[Row]:
    """Return rows with their pull and gain, and the name of the client that a merge copies."""
    clients = [row for row in rows if row.kind == "client"]
    ensemble = next(row.evaluation for row in rows if row.kind == "ensemble")
    best = _best(clients).evaluation
    assert ensemble is not None
    assert best is not None
    distances = {row.model: _distance(row, ensemble, are_classes) for row in clients}
    measured = []
    for row in rows:
        if row.evaluation is None or row.kind == "mean":
            measured.append(row)
            continue
        likeness = _likeness(row, clients) if row.kind in _MERGES else {}
        position = Position(_distance(row, ensemble, are_classes), distances, likeness)
        gain = _gain(row.evaluation, best, ensemble)
        copied = position.copied_client
        measured.append(replace(row, pull=position.pull, gain=gain, copied_client=copied))
    return measured


def _outputs(evaluation: Evaluation | None) -> Tensor:
    assert evaluation is not None
    assert evaluation.outputs is not None
    return evaluation.outputs


def _distance(row: Row, ensemble: Evaluation, are_classes: bool) -> float:
    found = distance(_outputs(row.evaluation), _outputs(ensemble), are_classes=are_classes)
    return found if math.isfinite(found) else math.inf


def _likeness(row: Row, clients: Sequence[Row]) -> dict[str, float]:
    """Return the share of equal decisions with every client."""
    outputs = _outputs(row.evaluation)
    return {own.model: same_decisions(outputs, _outputs(own.evaluation)) for own in clients}


def _gain(found: Evaluation, best: Evaluation, ensemble: Evaluation) -> float | None:
    """Return (quality - best client's) ÷ (ensemble's - best client's), None where it has no lead.

    Quality is the accuracy, or -loss where there is none.
    """
    lead = _quality(ensemble) - _quality(best)
    return (_quality(found) - _quality(best)) / lead if lead > ROUNDING else None


def _mean(found: Sequence[Evaluation]) -> Evaluation:
    metrics = {
        name: sum(own.metrics[name] for own in found) / len(found) for name in found[0].metrics
    }
    return Evaluation(sum(own.loss for own in found) / len(found), metrics, found[0].samples)


def _quality(found: Evaluation) -> float:
    """Return what is larger for the better model: the accuracy, -loss where there is none."""
    return found.metrics.get(ACCURACY, -found.loss)


def _best(rows: Sequence[Row]) -> Row:
    evaluated = [(row.evaluation, row) for row in rows if row.evaluation is not None]
    return max(evaluated, key=lambda pair: (_quality(pair[0]), -pair[0].loss))[1]


def _warnings(rows: Sequence[Row], best: Row) -> Iterator[str]:
    """Say of every merge that is worse than the best client that it is."""
    assert best.evaluation is not None
    for row in rows:
        if row.kind not in _MERGES or row.evaluation is None:
            continue
        if _quality(row.evaluation) < _quality(best.evaluation) - ROUNDING:
            yield (
                f"{row.model} is worse than the best client: {_shown(row.evaluation)}, "
                f"{best.model} {_shown(best.evaluation)}"
            )
        if row.copied_client is not None:
            yield f"{row.model} is client {row.copied_client}: nothing of the others is in it"


def _shown(found: Evaluation) -> str:
    if ACCURACY in found.metrics:
        return percent(found.metrics[ACCURACY])
    return f"loss {found.loss:.4f}"
