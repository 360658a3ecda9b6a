"""What batch norms remember of the inputs that a model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedmerge.user_code import own_code

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
