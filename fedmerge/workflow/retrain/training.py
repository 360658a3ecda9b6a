"""One step of all clients: their local training, by whatever engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from fedmerge.engines import (
    Engine,
    LocalEngine,
    Outcome,
    RetryPolicy,
    StepResult,
    Task,
    run_step,
)
from fedmerge.errors import TrainingError
from fedmerge.tracebacks import defect
from fedmerge.training import EVALUATE, TRAIN, ClientWork, derived_seed
from fedmerge.types.arrays import Array
from fedmerge.types.layouts import Widths
from fedmerge.types.plans import Plan
from fedmerge.types.work import Arrays
from fedmerge.workflow.models import ModelCode
from fedmerge.workflow.retrain.builder import BUILDER
from fedmerge.workflow.retrain.federation import Federation, Method
from fedmerge.workflow.retrain.locals import cut_ties, pad_ties
from fedmerge.workflow.retrain.options import RetrainOptions
from fedmerge.workflow.retrain.schedule import Round

EVALUATION = "evaluation"  # what the evaluation data's owner is called
Hear = Callable[[Outcome], None]


def check_own(outcome: Outcome) -> None:
    """Raise what is wrong in fedmerge itself: it is no client's failure."""
    if outcome.is_defect:
        raise defect(outcome.message, details=outcome.details)


@dataclass(frozen=True)
class ModelNames:
    """What the user's model calls the tensors of the clients."""

    model: Mapping[str, str]  # a client's name of a tensor → the model's
    aliases: Mapping[str, str]  # further names of the clients' tied tensors → the first
    trainable: Collection[str]  # the clients' names of parameters

    @property
    def model_aliases(self) -> dict[str, str]:
        """Further names of the model's tied tensors → the one that has an array."""
        return {self.model[alias]: self.model[name] for alias, name in self.aliases.items()}

    def to_model(self, arrays: Arrays) -> dict[str, Array]:
        """Return a client's arrays under the model's names."""
        return {self.model[name]: array for name, array in arrays.items()}

    def from_model(self, arrays: Arrays) -> dict[str, Array]:
        """Return the model's arrays under a client's names."""
        own = {model: self.aliases.get(name, name) for name, model in self.model.items()}
        return {own[name]: array for name, array in arrays.items()}


@dataclass(frozen=True)
class Trainer:
    """All that local training needs besides the weights."""

    code: ModelCode
    names: ModelNames
    plan: Plan
    shards: Mapping[str, str]  # client → file, or the user's function
    options: RetrainOptions

    def train(
        self,
        engine: Engine,
        federation: Federation,
        method: Method,
        current: Round,
        *,
        policy: RetryPolicy,
        begin: Callable[[str], None],
        hear: Hear,
    ) -> tuple[Federation, StepResult]:
        """Let every client train what is not fixed, and return their new models.

        `begin` is told whose attempt starts, `hear` how it ended.
        """
        clients = {model.name: k for k, model in enumerate(federation.locals)}
        widths = [method.client_widths(federation, k) for k in range(len(clients))]

        def make_task(name: str) -> Task:
            begin(name)
            model = federation.locals[clients[name]]
            arrays = {**federation.fixed, **model.arrays}
            return self._task(name, arrays, federation.fixed, widths[clients[name]], current)

        step = run_step(engine, list(clients), make_task, policy=policy, hear=hear)
        trained = {}
        for name, outcome in step.done.items():
            k = clients[name]
            own = cut_ties(self.names.from_model(outcome.arrays), self.plan, widths[k])
            trained[k] = federation.locals[k].updated(
                {n: array for n, array in own.items() if n in federation.locals[k].arrays}
            )
        return federation.with_locals(trained), step

    def _task(
        self,
        client: str,
        arrays: Arrays,
        fixed: Collection[str],
        widths: Widths,
        current: Round,
    ) -> Task:
        settings = replace(
            self.options.settings.at(current.stage),
            epochs=current.epochs,
            proximal=self.options.mu if self.options.method == "fedprox" else 0.0,
            seed=derived_seed(self.options.seed, "training", client, current.number),
        )
        work = replace(
            self._work(client, self.shards[client]),
            training=settings,
            frozen=tuple(self.names.model[name] for name in fixed),
        )
        padded = pad_ties(arrays, self.plan, widths)
        return Task(
            f"{current.number}/{client}", client, TRAIN, self.names.to_model(padded), work.to_json()
        )

    def evaluate(
        self, arrays: Arrays, widths: Widths, data: str, *, device: str, threads: int
    ) -> dict[str, float | None]:
        """Return loss and metrics of a global model on evaluation data, None where not finite."""
        padded = self.names.to_model(pad_ties(arrays, self.plan, widths))
        work = self._work(EVALUATION, data)
        task = Task(EVALUATION, EVALUATION, EVALUATE, padded, work.to_json())
        [outcome] = LocalEngine([], device=device, threads=threads).run([task], timeout=None)
        check_own(outcome)
        if outcome.status != "ok":
            problem = f"the global model cannot be evaluated: {outcome.message}"
            raise TrainingError(problem, outcome.hint, details=outcome.details)
        found = {name: float(v) for name, v in outcome.values.items() if name != "samples"}
        return {name: v if math.isfinite(v) else None for name, v in found.items()}

    def _work(self, client: str, shard: str) -> ClientWork:
        return ClientWork(
            client=client,
            builder=BUILDER,
            shard=shard,
            arguments={
                "factory": self.code.factory,
                "arguments": dict(self.code.arguments),
                "aliases": self.names.model_aliases,
            },
            task=self.options.task,
            preparation=self.options.preparation,
        )
