"""Where probes come from: a table of sources, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedmerge.architecture.from_library import ConfiguredModel
from fedmerge.architecture.model_code import evaluated, tensors_in
from fedmerge.errors import TrainingError, UsageError, UserCodeError
from fedmerge.probes.data import read_probes
from fedmerge.probes.layer_calls import Call, LayerCall, run_heard
from fedmerge.probes.noise import noise_probes
from fedmerge.probes.options import DEFAULT_COUNT, FEWEST, ProbeOptions
from fedmerge.probes.probe_inputs import Probes
from fedmerge.probes.synthetic import SYNTHETIC, Ascent, synthetic_probes
from fedmerge.probes.text import generated_probes
from fedmerge.user_code import derived_seed, logits_of, parts_of
from fedmerge.values.wording import Progress, silent

FEWEST_PROBES = 64  # of a costly model
MOST_WORK = 6e10  # multiplications that one run over all probes may take; a merge takes about 10
STEPS = 30  # of synthetic inputs; twice as many make no better merges
STEPS_TO_STATISTICS = 60  # where there are batch norms, whose statistics are met later
SYNTHETIC_WORK = 1e13  # multiplications that making so many as usual may take, unless asked for
EQUAL = 1e-3  # of the largest output: what the order of sums may change, generously
JUDGES = 300  # inputs that judge beside held-out ones what was fitted to synthetic ones
JUDGING_STEPS = 15  # in which they are made: they stay half noise
JUDGING = Ascent(least_confidence=0.3, smoothness=0.3, size=0.01)  # rougher, and less sure
NOISE_SHARE = 0.5  # noise beside synthetic inputs, as a share of these


@dataclass(frozen=True)
class ProbedClients:
    """What probes are made for: clients that run, and inputs of a few samples that they take."""

    modules: Sequence[nn.Module]
    like: tuple[Tensor, ...]
    options: ProbeOptions
    seed: int
    device: str
    progress: Progress = silent

    @property
    def few(self) -> tuple[Tensor, ...]:
        """The few samples where the clients are."""
        return tuple(tensor.to(self.device) for tensor in self.like)

    @cached_property
    def work(self) -> float:
        """Multiplications that a run of one sample takes."""
        return work_of(self.modules[0], self.few) / len(self.like[0])

    @cached_property
    def count(self) -> int:
        """How many probes there are."""
        affordable = max(FEWEST_PROBES, int(MOST_WORK / max(1.0, self.work)))
        return self.options.count or min(DEFAULT_COUNT, affordable)

    @cached_property
    def steps(self) -> int:
        """How many steps synthetic inputs take."""
        has_statistics = any(
            getattr(part, "running_mean", None) is not None for _, part in parts_of(self.modules[0])
        )
        return STEPS_TO_STATISTICS if has_statistics else STEPS

    @cached_property
    def tokens(self) -> int | None:
        """How many different tokens the model takes."""
        if isinstance(self.modules[0], ConfiguredModel):
            return self.modules[0].vocabulary
        for _, module in parts_of(self.modules[0]):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                return module.num_embeddings
        return None

    @cached_property
    def takes_channels_last(self) -> bool:
        """Whether images may have their channels last in memory."""
        return takes_channels_last(self)

    @cached_property
    def noise(self) -> Probes:
        """Noise of the inputs' shapes, or random tokens."""
        made = noise_probes(
            self.like,
            self.count,
            mean=self.options.mean,
            std=self.options.std,
            seed=self.seed,
            tokens=self.tokens,
        )
        return replace(made, channels_last=self.takes_channels_last)

    @cached_property
    def outputs(self) -> Any:
        """What the first client gives on the few samples."""
        return evaluated(self.modules[0], self.few)


def make_probes(clients: ProbedClients) -> Probes:
    """Return probes as asked for, else the best that are cheap enough."""
    probes = PROBES[_source(clients)](clients)
    return replace(probes, channels_last=clients.takes_channels_last)


def takes_channels_last(clients: ProbedClients) -> bool:
    """Return whether images may have their channels last in memory, where convolutions are faster.

    Not for code that views activations in other shapes, which torch then refuses, and for other
    code only if it gives the same outputs.
    """
    model = clients.modules[0]
    if not any(isinstance(part, nn.Conv2d) for _, part in parts_of(model)):
        return False
    try:
        [few] = Probes(clients.like, "noise", channels_last=True).batches(
            len(clients.like[0]), clients.device
        )
        outputs = tensors_in(evaluated(model, few))
    except UserCodeError:
        return False
    pairs = zip(tensors_in(clients.outputs), outputs, strict=True)
    return all(one.shape == two.shape and _are_close(one, two) for one, two in pairs)


def _are_close(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=0, atol=EQUAL * float(one.abs().max()), equal_nan=True)


def neutral_probes(clients: ProbedClients, probes: Probes) -> Probes:
    """Return inputs that no client had a hand in: of those that a bad one made, all are bad."""
    return noise(clients) if SYNTHETIC in probes.source else probes


def judging_probes(clients: ProbedClients, held_out: Probes) -> Probes | None:
    """Return inputs that judge what is fitted to synthetic ones, or None where there are none.

    What was fitted to synthetic inputs does well on all that were made so. So held-out ones are
    joined by some made with another aim, halfway between noise and classes: these flatter less.
    """
    if SYNTHETIC not in held_out.source:
        return None
    seed = derived_seed(clients.seed, "judging")
    options = replace(clients.options, count=min(clients.count, JUDGES))
    judges = replace(clients, seed=seed, options=options)
    made = synthetic_probes(
        _builds(judges),
        judges.noise,
        steps=JUDGING_STEPS,
        seed=seed,
        device=clients.device,
        progress=clients.progress,
        ascent=JUDGING,
    )
    return held_out.joined(made)


def data(clients: ProbedClients) -> Probes:
    """Return the user's inputs."""
    options = clients.options
    assert options.data is not None
    probes = read_probes(
        options.data,
        count=options.count or DEFAULT_COUNT,
        seed=clients.seed,
        preparation=options.preparation,
        like=clients.like,
    )
    if len(probes) < FEWEST:
        raise UsageError(
            f"`probe_data` has {len(probes)} inputs, expected at least {FEWEST}: "
            "some are held out to judge the merge"
        )
    return probes


def noise(clients: ProbedClients) -> Probes:
    """Return noise of the inputs' shapes, or random tokens."""
    return clients.noise


def text(clients: ProbedClients) -> Probes:
    """Return text that the clients write themselves."""
    assert clients.tokens is not None
    return generated_probes(
        _builds(clients),
        clients.like,
        tokens=clients.tokens,
        count=clients.count,
        seed=clients.seed,
        device=clients.device,
        progress=clients.progress,
    )


def synthetic(clients: ProbedClients) -> Probes:
    """Return inputs that the clients take for classes, and some noise."""
    plain = clients.noise
    made = synthetic_probes(
        _builds(clients),
        plain,
        steps=clients.steps,
        seed=clients.seed,
        device=clients.device,
        progress=clients.progress,
    )
    return made.joined(plain.split(int(NOISE_SHARE * len(plain)), seed=clients.seed)[1])


PROBES: Mapping[str, Callable[[ProbedClients], Probes]] = {
    "data": data,
    "noise": noise,
    "text": text,
    "synthetic": synthetic,
}


def _source(clients: ProbedClients) -> str:
    """Return the row of the table that suits the wishes and the clients."""
    options = clients.options
    if options.data is not None:
        return "data"
    if options.source not in (None, SYNTHETIC):
        return options.source
    is_costly = clients.work * (options.count or DEFAULT_COUNT) * clients.steps > SYNTHETIC_WORK
    if options.source is None and is_costly:
        return "noise"
    if is_language_model(clients.outputs, clients.like, tokens=clients.tokens):
        return "text"
    return "synthetic" if _is_classifier(clients.outputs, clients.like) else "noise"


def _builds(clients: ProbedClients) -> list[Callable[[], nn.Module]]:
    return [lambda module=module: module for module in clients.modules]  # type: ignore[misc]


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


def is_language_model(
    outputs: Any, inputs: tuple[Tensor, ...], *, tokens: int | None = None
) -> bool:
    """Return whether outputs are logits (n, steps, tokens) of what follows inputs (n, steps).

    Models may also return them as (n·steps, tokens) or, if it is known how many `tokens` there
    are, of the last step alone (n, tokens); and a state beside them.
    """
    if len(inputs) != 1 or inputs[0].ndim != 2 or inputs[0].is_floating_point():
        return False
    try:
        logits = logits_of(outputs)
    except TrainingError:
        return False
    # A tagger has fewer outputs than it reads different tokens.
    known = max(int(inputs[0].max()) + 1, tokens or 0)
    if not logits.is_floating_point() or logits.shape[-1] < known:
        return False
    samples, steps = inputs[0].shape
    is_last_alone = steps > 1 and logits.shape == (samples, tokens)
    return is_last_alone or logits.shape[:-1] in ((samples, steps), (samples * steps,))


def _is_classifier(outputs: Any, inputs: tuple[Tensor, ...]) -> bool:
    """Return whether the first output has a row of at least two numbers per sample."""
    first = outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs
    has_floats = any(tensor.is_floating_point() for tensor in inputs)
    return (
        has_floats
        and isinstance(first, Tensor)
        and first.is_floating_point()
        and first.dim() == 2
        and first.shape[0] == len(inputs[0])
        and first.shape[1] > 1
    )
