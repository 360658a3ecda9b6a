"""How `benchmarks.paper` runs an experiment, and what it keeps of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import fedmerge
from benchmarks.paper_data import Scene, Split, write_scene
from benchmarks.paper_lstm import LstmFedMA
from benchmarks.paper_suites import ENSEMBLE, SUITES, Experiment
from fedmerge.engines import LocalEngine
from fedmerge.federated import FedMA, ignore, open_run, prepare_run, run_prepared
from fedmerge.measuring import compare
from fedmerge.merging import EvaluationOptions
from fedmerge.probes import ProbeOptions
from fedmerge.training import find_task, read_shard, train_model
from fedmerge.user_code import derived_seed, seeded

MODELS = "benchmarks.paper_models"


@dataclass(frozen=True)
class Point:
    """A whole global model: after which round, how many bytes so far, how good."""

    round: int
    megabytes: float  # up and down, all clients, since the beginning
    accuracy: float  # in %


@dataclass(frozen=True)
class Outcome:
    """What a run gave."""

    points: tuple[Point, ...]
    growth: float  # parameters ÷ those of a client
    seconds: float  # of CPU
    others: Mapping[str, float] = field(default_factory=dict)  # accuracies of clients alone


def carry_out(experiment: Experiment, source: Path) -> Outcome:
    """Run an experiment in a temporary folder."""
    split = Split(
        experiment.dataset,
        experiment.clients,
        experiment.samples,
        experiment.seed,
        experiment.on,
    )
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        scene = write_scene(source, Path(folder), split)
        work = _alone if experiment.method == ENSEMBLE else _in_rounds
        outcome = work(experiment, scene)
    return replace(outcome, seconds=round(time.process_time() - began, 1))


def _in_rounds(experiment: Experiment, scene: Scene) -> Outcome:
    """Run a method round by round."""
    suite = SUITES[experiment.dataset]
    method: Any = experiment.method
    init: Any = experiment.init
    options = fedmerge.RetrainOptions(
        method=method,
        passes=max(1, experiment.rounds // suite.layers),
        rounds=experiment.rounds,
        init=init,
        task=suite.task,
        training=_settings(experiment),
        matching=_matching(experiment),
    )
    done = _retrained(options, _code(experiment, scene), scene, experiment.attempts)
    points, moved = [], 0
    for entry in done.rounds:
        moved += entry.bytes_up + entry.bytes_down
        if entry.metrics is not None:
            accuracy = entry.metrics["accuracy"]
            assert accuracy is not None
            points.append(Point(entry.number, moved / 1e6, 100 * accuracy))
    return Outcome(tuple(points), float(done.summary()["growth"]), 0.0)


def _retrained(
    options: fedmerge.RetrainOptions,
    code: fedmerge.ModelCode,
    scene: Scene,
    attempts: tuple[str, ...],
) -> fedmerge.Retrained:
    """Retrain as usual, or with attempts at a better matching in the usual one's place."""
    running, data = fedmerge.Running(device="cpu"), str(scene.evaluation)
    if not attempts:
        return fedmerge.retrain([], scene.shards, options, model=code, data=data, running=running)
    opened = open_run([], [scene.shards], options, model=code, data=data)
    engine = LocalEngine(opened.clients)
    run = prepare_run(opened, engine)
    usual = run.method
    assert isinstance(usual, FedMA)
    method = LstmFedMA(
        usual.session, usual.averaging, usual.rounds, usual.initial, usual.kept, attempts
    )
    run = replace(run, method=method)
    return run_prepared(
        run, engine, data=data, work_dir=None, output=None, running=running, hear=ignore
    )


def _alone(experiment: Experiment, scene: Scene) -> Outcome:
    """Let every client train alone for as many epochs as in one pass of rounds, and compare."""
    suite = SUITES[experiment.dataset]
    code, task = _code(experiment, scene), find_task(suite.task)
    files = []
    for name, path in scene.clients.items():
        with seeded(derived_seed(experiment.seed, "init", "client", name)):
            model = code.build()
        settings = replace(
            _settings(experiment),
            epochs=experiment.epochs * suite.layers,
            seed=derived_seed(experiment.seed, "training", name, 1),
        )
        train_model(model, read_shard(path, client=name), task, settings)
        files.append(path.with_suffix(".pt"))
        torch.save(model.state_dict(), files[-1])
    found = compare(
        files, scene.evaluation, model=code, options=_matching(experiment),
        evaluation=EvaluationOptions(task=suite.task),
        probes=ProbeOptions(source="none"),  # as in the paper: weights alone
    )  # fmt: skip
    kinds = {row.kind: row for row in found.rows}
    others: dict[str, float] = {
        kind: 100 * row.evaluation.metrics["accuracy"]
        for kind, row in kinds.items()
        if row.evaluation is not None and kind != "client"
    }
    sent = sum(file.stat().st_size for file in files) / 1e6
    point = Point(1, sent, others[ENSEMBLE])
    return Outcome((point,), float(len(files)), 0.0, others)


def _settings(experiment: Experiment) -> fedmerge.TrainSettings:
    return fedmerge.TrainSettings(
        learning_rate=experiment.learning_rate,
        batch_size=experiment.batch_size,
        epochs=experiment.epochs,
        last_rate_factor=experiment.last_rate_factor,
        last_epochs_factor=experiment.last_epochs_factor,
        clip_norm=experiment.clip_norm,
    )


def _matching(experiment: Experiment) -> fedmerge.MatchOptions:
    return fedmerge.MatchOptions(
        seed=experiment.seed,
        max_growth=experiment.max_growth,
        match_threshold=experiment.match_threshold,
        refine=experiment.refine,
        keep=experiment.keep,
    )


def _code(experiment: Experiment, scene: Scene) -> fedmerge.ModelCode:
    arguments: dict[str, Any] = {"start": experiment.start}
    if experiment.dataset == "shakespeare":
        arguments |= {"tokens": scene.tokens, "hidden": experiment.hidden}
    return fedmerge.ModelCode(f"{MODELS}:{SUITES[experiment.dataset].model}", arguments)


def to_json(experiment: Experiment, outcome: Outcome) -> dict[str, Any]:
    """Return a run as a results file keeps it."""
    return {"experiment": asdict(experiment), "outcome": asdict(outcome)}


def from_json(value: Mapping[str, Any]) -> tuple[Experiment, Outcome]:
    """Return what `to_json` was made of."""
    found = value["outcome"]
    points = tuple(Point(**point) for point in found["points"])
    outcome = Outcome(points, found["growth"], found["seconds"], found["others"])
    given: dict[str, Any] = value["experiment"]
    asked: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    return Experiment(**asked), outcome
