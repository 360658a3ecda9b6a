"""`compare`: a merge next to what it has to beat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fedmerge.checkpoint import Checkpoint, expand_paths, from_state_dict
from fedmerge.errors import ArchitectureError
from fedmerge.graph import count_parameters
from fedmerge.training import Evaluation
from fedmerge.types.plans import Plan
from fedmerge.types.progress import Progress, silent
from fedmerge.types.words import AVERAGE, percent
from fedmerge.workflow.clients import Source, expand_sources, open_clients
from fedmerge.workflow.evaluate import EvaluationOptions, Judge, count_floats, open_judge
from fedmerge.workflow.match import merge_prepared
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.models import ModelCode
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.prepared import Prepared, average_of, prepare

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

    def to_json(self) -> dict[str, Any]:
        """Return the row as `--json` prints it."""
        found = self.evaluation
        return {
            "kind": self.kind,
            "model": self.model,
            "loss": None if found is None else found.loss,
            "metrics": None if found is None else dict(found.metrics),
            "parameters": self.parameters,
            "growth": self.growth,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Comparison:
    """Clients, what they give together, and merges of them, all on the same samples."""

    rows: tuple[Row, ...]
    samples: int
    best_client: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as `--json` prints it."""
        return {
            "samples": self.samples,
            "best_client": self.best_client,
            "rows": [row.to_json() for row in self.rows],
            "warnings": list(self.warnings),
        }


def compare(
    sources: Sequence[Source],
    data: str | Path,
    *,
    model: ModelCode,
    options: MatchOptions | None = None,
    merged: Sequence[str | Path] = (),
    plan: Plan | None = None,
    evaluation: EvaluationOptions | None = None,
    probes: ProbeOptions | None = None,
    is_matched: bool = True,
    progress: Progress = silent,
) -> Comparison:
    """Evaluate clients, their average, ensemble and one-shot match, and merged files.

    One model is in memory at a time. The matching runs where the models do, unless merged files
    are all that is asked for.
    """
    options = replace(options or MatchOptions(), method="fedma")
    judge = open_judge(data, evaluation or EvaluationOptions())
    clients = open_clients(expand_sources(sources), options.reading)
    files = expand_paths(merged)
    others = open_clients(files, options.reading) if files else []
    prepared = prepare(clients, options, plan=plan, model=model.fed_with(judge.shard))
    table = _Table(judge, model, prepared, probes)
    rows = [
        *table.client_rows(progress),
        table.average_row(options),
        *([table.match_row(options, progress)] if is_matched else []),
        *(table.merged_row("global", other.name, other) for other in others),
    ]
    ordered = sorted(rows, key=lambda row: _ORDER.index(row.kind))
    best = _best([row for row in ordered if row.kind == "client"])
    return Comparison(
        rows=tuple(ordered),
        samples=len(judge.shard),
        best_client=best.model,
        notes=prepared.plan.notes,
        warnings=(*prepared.warnings, *_warnings(ordered, best)),
    )


_ORDER: tuple[Kind, ...] = ("client", "mean", "best", "average", "ensemble", "match", "global")


@dataclass(frozen=True)
class _Table:
    """Makes the rows of prepared clients."""

    judge: Judge
    code: ModelCode
    prepared: Prepared
    probes: ProbeOptions | None  # of the match

    def client_rows(self, progress: Progress) -> Iterator[Row]:
        """Yield a row for every client, their mean, the best of them and their ensemble."""
        clients = self.prepared.clients
        weights = self.prepared.averaging.client_weights
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

    def average_row(self, options: MatchOptions) -> Row:
        """Return the row of the element-wise average, of equally wide clients only."""
        try:
            merge = average_of(self.prepared, options)
        except ArchitectureError as error:
            return Row("average", _NAMES["average"], reason=error.problem)
        return self._merge_row("average", merge)

    def match_row(self, options: MatchOptions, progress: Progress) -> Row:
        """Return the row of the match, made in memory."""
        merge = merge_prepared(
            self.prepared,
            options,
            probes=self.probes,
            device=self.judge.options.device,
            progress=progress,
        )
        return self._merge_row("match", merge)

    def merged_row(self, kind: Kind, name: str, checkpoint: Checkpoint) -> Row:
        """Return the row of a merged model."""
        found = self.judge.evaluate(self.code, checkpoint)
        return self._row(kind, name, found, count_floats(checkpoint))

    def _merge_row(self, kind: Kind, merge: Merge) -> Row:
        name = _NAMES[kind]
        return self.merged_row(kind, name, from_state_dict(merge.state_dict(), name=name))

    def _row(self, kind: Kind, name: str, found: Evaluation, parameters: int) -> Row:
        return Row(kind, name, found, parameters, parameters / self._widest_parameters)

    @property
    def _widest_parameters(self) -> int:
        widths = self.prepared.client_widths
        widest = {group: max(own[group] for own in widths) for group in widths[0]}
        planned = count_parameters(self.prepared.plan, widest)
        return planned + self.prepared.kept_parameters


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


def _shown(found: Evaluation) -> str:
    if ACCURACY in found.metrics:
        return percent(found.metrics[ACCURACY])
    return f"loss {found.loss:.4f}"
