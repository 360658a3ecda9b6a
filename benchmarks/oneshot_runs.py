"""How `benchmarks.oneshot` runs a merge, and what it keeps of it."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedmerge
from benchmarks.oneshot_clients import Folders, Setting, setting
from benchmarks.oneshot_suites import ALONE, Measure, Merging, Source, options_of
from fedmerge.merging import Agreement, Answers, Candidate, candidates
from fedmerge.probes import ProbeOptions

BATCH = 500  # samples that are tested at once
CANDIDATES_OF = 0  # the seed whose candidates are all tested, as that takes longer than merging


@dataclass(frozen=True)
class Considered:
    """A way to merge among which fedmerge chose, as it was predicted and as it is."""

    name: str
    agreement: float  # with the ensemble's decisions, on held-out probes, in %
    explained: float | None  # of the variance of the ensemble's outputs; None: not finite
    score: float  # on test data


@dataclass(frozen=True)
class Outcome:
    """What a merge gave, on test data: accuracy in %, or bits per character."""

    scores: Mapping[str, float]  # of the merge, or of all that is compared with it
    growth: float = 1.0  # parameters ÷ those of a client
    seconds: float = 0.0  # of wall time, one thread
    chosen: str = ""
    predicted: float | None = None  # agreement with the ensemble in %
    best_client: float | None = None  # the largest agreement of a client in %
    considered: tuple[Considered, ...] = field(default=())
    warnings: tuple[str, ...] = ()


def carry_out(merging: Merging, folders: Folders) -> Outcome:
    """Run a merge and test it, or test what is compared with merges."""
    found = setting(merging.case, merging.seed, folders)
    if merging.method == ALONE:
        return _alone(found)
    return _merged(merging, found)


def _alone(found: Setting) -> Outcome:
    """Test every client, their element-wise average and the mean of their outputs."""
    outputs = [_outputs(fedmerge.load_model(found.code.build, file), found) for file in found.files]
    each = {file.stem: score(own, found.y, found.measure) for file, own in
            zip(found.files, outputs, strict=True)}  # fmt: skip
    best = (max if found.measure == "accuracy" else min)(each.values())
    average = fedmerge.match(found.files, fedmerge.MatchOptions(method="average"), model=found.code)
    others = {
        "mean client": statistics.mean(each.values()),
        "best client": best,
        "element-wise average": _tested(average, found),
        "ensemble": score(torch.stack(outputs).mean(0), found.y, found.measure),
    }
    return Outcome({**each, **others})


def _merged(merging: Merging, found: Setting) -> Outcome:
    asked: dict[str, Any] = {**options_of(merging.method), "seed": merging.seed}
    if merging.growth is not None:
        asked["max_growth"] = merging.growth
    began = time.perf_counter()
    with _considered() as heard:
        merge = fedmerge.match(
            found.files,
            fedmerge.MatchOptions(**asked),
            model=found.code,
            probes=_probes(merging.probes, found),
        )
    seconds = time.perf_counter() - began
    quality = merge.quality
    if quality is None:
        own_score = {"merge": _tested(merge, found)}
        return Outcome(own_score, merge.growth, seconds, warnings=merge.warnings)
    considered = tuple(
        _compared(c.name, quality.candidates[c.name], _tested(c.merge, found))
        for c in heard
        if c.name == quality.chosen or merging.seed == CANDIDATES_OF
    )
    [own] = [c.score for c in considered if c.name == quality.chosen]
    return Outcome(
        {"merge": own},
        merge.growth,
        seconds,
        chosen=quality.chosen,
        predicted=100 * quality.merged.decisions,
        best_client=100 * quality.clients[quality.best_client].decisions,
        considered=considered,
        warnings=merge.warnings,
    )


def _compared(name: str, agreed: Agreement, own: float) -> Considered:
    finite = agreed.to_json()
    return Considered(name, 100 * agreed.decisions, finite["explained"], own)


def _probes(source: Source, found: Setting) -> ProbeOptions:
    if source == "data":
        return ProbeOptions(data=found.unlabelled)
    return ProbeOptions(source="none" if source == "none" else None)


@contextmanager
def _considered() -> Iterator[list[Candidate]]:
    """Keep all ways to merge that are considered: `match` returns the best alone."""
    heard: list[Candidate] = []
    usual = candidates._candidate

    def candidate(answers: Answers, name: str, merge: fedmerge.Merge) -> Candidate:
        heard.append(usual(answers, name, merge))
        return heard[-1]

    with patch.object(candidates, "_candidate", candidate):
        yield heard


def _tested(merge: fedmerge.Merge, found: Setting) -> float:
    """Test a merge as its users would: written to a file, and loaded into their model."""
    with tempfile.TemporaryDirectory() as folder:
        path = merge.write(Path(folder) / "merged.safetensors")
        model = fedmerge.load_model(found.code.build, path)
    return score(_outputs(model, found), found.y, found.measure)


def _outputs(model: nn.Module, found: Setting) -> Tensor:
    """Return a model's outputs on all test data (n, …, classes)."""
    with torch.no_grad():
        starts = range(0, len(found.x), BATCH)
        return torch.cat([model.eval()(found.x[start : start + BATCH]) for start in starts])


def score(outputs: Tensor, y: Tensor, measure: Measure) -> float:
    """Return the share of right decisions in %, or the bits that a character takes."""
    rows, wanted = outputs.flatten(0, -2), y.flatten()
    if measure == "bits":
        return float(functional.cross_entropy(rows, wanted)) / math.log(2)
    return 100 * float((rows.argmax(1) == wanted).float().mean())


def to_json(merging: Merging, outcome: Outcome) -> dict[str, Any]:
    """Return a run as a results file keeps it."""
    return {"merging": asdict(merging), "outcome": asdict(outcome)}


def from_json(value: Mapping[str, Any]) -> tuple[Merging, Outcome]:
    """Return what `to_json` was made of."""
    found: dict[str, Any] = dict(value["outcome"])
    rows: Sequence[Mapping[str, Any]] = found.pop("considered")
    considered = tuple(Considered(**row) for row in rows)
    outcome = Outcome(**{**found, "warnings": tuple(found["warnings"])}, considered=considered)
    return Merging(**value["merging"]), outcome
