"""Sections of a report: plan, groups, rounds, scores, verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerge.checkpoint import check_targets, write_bytes
from fedmerge.errors import UsageError
from fedmerge.merging.merge_record import MergeRecord
from fedmerge.merging.record_schema import WHY_MISSING, GroupEntry
from fedmerge.merging.session import Session
from fedmerge.report import (
    Curve,
    FrontierPoint,
    GroupView,
    Match,
    Missing,
    Reference,
    RoundsView,
    Score,
    Scores,
    check_drawing,
    render_frontier,
    render_plan,
)
from fedmerge.report.contents import ScoreKind
from fedmerge.report.plan_figure import plan_picture
from fedmerge.values.wording import AVERAGE, percent

if TYPE_CHECKING:
    from fedmerge.architecture.model_code import ModelCode
    from fedmerge.merging.comparison import Comparison
    from fedmerge.merging.evaluations import EvaluationOptions
    from fedmerge.report.unit_features import ImageOptions
    from fedmerge.training.evaluation import Evaluation


@dataclass(frozen=True)
class Wishes:
    """What else a report shall show, for which models are run."""

    clients: Sequence[str | Path] = ()
    model: ModelCode | None = None
    image: ImageOptions | None = None
    data: str | None = None
    evaluation: EvaluationOptions | None = None
    baselines: Sequence[str | Path] = ()
    work_dir: Path | None = None  # of a run in rounds; None: beside the merged file
    allow_global: Sequence[str] = ()  # classes that the clients' files may name


def short_names(files: Sequence[str | Path], taken: Sequence[str] = ()) -> list[str]:
    """Return what files are called: their stems, numbered where they are not the first of a name.

    >>> short_names(["fedavg.pt", "a/fedma.pt", "b/fedma.pt"], taken=["fedma"])
    ['fedavg', 'fedma (2)', 'fedma (3)']
    """
    uses, names = Counter(taken), []
    for stem in (Path(file).stem for file in files):
        uses[stem] += 1
        names.append(stem if uses[stem] == 1 else f"{stem} ({uses[stem]})")
    return names


AVERAGED = "Units were taken to correspond by their place, so nothing was compared."
APART = "No unit has a fellow: no match, no cost."
UNRECORDED = (
    "The record has no match costs (written by an earlier fedmerge, or clients missed the round)."
)


def group_views(record: MergeRecord) -> tuple[GroupView, ...]:
    """Return what became of every group."""
    return tuple(_view(record, entry) for entry in record.groups)


def _view(record: MergeRecord, entry: GroupEntry) -> GroupView:
    clients = [source.name for source in record.sources]
    homes = np.concatenate([record.numbers(client, entry.name) for client in clients])
    counts = np.bincount(homes, minlength=entry.width)
    known = [c for own in entry.similarities for c in own if c is not None]
    matches = sorted(_matches(record, entry), key=lambda match: -match.similarity)
    return GroupView(
        name=entry.name,
        client_widths=entry.client_widths,
        width=entry.width,
        padding=entry.padding,
        match_rate=entry.match_rate,
        scatter=entry.scatter,
        owners=tuple(int((counts == owners).sum()) for owners in range(1, len(clients) + 1)),
        threshold=entry.threshold,
        similarities=tuple(known),
        matches=tuple(matches),
        unknown="" if known else _why_unknown(record, entry),
        inside=record.plan.inside.get(entry.name, ""),
    )


def _matches(record: MergeRecord, entry: GroupEntry) -> Iterator[Match]:
    """Yield every global unit whose owners were compared."""
    owners: dict[int, list[tuple[str, int, float]]] = {}
    for source, own in zip(record.sources, entry.similarities, strict=False):
        units = record.numbers(source.name, entry.name).tolist()
        for number, (unit, cosine) in enumerate(zip(units, own, strict=True)):
            if cosine is not None:
                owners.setdefault(unit, []).append((source.name, number, cosine))
    for unit, members in owners.items():
        mean = sum(cosine for _, _, cosine in members) / len(members)
        yield Match(unit, tuple((client, number) for client, number, _ in members), mean)


def _why_unknown(record: MergeRecord, entry: GroupEntry) -> str:
    if entry.match_rate == 0:
        return APART
    if entry.scatter is None or record.options.method == "average":
        return AVERAGED
    return UNRECORDED


Record = Mapping[str, Any]
MEGA = 1e6


def rounds_view(record: Record, baselines: Mapping[str, Record]) -> RoundsView:
    """Return a run's rounds with those of baselines (name → record)."""
    rounds = record["retrain"]["rounds"]
    groups = [group["name"] for group in record["groups"]]
    return RoundsView(
        curves=(
            _curve(method_of(record), record, is_own=True),
            *(_curve(name, other, is_own=False) for name, other in baselines.items()),
        ),
        labels=tuple(_label(entry, rounds) for entry in rounds),
        widths={name: _widths(rounds, name) for name in groups},
        missing=tuple(
            Missing(int(entry["number"]), client, WHY_MISSING.get(why, str(why)))
            for entry in rounds
            for client, why in entry["missing"].items()
        ),
        clients=len(record["sources"]),
    )


def method_of(record: Record) -> str:
    """Return the method of a run in rounds."""
    return str(record["retrain"]["options"].get("method", "fedma"))


def last_metrics(curve: Curve) -> dict[str, float]:
    """Return the last known value of every metric."""
    known = {m: [v for v in values if v is not None] for m, values in curve.metrics.items()}
    return {metric: values[-1] for metric, values in known.items() if values}


def _curve(name: str, record: Record, *, is_own: bool) -> Curve:
    rounds = record["retrain"]["rounds"]
    moved = accumulate((e["bytes_up"] + e["bytes_down"]) / MEGA for e in rounds)
    names = dict.fromkeys(m for entry in rounds for m in entry["metrics"] or {})
    return Curve(
        name=name,
        is_own=is_own,
        rounds=tuple(int(entry["number"]) for entry in rounds),
        megabytes=tuple(moved),
        losses=tuple(_mean(entry["losses"]) for entry in rounds),
        metrics={m: tuple((entry["metrics"] or {}).get(m) for entry in rounds) for m in names},
    )


def _mean(losses: Mapping[str, float | None]) -> float | None:
    known = [loss for loss in losses.values() if loss is not None]
    return sum(known) / len(known) if known else None


def _label(entry: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str:
    is_long = any(other["pass_number"] > 1 for other in rounds)
    which = f"pass {entry['pass_number']}: " if is_long else ""
    return f"{which}{entry['layer'] or entry['stage']}"


def _widths(rounds: Sequence[Mapping[str, Any]], group: str) -> tuple[int | None, ...]:
    return tuple(entry["widths"].get(group) for entry in rounds)


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
    distances = [own.get("distance") for own in quality["clients"].values()]
    nearest = min((d for d in distances if d is not None), default=None)  # older records: none
    rows = [_predicted("client", name, own, nearest) for name, own in quality["clients"].items()]
    for name, own in quality["candidates"].items():
        if name != quality["chosen"]:
            kind: ScoreKind = "average" if name == AVERAGE else "other"
            label = name if name == AVERAGE else f"tried: {name}"
            rows.append(_predicted(kind, label, own, nearest))
    rows.append(_predicted("merge", MERGE, quality["agreement"], nearest))
    probes, samples = quality["probes"], quality["samples"]
    return Scores(
        title="Predicted: how often a model decides as the clients' ensemble does",
        metric="agreement with the ensemble",
        is_share=True,
        columns=("pull",),
        rows=tuple(rows),
        how=f"On {samples} held-out probes ({probes}). Of {len(quality['candidates'])} ways to "
        f"merge the best was chosen: {quality['chosen']}. Pull goes from 0, as far from the "
        "ensemble as the nearest client, to 1, the ensemble. A prediction: data can tell more.",
        reference=Reference("the ensemble, by definition", 1.0),
    )


def _predicted(
    kind: ScoreKind, name: str, agreement: Mapping[str, Any], nearest: float | None
) -> Score:
    """Return a model's row; `nearest` is the nearest client's distance from the ensemble."""
    decisions, distance = agreement["decisions"], agreement.get("distance")
    pull = 1 - distance / nearest if nearest and distance is not None else None
    return Score(kind, name, None if decisions is None else float(decisions), (_share(pull),))


def measured_scores(found: Comparison, data: str) -> Scores:
    """Return how well clients, average, ensemble and merge do on data."""
    rows = [row for row in found.rows if row.kind in _KINDS]
    metric = _main_metric([row.evaluation for row in rows if row.evaluation is not None])
    return Scores(
        title=f"Measured: {metric.replace('_', ' ')}",
        metric=metric.replace("_", " "),
        is_share=metric == ACCURACY,
        columns=("loss", "pull", "gain", "parameters", "growth"),
        rows=tuple(
            Score(
                _KINDS[row.kind],
                MERGE if row.kind == "global" else row.model,
                None if row.evaluation is None else _value(row.evaluation, metric),
                ()
                if row.evaluation is None
                else (
                    f"{row.evaluation.loss:.4f}",
                    _share(row.pull),
                    _share(row.gain),
                    f"{row.parameters or 0:,}",
                    f"{row.growth or 0:.2f}",
                ),
                row.reason,
            )
            for row in rows
        ),
        how=f"On the {found.samples:,} samples of {data}. Pull goes from 0, as far from the "
        "ensemble as the nearest client, to 1, the ensemble; gain from 0, as good as the best "
        "client, to 1, as good as the ensemble.",
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


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


UNKNOWN = "How good this model is, is not known: {why}"
_NAMES = {"average": "the element-wise average", "ensemble": "the ensemble"}
LOWER_IS_BETTER = ("loss", "perplexity", "bits per character")


def verdict(scores: Scores | None, how: str, size: str) -> str:
    """Return the sentence; `how` starts it, or says why nothing is known."""
    if scores is None:
        return f"{UNKNOWN.format(why=how)}; {size}."
    merge = next(row for row in scores.rows if row.kind == "merge")
    against = _against(scores)
    tail = f", against {against}" if against else ""
    return f"{how} {_shown(scores, merge)}{tail}; {size}."


def _against(scores: Scores) -> str:
    """Return what the merge has to beat, in words."""
    known = [row for row in scores.rows if row.value is not None]
    clients = [row for row in known if row.kind == "client"]
    parts = []
    if clients:
        best = max(clients, key=lambda row: _goodness(scores, row))
        worst = min(clients, key=lambda row: _goodness(scores, row))
        parts.append(f"{_shown(scores, best)} of the best client ({best.model})")
        if best is not worst:
            parts.append(f"{_shown(scores, worst)} of the worst ({worst.model})")
    for row in known:
        if row.kind in _NAMES:
            parts.append(f"{_shown(scores, row)} of {_NAMES[row.kind]}")
        elif row.kind == "other" and not clients:  # baselines; a client's rivals are candidates
            parts.append(f"{_shown(scores, row)} of {row.model}")
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _goodness(scores: Scores, row: Score) -> float:
    assert row.value is not None
    return -row.value if scores.metric in LOWER_IS_BETTER else row.value


def _shown(scores: Scores, row: Score) -> str:
    if row.value is None:
        return "an unknown number"
    return percent(row.value) if scores.is_share else f"{row.value:.4f}"


KINDS = ("svg", "png")


def check_picture(
    path: str | Path, argument: str, *, inputs: Sequence[str | Path], force: bool
) -> None:
    """Refuse a picture that can't be drawn or written, before any work."""
    if _kind(path) not in KINDS:
        raise UsageError(f"`{argument}` is {path}, expected a name that ends in .svg or .png")
    check_drawing()
    check_targets([Path(path)], inputs=inputs, force=force)


def draw_graph(session: Session, path: str | Path, *, force: bool) -> None:
    """Write the picture of a session's plan, by the name's ending."""
    widths = {
        group.name: [own[group.name] for own in session.client_widths]
        for group in session.plan.groups
    }
    picture = render_plan(plan_picture(session.plan, widths), _kind(path))
    write_bytes(Path(path), picture, force=force)


def draw_sizes(frontier: Mapping[str, Any], path: str | Path, *, force: bool) -> None:
    """Write the picture of a frontier, given as JSON values, by the name's ending."""
    write_bytes(Path(path), render_frontier(frontier_points(frontier), _kind(path)), force=force)


def _kind(path: str | Path) -> str:
    return Path(path).suffix.lower().removeprefix(".")
