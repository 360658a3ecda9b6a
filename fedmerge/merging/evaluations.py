"""`eval`: how well models do on data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from fedmerge.architecture.model_code import ModelCode
from fedmerge.architecture.tensor_names import load_checkpoint
from fedmerge.checkpoint import Checkpoint, ReadOptions
from fedmerge.merging.client_sources import Source, expand_sources, open_clients
from fedmerge.merging.options import EvaluationOptions as EvaluationOptions
from fedmerge.training import (
    EVALUATION_KEYS,
    EnsembleEvaluation,
    Evaluation,
    LearningTask,
    Preparation,
    Shard,
    evaluate_ensemble,
    find_task,
    parse_normalize,
)
from fedmerge.training import evaluate as evaluate_model
from fedmerge.training.evaluation import InferenceCost, KeepRows
from fedmerge.training.inference import ensemble_cost, inference_cost
from fedmerge.training.samples import Data
from fedmerge.training.shards import EVALUATION, shard_of
from fedmerge.user_code import seeded
from fedmerge.values.wording import Progress, silent

SEED = 0  # of models that draw numbers when they are run


def given_preparation(normalize: str | None, channels_last: bool) -> Preparation:
    """Return how samples are prepared, from the values of a command line."""
    mean, std = ((), ()) if normalize is None else parse_normalize(normalize)
    return Preparation(mean, std, channels_last)


@dataclass(frozen=True)
class Judge:
    """The data and the task by which models are compared."""

    shard: Shard
    task: LearningTask
    options: EvaluationOptions
    keep: KeepRows | None = None  # what of the models' outputs is kept to compare them
    is_timed: bool = False  # whether it is also measured what models cost to run

    def evaluate(self, code: ModelCode, checkpoint: Checkpoint) -> Evaluation:
        """Return how well a checkpoint does in the user's model, at the checkpoint's widths."""
        with self._seeded():
            model = load_model(code, checkpoint)
            found = evaluate_model(
                model,
                self.shard,
                self.task,
                device=self.options.device,
                batch_size=self.options.batch_size,
                keep=self.keep,
            )
        return replace(found, cost=self._cost(model)) if self.is_timed else found

    def evaluate_together(
        self,
        code: ModelCode,
        clients: Sequence[Checkpoint],
        *,
        weights: Sequence[float],
        progress: Progress = silent,
    ) -> EnsembleEvaluation:
        """Return how well clients do alone, and the mean of their outputs."""

        def build(number: int) -> nn.Module:
            progress("evaluating clients", number, len(clients))
            return load_model(code, clients[number])

        costs: dict[int, InferenceCost] = {}

        def done(number: int, model: nn.Module) -> None:
            if self.is_timed and number not in costs:
                costs[number] = self._cost(model)

        builds: list[Callable[[], nn.Module]] = [partial(build, k) for k in range(len(clients))]
        with self._seeded():
            found = evaluate_ensemble(
                builds,
                self.shard,
                self.task,
                weights=weights,
                device=self.options.device,
                batch_size=self.options.batch_size,
                keep=self.keep,
                done=done,
            )
        progress("evaluating clients", len(clients), len(clients))
        return _with_costs(found, [costs[k] for k in sorted(costs)]) if self.is_timed else found

    def _cost(self, model: nn.Module) -> InferenceCost:
        """Return what a model costs that was evaluated, with numbers of its own to draw."""
        options = self.options
        with self._seeded():
            return inference_cost(
                model, self.shard, device=options.device, batch_size=options.batch_size
            )

    def _seeded(self) -> AbstractContextManager[None]:
        return seeded(SEED, self.options.device)


def _with_costs(found: EnsembleEvaluation, costs: Sequence[InferenceCost]) -> EnsembleEvaluation:
    return EnsembleEvaluation(
        tuple(replace(own, cost=cost) for own, cost in zip(found.alone, costs, strict=True)),
        replace(found.together, cost=ensemble_cost(costs)),
    )


def open_judge(data: Data, options: EvaluationOptions) -> Judge:
    """Return the data and the task, before any model is opened."""
    task = find_task(options.task)
    shard = shard_of(
        data, "data", client=EVALUATION, keys=EVALUATION_KEYS, preparation=options.preparation
    )
    return Judge(shard, task, options)


@dataclass(frozen=True)
class Score:
    """How well one model does, and how large it is."""

    model: str
    parameters: int
    evaluation: Evaluation

    def to_json(self) -> dict[str, Any]:
        """Return the score as `--json` prints it."""
        return {
            "model": self.model,
            "loss": self.evaluation.loss,
            "metrics": dict(self.evaluation.metrics),
            "samples": self.evaluation.samples,
            "parameters": self.parameters,
        }


def evaluate(
    sources: Sequence[Source],
    data: Data,
    *,
    model: ModelCode,
    options: EvaluationOptions | None = None,
    reading: ReadOptions | None = None,
    names: Sequence[str] | None = None,
    progress: Progress = silent,
) -> list[Score]:
    """Evaluate checkpoints, each in the user's model at its widths."""
    judge = open_judge(data, options or EvaluationOptions())
    checkpoints = open_clients(expand_sources(sources, least=1), reading or ReadOptions(), names)
    scores = []
    for number, checkpoint in enumerate(checkpoints):
        progress("evaluating", number, len(checkpoints))
        found = judge.evaluate(model, checkpoint)
        scores.append(Score(checkpoint.name, count_floats(checkpoint), found))
    progress("evaluating", len(checkpoints), len(checkpoints))
    return scores


def load_model(code: ModelCode, checkpoint: Checkpoint) -> nn.Module:
    """Return a checkpoint in the user's model; an ensemble's program as its members."""
    from fedmerge.merging.ensemble_program import load_branches, member_count  # for few files

    if member_count(checkpoint):
        return load_branches(code, checkpoint)
    return load_checkpoint(code.build, checkpoint)


def count_floats(checkpoint: Checkpoint) -> int:
    """Return how many floating-point numbers a checkpoint holds, tied ones once."""
    own = (i for name, i in checkpoint.tensors.items() if name not in checkpoint.aliases)
    return sum(info.size for info in own if info.is_float)
