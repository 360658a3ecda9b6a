"""Predicted and measured quality as tables of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedmerge.report import FrontierPoint, Reference, Score, Scores
from fedmerge.report.values import ScoreKind
from fedmerge.types.words import AVERAGE, percent

if TYPE_CHECKING:
    from fedmerge.workflow.compare import Comparison
    from fedmerge.workflow.evaluate import Evaluation

ACCURACY = "accuracy"
MERGE = "the merge"
_KINDS: Mapping[str, ScoreKind] = {
    "client": "client",
    "average": "average",
    "ensemble": "ensemble",
    "global": "merge",
    "baseline": "other",
}


def predicted_scores(quality: Mapping[str, Any]) -> Scores:
    """Return how often models decide as the clients' ensemble does, from a record's quality."""
    rows = [_predicted("client", name, own) for name, own in quality["clients"].items()]
    for name, own in quality["candidates"].items():
        if name != quality["chosen"]:
            kind: ScoreKind = "average" if name == AVERAGE else "other"
            label = name if name == AVERAGE else f"tried: {name}"
            rows.append(_predicted(kind, label, own))
    rows.append(_predicted("merge", MERGE, quality["agreement"]))
    probes, samples = quality["probes"], quality["samples"]
    return Scores(
        title="Predicted: how often a model decides as the clients' ensemble does",
        metric="agreement with the ensemble",
        is_share=True,
        columns=("outputs explained",),
        rows=tuple(rows),
        how=f"On {samples} held-out probes ({probes}). Of {len(quality['candidates'])} ways to "
        f"merge the best was chosen: {quality['chosen']}. A prediction: data can tell more.",
        reference=Reference("the ensemble, by definition", 1.0),
    )


def _predicted(kind: ScoreKind, name: str, agreement: Mapping[str, Any]) -> Score:
    decisions, explained = agreement["decisions"], agreement["explained"]
    shown = "not finite" if explained is None else percent(explained)
    return Score(kind, name, None if decisions is None else float(decisions), (shown,))


def measured_scores(found: Comparison, data: str) -> Scores:
    """Return how well clients, average, ensemble and merge do on data."""
    rows = [row for row in found.rows if row.kind in _KINDS]
    metric = _main_metric([row.evaluation for row in rows if row.evaluation is not None])
    return Scores(
        title=f"Measured: {metric.replace('_', ' ')}",
        metric=metric.replace("_", " "),
        is_share=metric == ACCURACY,
        columns=("loss", "parameters", "growth"),
        rows=tuple(
            Score(
                _KINDS[row.kind],
                MERGE if row.kind == "global" else row.model,
                None if row.evaluation is None else _value(row.evaluation, metric),
                ()
                if row.evaluation is None
                else (
                    f"{row.evaluation.loss:.4f}",
                    f"{row.parameters or 0:,}",
                    f"{row.growth or 0:.2f}",
                ),
                row.reason,
            )
            for row in rows
        ),
        how=f"On the {found.samples:,} samples of {data}.",
    )


def run_scores(metrics: Mapping[str, Mapping[str, float]]) -> Scores | None:
    """Return the last measured numbers of runs (name → metrics), the report's own first."""
    own = next(iter(metrics.values()))
    if not own:
        return None
    metric = ACCURACY if ACCURACY in own else next(iter(own))
    others = [name for name in own if name != metric]
    rows = [
        Score(
            "other" if number else "merge",
            name,
            values.get(metric),
            tuple(f"{values[m]:.4f}" if m in values else "" for m in others),
            "" if metric in values else "it did not measure this",
        )
        for number, (name, values) in enumerate(metrics.items())
    ]
    return Scores(
        title=f"Measured after the last round: {metric.replace('_', ' ')}",
        metric=metric.replace("_", " "),
        is_share=metric == ACCURACY,
        columns=tuple(name.replace("_", " ") for name in others),
        rows=tuple(rows),
        how="On the data that each run was given to evaluate on, as its record tells.",
    )


def frontier_points(
    value: Mapping[str, Any], parameters: int | None = None
) -> tuple[FrontierPoint, ...]:
    """Return the sizes that were tried, from a record's frontier; the merge's own is marked."""
    clients = [_point("client", f"client {p['name']}", p) for p in value["clients"]]
    *merges, ensemble = value["points"]
    sized = [_point("merge", f"merge within {p['budget']:g} × ({p['name']})", p) for p in merges]
    marked = [replace(point, is_own=point.parameters == parameters) for point in sized]
    return (*clients, *marked, _point("ensemble", "ensemble, all side by side", ensemble))


def _point(kind: Any, name: str, value: Mapping[str, Any]) -> FrontierPoint:
    agreed = value["agreement"]["decisions"]
    return FrontierPoint(kind, name, value["growth"], value["parameters"], float(agreed or 0.0))


def _main_metric(found: Sequence[Evaluation]) -> str:
    names = found[0].metrics
    return ACCURACY if ACCURACY in names else next(iter(names), "loss")


def _value(found: Evaluation, metric: str) -> float:
    return found.loss if metric == "loss" else found.metrics[metric]
