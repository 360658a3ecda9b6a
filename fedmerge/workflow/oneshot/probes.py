"""The probes of a merge: what the user gives, or what can be made from the clients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.graph.model import ExportedProgram, program_inputs
from fedmerge.probing import (
    SYNTHETIC,
    Probes,
    generated_probes,
    is_language_model,
    noise_probes,
    read_probes,
    synthetic_probes,
)
from fedmerge.probing.calls import Call, LayerCall, run_heard
from fedmerge.types.progress import Progress
from fedmerge.user_code import parts_of
from fedmerge.workflow.models import evaluated
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.options import DEFAULT_COUNT, FEWEST, ProbeOptions

FEWEST_PROBES = 64  # of a costly model
MOST_WORK = 2e12  # multiplications that one run over all probes may take
STEPS = 60  # of synthetic inputs
SYNTHETIC_WORK = 1e13  # multiplications that making them may take, unless they are asked for
GRADIENTS = 3  # times the work of a run
NOISE_SHARE = 0.5  # noise beside synthetic inputs, as a share of these


@dataclass(frozen=True)
class ProbeMaker:
    """Makes the probes of prepared clients."""

    models: Models
    options: ProbeOptions
    seed: int

    def probes(self, progress: Progress) -> Probes:
        """Return probes as asked for, else the best that is cheap enough."""
        if self.options.data is not None:
            return self._read()
        if self.options.source == "noise" or (
            self.options.source is None and self._work * self.count * STEPS > SYNTHETIC_WORK
        ):
            return self._noise(self.count)
        return self._synthetic(progress)

    def neutral(self, probes: Probes) -> Probes:
        """Return inputs that no client had a hand in: of those that a bad one made, all are bad."""
        return self._noise(self.count) if SYNTHETIC in probes.source else probes

    @cached_property
    def like(self) -> tuple[Tensor, ...]:
        """Inputs of a few samples on which the first client runs."""
        model, code = self.models.client(0), self.models.code
        inputs = program_inputs(model) if isinstance(model, ExportedProgram) else ()
        if code is not None:
            inputs = code.inputs(model)
        if not all(isinstance(given, Tensor) for given in inputs):
            raise ArchitectureError("the model takes states, of which no probes are made")
        return inputs

    @property
    def _few(self) -> tuple[Tensor, ...]:
        """These inputs where the models are."""
        return tuple(given.to(self.models.device) for given in self.like)

    @cached_property
    def count(self) -> int:
        """How many probes there are."""
        affordable = max(FEWEST_PROBES, int(MOST_WORK / max(1.0, self._work)))
        return self.options.count or min(DEFAULT_COUNT, affordable)

    @cached_property
    def _work(self) -> float:
        """Multiplications that a run of one sample takes."""
        return work_of(self.models.client(0), self._few) / len(self.like[0])

    @cached_property
    def _tokens(self) -> int | None:
        """How many different tokens the model takes."""
        for _, module in parts_of(self.models.client(0)):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                return module.num_embeddings
        return None

    def _read(self) -> Probes:
        assert self.options.data is not None
        found = read_probes(
            Path(self.options.data),
            count=self.options.count or DEFAULT_COUNT,
            seed=self.seed,
            preparation=self.options.preparation,
            like=self.like,
        )
        if len(found) < FEWEST:
            raise UsageError(
                f"--probe-data has {len(found)} inputs, expected at least {FEWEST}: "
                "some are held out to judge the merge"
            )
        return found

    def _noise(self, count: int) -> Probes:
        return noise_probes(
            self.like,
            count,
            mean=self.options.mean,
            std=self.options.std,
            seed=self.seed,
            tokens=self._tokens,
        )

    def _synthetic(self, progress: Progress) -> Probes:
        """Return what the clients make themselves: text, or inputs that they take for classes."""
        clients = [self.models.client(k) for k in range(len(self.models.prepared.clients))]
        builds = [lambda client=client: client for client in clients]
        given: Any = evaluated(clients[0], self._few)
        if is_language_model(given, self.like, tokens=self._tokens):
            assert self._tokens is not None
            return generated_probes(
                builds, self.like, tokens=self._tokens, count=self.count, seed=self.seed,
                device=self.models.device, progress=progress,
            )  # fmt: skip
        noise = self._noise(self.count)
        if not _is_classifier(given, self.like):
            return noise
        made = synthetic_probes(
            builds, noise, steps=STEPS, seed=self.seed,
            device=self.models.device, progress=progress,
        )  # fmt: skip
        return made.joined(noise.split(int(NOISE_SHARE * len(noise)), seed=self.seed)[1])


def work_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> float:
    """Return how many multiplications a run takes, of those that weights are part of."""
    total = 0.0

    def hear(call: Call) -> None:
        nonlocal total
        if isinstance(call, LayerCall):
            total += float(len(call.outputs)) * call.size
        else:
            steps = call.inputs.shape[0] * call.inputs.shape[1]
            total += float(steps) * sum(p.numel() for p in call.parameters)

    run_heard(model, inputs, hear)
    return total


def _is_classifier(outputs: Any, inputs: tuple[Tensor, ...]) -> bool:
    """Return whether the first output has a row of at least two numbers per sample."""
    found = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    has_floats = any(given.is_floating_point() for given in inputs)
    return (
        has_floats
        and isinstance(found, Tensor)
        and found.is_floating_point()
        and found.dim() == 2
        and found.shape[0] == len(inputs[0])
        and found.shape[1] > 1
    )
