"""How `benchmarks.oneshot` runs a merge, and what it keeps of it."""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedmerge
from benchmarks.oneshot_clients import Folders, Setting, setting
from benchmarks.oneshot_suites import (
    ALONE,
    PLAIN,
    STEPS,
    Measure,
    Merging,
    Source,
    options_of,
)
from fedmerge.merging import Agreement, Answers, Candidate, candidates
from fedmerge.probes import AUGMENTATIONS, ProbeOptions, read_probes

BATCH = 500  # samples that are tested at once
LESSON, RATE = 64, 1e-3  # samples of a step of plain distillation, and Adam's rate at its start
CANDIDATES_OF = 0  # the seed whose candidates are all tested, as that takes longer than merging


@dataclass(frozen=True)
class Considered:
    """A way to merge among which fedmerge chose, as it was predicted and as it is."""

    name: str
    distance: float | None  # from the ensemble, on held-out probes; None: not finite
    score: float  # on test data


@dataclass(frozen=True)
class Outcome:
    """What a merge gave, on test data: accuracy in %, or bits per character."""

    scores: Mapping[str, float]  # of the merge, or of all that is compared with it
    growth: float = 1.0  # parameters ÷ those of a client
    seconds: float = 0.0  # of CPU time, one thread
    chosen: str = ""
    pull: float | None = None  # 0: as far from the ensemble as the nearest client; 1: there
    gain: float | None = None  # 0: as good as the best client; 1: as the ensemble
    predicted: float | None = None  # the pull that fedmerge foresaw
    considered: tuple[Considered, ...] = field(default=())
    warnings: tuple[str, ...] = ()


def carry_out(merging: Merging, folders: Folders) -> Outcome:
    """Run a merge and test it, or test what is compared with merges."""
    found = setting(merging.case, merging.seed, folders)
    if merging.method == ALONE:
        return _alone(found)
    if merging.method == PLAIN:
        return _distilled(merging, found)
    return _merged(merging, found)


def _alone(found: Setting) -> Outcome:
    """Test every client, their element-wise average and the mean of their outputs."""
    outputs = _clients(found)
    each = {file.stem: score(own, found.y, found.measure) for file, own in
            zip(found.files, outputs, strict=True)}  # fmt: skip
    best = (max if found.measure == "accuracy" else min)(each.values())
    average = fedmerge.match(found.files, fedmerge.MatchOptions(method="average"), model=found.code)
    nearest = _distances(outputs)
    others = {
        "mean client": statistics.mean(each.values()),
        "best client": best,
        "label-free pick": list(each.values())[nearest.index(min(nearest))],
        "element-wise average": score(_written_outputs(average, found), found.y, found.measure),
        "ensemble": score(torch.stack(outputs).mean(0), found.y, found.measure),
    }
    return Outcome({**each, **others})


def _merged(merging: Merging, found: Setting) -> Outcome:
    asked: dict[str, Any] = {**options_of(merging.method), "seed": merging.seed}
    if merging.growth is not None:
        asked["max_growth"] = merging.growth
    began = time.process_time()
    with _considered() as heard:
        merge = fedmerge.match(
            found.files,
            fedmerge.MatchOptions(**asked),
            model=found.code,
            probes=_probes(merging.probes, found),
        )
    seconds = time.process_time() - began
    outcome = tested(_written_outputs(merge, found), found)
    outcome = replace(outcome, growth=merge.growth, seconds=seconds, warnings=merge.warnings)
    quality = merge.quality
    if quality is None:
        return outcome
    considered = tuple(
        _compared(c, quality.candidates[c.name], found)
        for c in heard
        if merging.seed == CANDIDATES_OF and c.name in quality.candidates
    )
    return replace(
        outcome,
        chosen=quality.chosen,
        predicted=quality.position.pull,
        considered=considered,
    )


def _compared(candidate: Candidate, agreed: Agreement, found: Setting) -> Considered:
    own = score(_written_outputs(candidate.merge, found), found.y, found.measure)
    return Considered(candidate.name, agreed.to_json()["distance"], own)


def _distilled(merging: Merging, found: Setting) -> Outcome:
    """Train the label-free pick, at its own size, to answer as the ensemble does on mixtures."""
    assert found.unlabelled is not None
    began = time.process_time()
    probes = read_probes(found.unlabelled)
    models = [fedmerge.load_model(found.code.build, file).eval() for file in found.files]
    [samples] = probes.inputs
    with torch.no_grad():
        each = torch.stack([model(samples) for model in models])
        gaps = [(own.softmax(-1) - each.mean(0).softmax(-1)).abs().mean() for own in each]
    student = copy.deepcopy(models[int(torch.stack(gaps).argmin())])
    optimizer = torch.optim.Adam(student.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    generator = torch.Generator().manual_seed(merging.seed)
    is_mixed = samples.is_floating_point()
    for _ in range(STEPS):
        batch = samples[torch.randperm(len(samples), generator=generator)[:LESSON]]
        batch = AUGMENTATIONS["mixtures"](batch, generator) if is_mixed else batch
        with torch.no_grad():
            wanted = torch.stack([model(batch) for model in models]).mean(0).flatten(0, -2)
        optimizer.zero_grad()
        given = student(batch).flatten(0, -2)
        own, other = given.log_softmax(1), wanted.log_softmax(1)
        loss = functional.kl_div(own, other, log_target=True, reduction="batchmean")
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    seconds = time.process_time() - began
    return replace(tested(outputs_of(student, found), found), seconds=seconds)


def _probes(source: Source, found: Setting) -> ProbeOptions:
    if source == "data":
        return ProbeOptions(data=found.unlabelled)
    return ProbeOptions(source="none" if source == "none" else None)


@contextmanager
def _considered() -> Iterator[list[Candidate]]:
    """Keep all ways to merge that are considered: `match` returns the best alone."""
    heard: list[Candidate] = []
    usual = candidates.candidate_of

    def candidate(answers: Answers, name: str, merge: fedmerge.Merge) -> Candidate:
        heard.append(usual(answers, name, merge))
        return heard[-1]

    with patch.object(candidates, "candidate_of", candidate):
        yield heard


def tested(outputs: Tensor, found: Setting) -> Outcome:
    """Return the score, pull and gain of a model by its outputs on test data."""
    clients = _clients(found)
    ensemble = torch.stack(clients).mean(0)
    own, together, *each = (
        score(answers, found.y, found.measure) for answers in (outputs, ensemble, *clients)
    )
    best = (max if found.measure == "accuracy" else min)(each)
    distance = _distances([outputs, *clients], ensemble)
    return Outcome(
        {"merge": own},
        pull=1 - distance[0] / min(distance[1:]),
        gain=(own - best) / (together - best) if together != best else None,
    )


def _distances(outputs: Sequence[Tensor], ensemble: Tensor | None = None) -> list[float]:
    """Return how far probabilities are from the ensemble's, on test data and without labels."""
    wanted = (torch.stack(list(outputs)).mean(0) if ensemble is None else ensemble).softmax(-1)
    return [float((own.softmax(-1) - wanted).abs().sum(-1).mean()) for own in outputs]


def _clients(found: Setting) -> list[Tensor]:
    """Return every client's outputs on test data."""
    return [outputs_of(fedmerge.load_model(found.code.build, file), found) for file in found.files]


def _written_outputs(merge: fedmerge.Merge, found: Setting) -> Tensor:
    """Run a merge as its users would: written to a file, and loaded into their model."""
    with tempfile.TemporaryDirectory() as folder:
        path = merge.write(Path(folder) / "merged.safetensors")
        return outputs_of(fedmerge.load_model(found.code.build, path), found)


def outputs_of(model: nn.Module, found: Setting) -> Tensor:
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
