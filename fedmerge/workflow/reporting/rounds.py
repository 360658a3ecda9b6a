"""The rounds that a record tells of, next to those of other runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from fedmerge.report import Curve, Missing, RoundsView
from fedmerge.workflow.retrain.history import WHY_MISSING

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
