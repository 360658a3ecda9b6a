"""Inputs for a model that nobody described: from its first layer, or by trying sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedmerge.errors import ArchitectureError, ModelCodeError, UserCodeError
from fedmerge.graph.model.modules import copied
from fedmerge.tracebacks import last_line
from fedmerge.user_code import named, run_model

BATCH = 2  # samples per input
STEPS = 32  # of a sequence for recurrent layers
TOKENS = 16  # of a sequence for embeddings
SIDES = (28, 32, 64, 96, 128, 224, 256, 299)  # of images, smallest first
_SEED = 0
_HINT = "give it with --input-shape, e.g. --input-shape 1,3,32,32 (--input-dtype long for tokens)"


def deduce_inputs(
    model: nn.Module, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Return random inputs on which the model runs, from its first layer where none are given.

    A linear layer reads its own number of inputs, a recurrent one 32 steps, an embedding 16
    tokens, a convolution the smallest usual image at which the model runs.
    """
    module = copied(model)
    if shape is not None:
        return (_draw(module, shape, dtype),)
    layer = _first_layer(module)
    if layer is None:
        raise ArchitectureError("the model has no layer that tells the shape of its inputs", _HINT)
    failures: dict[str, UserCodeError] = {}
    for candidate in _shapes(layer):
        inputs = (_draw(module, candidate, dtype or _dtype_of(layer)),)
        try:
            with torch.no_grad():
                run_model(module, inputs)
        except UserCodeError as error:
            failures["×".join(map(str, candidate))] = error
        else:
            return inputs
    first = next(iter(failures.values()))
    raise ModelCodeError(
        f"the model runs on no input of shape {', '.join(failures)}, the ones its first layer "
        f"({type(layer).__name__}) suggests: {last_line(first.__cause__ or first)}{named(module)}",
        _HINT,
        details=first.details,
    ) from first


def _linear_shapes(layer: Any) -> Iterator[tuple[int, ...]]:
    yield (BATCH, layer.in_features)
    yield (BATCH, TOKENS, layer.in_features)


def _recurrent_shapes(layer: Any) -> Iterator[tuple[int, ...]]:
    is_batch_first = getattr(layer, "batch_first", True)
    steps = (BATCH, STEPS) if is_batch_first else (STEPS, BATCH)
    yield (*steps, layer.input_size)


def _embedding_shapes(layer: Any) -> Iterator[tuple[int, ...]]:
    yield (BATCH, TOKENS)
    yield (BATCH,)


def _conv_shapes(layer: Any) -> Iterator[tuple[int, ...]]:
    axes = len(layer.kernel_size)
    is_transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    for side in (1, *SIDES) if is_transposed else SIDES:
        yield (BATCH, layer.in_channels, *(side,) * axes)


def _norm_shapes(layer: Any) -> Iterator[tuple[int, ...]]:
    axes = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}.get(type(layer), 0)
    for side in SIDES if axes else (1,):
        yield (BATCH, layer.num_features, *(side,) * axes)


_SHAPES: Mapping[type[nn.Module], Callable[[Any], Iterator[tuple[int, ...]]]] = {
    nn.Linear: _linear_shapes,
    nn.RNNBase: _recurrent_shapes,
    nn.RNNCellBase: _recurrent_shapes,
    nn.Embedding: _embedding_shapes,
    nn.EmbeddingBag: _embedding_shapes,
    nn.modules.conv._ConvNd: _conv_shapes,
    nn.modules.batchnorm._BatchNorm: _norm_shapes,
}


def _shapes(layer: nn.Module) -> Iterator[tuple[int, ...]]:
    kind = next(kind for kind in type(layer).__mro__ if kind in _SHAPES)
    return _SHAPES[kind](layer)


def _first_layer(module: nn.Module) -> nn.Module | None:
    layers = (m for m in module.modules() if any(k in _SHAPES for k in type(m).__mro__))
    return next(layers, None)


def _dtype_of(layer: nn.Module) -> torch.dtype | None:
    return torch.long if isinstance(layer, nn.Embedding | nn.EmbeddingBag) else None


def _draw(module: nn.Module, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
    """Return random numbers, or tokens below the size of the first embedding."""
    generator = torch.Generator().manual_seed(_SEED)
    if dtype is None or dtype.is_floating_point:
        own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        return torch.randn(tuple(shape), generator=generator).to(dtype or own)
    embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    count = embeddings[0].num_embeddings if embeddings else 2
    return torch.randint(count, tuple(shape), generator=generator).to(dtype)
