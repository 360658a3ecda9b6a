"""Probes that clients make themselves: inputs that they take for classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedmerge.errors import ArchitectureError, TrainingError
from fedmerge.probes.descent import Adam
from fedmerge.probes.noise import spatial_axes
from fedmerge.probes.probe_inputs import Probes
from fedmerge.user_code import evaluating, logits_of, own_code, placed, run_model, user_code
from fedmerge.values.wording import Progress, silent

_ATEN = torch.ops.aten
_STATISTICS = {  # function → places of the running mean and variance; the input comes first
    functional.batch_norm: (1, 2),
    torch.batch_norm: (3, 4),
    _ATEN.batch_norm.default: (3, 4),
    _ATEN._native_batch_norm_legit_no_training.default: (3, 4),
}
_NAMES = ("running_mean", "running_var")
_FLOOR = 1e-5  # of variances, as batch norms have it


@dataclass(frozen=True)
class NormInput:
    """The input (n, channels, …) of a batch norm, and its running statistics (channels,)."""

    values: Tensor
    mean: Tensor
    variance: Tensor


def distance_from_statistics(norms: Sequence[NormInput]) -> Tensor:
    """Return how far the inputs' statistics are from the running ones: mean over norms.

    (μ - μ̂)² / σ̂² + (σ / σ̂ - 1)², the mean over channels: the squared Wasserstein distance of two
    normal distributions, in units of the running deviation.
    """
    return torch.stack([_distance(norm) for norm in norms]).mean()


def _distance(norm: NormInput) -> Tensor:
    axes = [axis for axis in range(norm.values.ndim) if axis != 1]
    values = norm.values.float()
    variance = norm.variance.float() + _FLOOR
    mean = values.mean(axes)
    deviation = (values.var(axes, correction=0) + _FLOOR).sqrt()
    shift = (mean - norm.mean).square() / variance
    return (shift + (deviation / variance.sqrt() - 1).square()).mean()


@contextmanager
def watched_norms() -> Iterator[list[NormInput]]:
    """Yield the list into which every batch norm with running statistics that runs is put."""
    watch = _Watch()
    with watch:
        yield watch.found


@dataclass
class _Watch(TorchFunctionMode):
    found: list[NormInput] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if func in _STATISTICS:
            with own_code():
                self._note(func, args, given)
        return result

    def _note(
        self, func: Callable[..., Any], args: Sequence[Any], given: Mapping[str, Any]
    ) -> None:
        values = args[0] if args else given["input"]
        mean, variance = (
            args[place] if place < len(args) else given.get(name)
            for place, name in zip(_STATISTICS[func], _NAMES, strict=True)
        )
        if mean is not None and variance is not None:
            self.found.append(NormInput(values, mean, variance))


Build: TypeAlias = Callable[[], nn.Module]

SYNTHETIC = "synthetic"  # the source of such inputs
FEW = 2  # samples on which it is seen what a model returns

_NO_GRADIENT = "the model has no gradients"
_HINT = "use noise (`probe=noise`) or real inputs without labels (`probe_data=FILE`)"


@dataclass(frozen=True)
class Ascent:
    """How inputs are changed; lengths are in deviations of the inputs that are started from."""

    rate: float = 0.05  # of Adam
    smoothness: float = 1.0  # weight of the total variation
    size: float = 0.05  # weight of the mean square distance from the mean
    statistics: float = 1.0  # weight of the distance from batch norms' running statistics
    jitter: int = 0  # inputs are shifted by at most so many places along each spatial axis
    least_confidence: float = 1.0  # targets give their class a share between this and 1
    chunk: int = 125  # samples at once
    stint: int = 1  # steps that a chunk stays with one client


def synthetic_probes(
    build_client: Sequence[Build],
    start: Probes,
    *,
    steps: int,
    seed: int,
    device: str = "cpu",
    progress: Progress = silent,
    ascent: Ascent | None = None,
) -> Probes:
    """Return inputs that classifiers assign to random classes, made from others by Adam.

    Per sample the loss is the cross entropy with a random class (softened where asked), plus total
    variation, mean square and, where there are batch norms, the distance from their running
    statistics. One client is in memory at a time, built anew for each of its turns unless
    `build_client` keeps it; integer inputs stay as they are.
    """
    ascent = ascent or Ascent()
    classes = _count_classes(placed(build_client[0](), device), start, device)
    targets = draw_targets(len(start), classes, ascent.least_confidence, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-steps // ascent.stint)
    chunks = [
        _Chunk(inputs, own, _turns(len(build_client), rounds, generator), ascent, generator)
        for inputs, (own,) in zip(
            start.batches(ascent.chunk, device),
            Probes((targets,), "targets").batches(ascent.chunk, device),
            strict=True,
        )
    ]
    for turn in range(rounds):
        own_steps = min(ascent.stint, steps - turn * ascent.stint)
        for client in sorted({chunk.turns[turn] for chunk in chunks}):
            model = placed(build_client[client](), device)
            with evaluating(model):
                for chunk in chunks:
                    if chunk.turns[turn] == client:
                        chunk.ascend(model, own_steps)
        progress("synthetic inputs", min((turn + 1) * ascent.stint, steps), steps)
    made = zip(*(chunk.inputs() for chunk in chunks), strict=True)
    inputs = tuple(torch.cat(parts).cpu().contiguous() for parts in made)
    return Probes(inputs, SYNTHETIC, channels_last=start.channels_last)


def draw_targets(samples: int, classes: int, least_confidence: float, *, seed: int) -> Tensor:
    """Return probabilities (samples, classes): a random class's share, the rest another's."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(classes, (samples,), generator=generator)
    other = (first + torch.randint(1, classes, (samples,), generator=generator)) % classes
    share = torch.rand((samples, 1), generator=generator)
    share = least_confidence + (1 - least_confidence) * share
    one, two = (functional.one_hot(chosen, classes).float() for chosen in (first, other))
    return share * one + (1 - share) * two


class _Chunk:
    """Samples that are changed together, their targets and the state of Adam."""

    def __init__(
        self,
        given: tuple[Tensor, ...],
        targets: Tensor,
        turns: Sequence[int],
        ascent: Ascent,
        generator: torch.Generator,
    ) -> None:
        self.turns = turns  # the client of every round
        self._given, self._targets = given, targets
        self._ascent, self._generator = ascent, generator
        floats = [x for x in given if x.is_floating_point()]
        # Standardised: rate and weights then mean the same for pixels in 0…1 and in 0…255.
        self._units = [(x.float().mean(), _deviation(x.float())) for x in floats]
        self._free = [
            ((x.float() - mean) / scale).requires_grad_()
            for x, (mean, scale) in zip(floats, self._units, strict=True)
        ]
        self._adam = Adam(self._free, rate=ascent.rate)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the model's inputs as they are now, detached."""
        return tuple(x.detach() for x in self._assembled(self._free))

    def ascend(self, model: nn.Module, steps: int) -> None:
        """Change the inputs by some steps of Adam towards what the model takes for the targets."""
        # cuDNN's recurrent layers have no gradients in evaluation mode.
        with torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
            for _ in range(steps):
                loss = self._loss(model)
                with user_code(_NO_GRADIENT):
                    gradients = torch.autograd.grad(loss, self._free)
                self._adam.step([*map(torch.nan_to_num, gradients)])  # of one that has diverged

    def _loss(self, model: nn.Module) -> Tensor:
        shifted = [_shifted(x, self._ascent.jitter, self._generator) for x in self._free]
        with watched_norms() as norms:
            outputs = run_model(model, self._assembled(shifted))
        logits = class_logits(outputs, len(self._targets))
        misfit = functional.cross_entropy(_unnormalised(logits), self._targets)
        penalties = [
            self._ascent.smoothness * _total_variation(x) + self._ascent.size * x.square().mean()
            for x in self._free
        ]
        loss = misfit + torch.stack(penalties).sum()
        if norms:
            loss = loss + self._ascent.statistics * distance_from_statistics(norms)
        # Samples count alike, however many there are in a chunk.
        return loss * len(self._targets)

    def _assembled(self, free: Sequence[Tensor]) -> list[Tensor]:
        floats = iter(zip(free, self._units, strict=True))
        made = []
        for given in self._given:
            if given.is_floating_point():
                x, (mean, scale) = next(floats)
                made.append((x * scale + mean).to(given.dtype))
            else:
                made.append(given)
        return made


def class_logits(outputs: object, samples: int) -> Tensor:
    """Return the logits (n, classes) of a classifier's outputs, or say that it is none."""
    try:
        logits = logits_of(outputs)
    except TrainingError as error:
        raise ArchitectureError(
            f"{error.problem}, so no inputs can be made from it", _HINT
        ) from error
    if logits.ndim != 2 or len(logits) != samples or logits.shape[1] < 2:
        raise ArchitectureError(
            f"the model's outputs are {tuple(logits.shape)}, expected ({samples}, classes): inputs "
            "can be made from classifiers only",
            _HINT,
        )
    return logits.float()


def _count_classes(model: nn.Module, start: Probes, device: str) -> int:
    few = tuple(x.detach().clone() for x in next(start.batches(FEW, device)))
    if not any(x.is_floating_point() for x in few):
        raise ArchitectureError("the model takes whole numbers only, which have no gradient", _HINT)
    floats = [x.requires_grad_() for x in few if x.is_floating_point()]
    with torch.enable_grad(), evaluating(model), torch.backends.cudnn.flags(enabled=False):
        logits = class_logits(run_model(model, few), len(few[0]))
        slopes: Sequence[Tensor | None] = ()
        if logits.requires_grad:
            with user_code(_NO_GRADIENT):
                slopes = torch.autograd.grad(logits.sum(), floats, allow_unused=True)
    if all(slope is None for slope in slopes):
        raise ArchitectureError("the model's outputs have no gradient at its inputs", _HINT)
    return logits.shape[1]


def _turns(clients: int, rounds: int, generator: torch.Generator) -> list[int]:
    """Return the client of every round: each as often as the others, in random order."""
    cycles = [torch.randperm(clients, generator=generator) for _ in range(-(-rounds // clients))]
    turns: list[int] = torch.cat(cycles).tolist() if cycles else []
    return turns[:rounds]


def _unnormalised(outputs: Tensor) -> Tensor:
    """Return logits: of outputs that are probabilities already, their logarithms."""
    rows = outputs.detach()
    is_normal = bool((rows >= 0).all()) and torch.allclose(rows.sum(1), torch.ones_like(rows[:, 0]))
    return outputs.clamp_min(torch.finfo(outputs.dtype).tiny).log() if is_normal else outputs


def _deviation(x: Tensor) -> Tensor:
    """Return the standard deviation, 1 if all values are the same."""
    deviation = x.std(correction=0)
    return torch.where(deviation > 0, deviation, 1.0)


def _total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbours, summed over the spatial axes."""
    steps = [x.diff(dim=axis).abs().mean() for axis in spatial_axes(x.shape) if x.shape[axis] > 1]
    return torch.stack(steps).sum() if steps else x.new_zeros(())


def _shifted(x: Tensor, jitter: int, generator: torch.Generator) -> Tensor:
    axes = spatial_axes(x.shape)
    if not jitter or not axes:
        return x
    shifts = torch.randint(-jitter, jitter + 1, (len(axes),), generator=generator)
    return x.roll(shifts.tolist(), axes)
