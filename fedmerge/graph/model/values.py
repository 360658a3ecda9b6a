"""Generic random values for a model's tensors, and its outputs in double precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedmerge.errors import UserCodeError
from fedmerge.graph.model.departures import Ran, run_forward
from fedmerge.graph.model.dispatch import EagerMode, plain_kernels
from fedmerge.graph.model.modules import (
    StatePairs,
    copied,
    float_tensors,
    plain_numbers,
    tensor_leaves,
)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest output


def generic_model(model: nn.Module, dtype: torch.dtype, *, rng: np.random.Generator) -> nn.Module:
    """Return a copy with random values in every parameter and buffer.

    Default values hide mistakes (zero biases, unit variances). What is positive everywhere stays
    positive: variances, scales.
    """
    module = copied(model).to(dtype)
    for name, tensor in float_tensors(module)[0].items():
        drawn = rng.standard_normal(tuple(tensor.shape))
        fan = max(1, tensor.numel() // max(tensor.shape)) if tensor.dim() > 1 else 1
        is_positive = tensor.numel() and bool((tensor > 0).all())
        is_positive = is_positive and (name.endswith("running_var") or tensor.dim() < 2)
        values = 0.5 + np.abs(drawn) if is_positive else drawn / np.sqrt(min(fan, 64))
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.asarray(values)))
    return module


def cast_inputs(inputs: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Return the inputs with float tensors in the given precision."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)

    result: tuple[Any, ...] = pytree.tree_map_only(Tensor, cast, inputs)
    return result


class _Precision(EagerMode):  # type: ignore[no-untyped-call]
    """Note whether any op gives less than double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.is_low = False

    def look_after(self, func: Any, before: Any, result: Any) -> Any:
        """Look at an op's results."""
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim():
                self.is_low |= tensor.dtype != torch.float64
        return result


def lowest_precision(
    model: nn.Module, inputs: tuple[Any, ...], *, state: StatePairs = ()
) -> torch.dtype:
    """Return float64 if the model can run in it from end to end, else float32."""
    module = copied(model).to(torch.float64)  # before the mode looks: its own tensors are single
    arguments = cast_inputs(inputs, torch.float64)
    try:
        with _Precision() as seen:
            run(module, arguments, state=state)
    except UserCodeError:
        return torch.float32
    return torch.float32 if seen.is_low else torch.float64


def run(module: nn.Module, inputs: tuple[Any, ...], *, state: StatePairs = ()) -> list[Tensor]:
    """Return all outputs of a model; a carried state starts constant and goes back in once."""
    dtype = next((t.dtype for t in float_tensors(module)[0].values()), torch.float64)
    with torch.no_grad(), _default_dtype(dtype), plain_kernels():
        arguments = list(pytree.tree_map_only(Tensor, torch.clone, inputs))
        for i, _ in state:
            arguments[i] = pytree.tree_map_only(
                Tensor, lambda t: torch.full_like(t, 0.25), arguments[i]
            )
        ran = run_forward(module, arguments)
        results = [*_visible(ran.outputs, state), *_decided(ran)]
        for i, j in state:
            arguments[i] = ran.outputs[j]
        if state:
            ran = run_forward(module, arguments)
            results += [*_visible(ran.outputs, state), *_decided(ran)]
    return [plain_numbers(tensor).detach() for tensor in results]


def _decided(ran: Ran) -> list[Tensor]:
    """Return what a model would decide by itself where it is told: that must not change, either."""
    return [torch.tensor(ran.truths)] if ran.truths else []


def _visible(outputs: Any, state: StatePairs) -> list[Tensor]:
    hidden = {j for _, j in state}
    if not hidden:
        return tensor_leaves(outputs)
    return [t for j, out in enumerate(outputs) if j not in hidden for t in tensor_leaves(out)]


def differ(before: Sequence[Tensor], after: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether two lists of outputs differ by more than rounding."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return True
    for one, other in zip(before, after, strict=True):
        if not one.is_floating_point():
            if not torch.equal(one, other):
                return True
            continue
        scale = one.abs().max().item() if one.numel() else 0.0
        gap = (one - other).abs().max().item() if one.numel() else 0.0
        if not gap <= tolerance * scale:
            return True
    return False


def is_telling(outputs: Sequence[Tensor]) -> bool:
    """Return whether outputs are finite and not all zero, so that a comparison says something."""
    floats = [t for t in outputs if t.is_floating_point() and t.numel()] or list(outputs)
    return all(bool(t.isfinite().all()) for t in floats) and any(bool(t.any()) for t in floats)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors of the model's own code as precise as the model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
