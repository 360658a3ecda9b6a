"""The verdict: how good the merge is, against what, and at what size, in one sentence."""

from __future__ import annotations

from fedmerge.report import Score, Scores
from fedmerge.types.words import percent

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
