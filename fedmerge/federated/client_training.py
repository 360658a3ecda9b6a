"""Training of clients through an engine, and checks of what they send back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec
import numpy as np

from fedmerge.architecture.model_code import BUILDER, ModelCode
from fedmerge.decoding import decode_value
from fedmerge.engines import Engine, LocalEngine, Outcome, RetryPolicy, StepResult, Task, run_step
from fedmerge.errors import TrainingError
from fedmerge.federated.federation import Federation, Method, Round, cut_ties, pad_ties
from fedmerge.federated.options import RetrainOptions
from fedmerge.tracebacks import defect
from fedmerge.training import EVALUATE, TRAIN, ClientWork
from fedmerge.training.shards import EVALUATION
from fedmerge.user_code import derived_seed
from fedmerge.values.arrays import Array, DType
from fedmerge.values.plans import Plan, Widths
from fedmerge.values.work import Arrays

Expected: TypeAlias = Mapping[str, tuple[tuple[int, ...], DType]]  # a tensor's shape and type


class _Training(msgspec.Struct, frozen=True):
    """What a training says beside its tensors."""

    losses: tuple[float, ...]  # of its epochs
    samples: int
    training_seconds: float


def problem_of_training(
    outcome: Outcome, expected: Expected, own: Mapping[str, str], *, epochs: int
) -> str:
    """Say what is wrong with what a client returned, or nothing.

    `own` are the clients' names of the model's tensors, by which `expected` calls them.
    """
    return _names_problem(outcome, expected, own) or (
        _tensors_problem(outcome, expected, own) or _values_problem(outcome, epochs)
    )


def _names_problem(outcome: Outcome, expected: Expected, own: Mapping[str, str]) -> str:
    returned: dict[str, str] = {}
    for name in outcome.arrays:
        if own.get(name) not in expected:
            why = "is frozen" if name in own else "its model does not have"
            return f"returned '{name}', which {why}; expected {_count(expected)}"
        if own[name] in returned:
            return f"returned one tensor twice, as '{returned[own[name]]}' and '{name}'"
        returned[own[name]] = name
    missing = [name for name in expected if name not in returned]
    if missing:
        return f"returned no '{missing[0]}': {len(returned)} tensors, expected {_count(expected)}"
    return ""


def _count(expected: Expected) -> str:
    return "1 tensor" if len(expected) == 1 else f"{len(expected)} tensors"


def _tensors_problem(outcome: Outcome, expected: Expected, own: Mapping[str, str]) -> str:
    for name, array in outcome.arrays.items():
        shape, dtype = expected[own[name]]
        if (array.shape, array.dtype) != (shape, dtype):
            found = f"{array.shape} of {array.dtype}"
            return f"returned '{name}' as {found}, expected {shape} of {dtype}"
    return ""


def _values_problem(outcome: Outcome, epochs: int) -> str:
    try:
        found = decode_value(outcome.values, _Training, fail=TrainingError)
    except TrainingError as error:
        return f"returned values that no training gives ({error.problem})"
    if not 1 <= len(found.losses) <= epochs or not all(map(math.isfinite, found.losses)):
        return f"returned the losses {list(found.losses)[:5]}, expected {epochs} finite numbers"
    if found.samples < 1:
        return f"returned {found.samples} samples"
    return ""


def evaluation_values(outcome: Outcome) -> dict[str, float]:
    """Return the loss and the metrics that an evaluation gave, finite or not."""

    def fail(reason: str) -> TrainingError:
        return TrainingError(f"the evaluation returned values that none gives ({reason})")

    found = decode_value(dict(outcome.values), dict[str, float], fail=fail)
    found.pop("samples", None)
    if "loss" not in found:
        raise fail("no `loss`")
    return found


def _evaluation_problem(outcome: Outcome) -> str:
    """Say what is wrong with what a client's evaluation returned, or nothing."""
    samples = outcome.values.get("samples")
    if type(samples) is not int or samples < 1:
        return f"returned {samples!r} as the number of its samples"
    try:
        evaluation_values(outcome)
    except TrainingError as error:
        return error.problem
    return ""


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
    first: Mapping[str, str]  # a client's name → the first one of the same tensor in the model
    dtypes: Mapping[str, DType]  # a client's name → of the arrays that the model gives

    @property
    def model_aliases(self) -> dict[str, str]:
        """Further names of the model's tied tensors → the one that has an array."""
        return {self.model[alias]: self.model[name] for alias, name in self.aliases.items()}

    def to_model(self, arrays: Arrays) -> dict[str, Array]:
        """Return a client's arrays under the model's names."""
        return {self.model[name]: array for name, array in arrays.items()}

    @property
    def own(self) -> dict[str, str]:
        """The model's name of a tensor → a client's, the same for all names of a tied one."""
        return {model: self.first[name] for name, model in self.model.items()}

    def from_model(self, arrays: Arrays) -> dict[str, Array]:
        """Return the model's arrays under a client's names."""
        own = self.own
        found = {own[name]: array for name, array in arrays.items()}
        return {
            name: found[first]
            for name, first in self.first.items()
            if first in found and name not in self.aliases
        }


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

        def find_problem(outcome: Outcome) -> str:
            k = clients[outcome.client]
            sent = pad_ties(federation.locals[k].arrays, self.plan, widths[k])
            expected = self._expected(sent, federation.fixed)
            return problem_of_training(outcome, expected, self.names.own, epochs=current.epochs)

        step = run_step(
            engine, list(clients), make_task, policy=policy, find_problem=find_problem, hear=hear
        )
        trained = {}
        for name, outcome in step.done.items():
            k = clients[name]
            own = cut_ties(self.names.from_model(outcome.arrays), self.plan, widths[k])
            trained[k] = federation.locals[k].updated(
                {n: array for n, array in own.items() if n in federation.locals[k].arrays}
            )
        return federation.with_locals(trained), step

    def _expected(self, sent: Arrays, fixed: Collection[str]) -> Expected:
        """Return what a client gives back: what it was sent, ties once, but for what is fixed."""
        frozen = {self.names.first[name] for name in fixed}
        return {
            name: (array.shape, self.names.dtypes[name])
            for name, array in sent.items()
            if self.names.first[name] == name and name not in frozen
        }

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
            proximal=self.options.proximal,
            seed=derived_seed(self.options.seed, "training", client, current.number),
        )
        work = replace(
            self._of_client(client),
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
        found = evaluation_values(outcome)
        return {name: v if math.isfinite(v) else None for name, v in found.items()}

    def evaluate_held_out(
        self, engine: Engine, arrays: Arrays, widths: Widths, *, policy: RetryPolicy
    ) -> dict[str, float | None]:
        """Return the means of a global model over all that clients hold out; who fails is left out.

        Every sample counts alike. Names begin with `held_out_`.
        """
        padded = self.names.to_model(pad_ties(arrays, self.plan, widths))

        def make_task(client: str) -> Task:
            work = self._of_client(client).to_json()
            return Task(f"{EVALUATION}/{client}", client, EVALUATE, padded, work)

        alone = replace(policy, min_clients=1)  # the round is decided already
        step = run_step(
            engine,
            list(self.shards),
            make_task,
            policy=alone,
            find_problem=_evaluation_problem,
            hear=check_own,
        )
        found = [evaluation_values(outcome) for outcome in step.done.values()]
        sizes = [outcome.values["samples"] for outcome in step.done.values()]
        means = {n: float(np.average([own[n] for own in found], weights=sizes)) for n in found[0]}
        return {f"held_out_{n}": v if math.isfinite(v) else None for n, v in means.items()}

    def _of_client(self, client: str) -> ClientWork:
        own = self._work(client, self.shards[client])
        return replace(own, held_out=self.options.held_out, reading=self.options.reading)

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
