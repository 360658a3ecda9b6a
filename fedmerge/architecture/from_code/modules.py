"""Modules of the user: loaded, copied, and fed with inputs on which they run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedmerge.errors import ArchitectureError, ModelCodeError, UserCodeError
from fedmerge.private_torch import BatchNormLayer, ConvLayer, TransposedConvLayer, leaves
from fedmerge.tracebacks import last_line
from fedmerge.user_code import (
    attribute_of,
    copied_object,
    loaded,
    named,
    own_code,
    remember,
    run_model,
    state_of,
    user_code,
)

StatePairs = Sequence[tuple[int, int]]  # forward's argument i is output j of the step before


def evaluating(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode; an exported program is in the mode it was made in."""
    what = "the model can't be put into evaluation mode"
    with user_code(what, of=model), suppress(NotImplementedError):
        model.eval()
    return model


def copied(model: nn.Module, *, shared: Sequence[Tensor] = ()) -> nn.Module:
    """Return a copy of a model on the CPU, in evaluation mode; some tensors may be its own."""
    hint = "build it without tensors that carry a graph, and on the CPU"
    with user_code("the model cannot be copied", of=model, hint=hint):
        memo = _computed_tensors(list(model.modules())) | {id(t): t for t in shared}
        with torch.no_grad(), warnings.catch_warnings():  # scripted parameters carry no graph then
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, for exported programs
            return evaluating(copied_object(model, memo).to("cpu"))


def looking_copy(model: nn.Module) -> nn.Module:
    """Return a copy for runs that only look: its parameters are the model's own, which is quick."""
    with own_code():
        shared = [own for own in model.parameters() if own.device.type == "cpu"]
    return copied(model, shared=shared)


def _computed_tensors(parts: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Return copies of tensors that hooks leave on modules (pruned weights), which have a graph."""
    with own_code():
        attributes = [value for part in parts for value in vars(part).values()]
        computed = [v for v in attributes if isinstance(v, Tensor) and not v.is_leaf]
        return {id(tensor): tensor.detach().clone() for tensor in computed}


def float_tensors(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the float tensors of a state dict by their first name, and the other names."""
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state_of(module, keep_vars=True).items():
        if not tensor.is_floating_point():
            continue
        key = (tensor.data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
            tensors[name] = tensor
    return tensors, aliases


def plain_numbers(tensor: Tensor) -> Tensor:
    """Return a tensor of a model's outputs as plain numbers that can be compared."""
    kinds = {"nested": tensor.is_nested, "meta": tensor.is_meta, "quantized": tensor.is_quantized}
    found = next((kind for kind, is_so in kinds.items() if is_so), None)
    if found is None and tensor.layout != torch.strided:
        found = str(tensor.layout).removeprefix("torch.")
    if found is not None:
        raise ArchitectureError(f"the model returns a {found} tensor, expected plain numbers")
    return tensor.as_subclass(Tensor)


def tensor_leaves(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and plain objects."""
    found: list[Tensor] = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            found += [t for item in vars(leaf).values() for t in tensor_leaves(item)]
    return found


_MODEL_HINT = (
    "`model` is package.module:name or file.py:name, where name() returns an nn.Module, "
    "or a .pt2 or TorchScript file"
)
_PROGRAM = ".pt2"
_ARCHIVES = (_PROGRAM, ".ts", ".pt", ".pth", ".jit", ".torchscript")


def load_factory(reference: str, arguments: Mapping[str, object]) -> nn.Module:
    """Return the module that a class, function or lambda of the user's code builds.

    Runs that code. The file's folder is importable while it loads and builds. A `.pt2` exported
    program or a TorchScript file is a model by itself.
    """
    if (archive := Path(reference).expanduser()).suffix in _ARCHIVES and ":" not in archive.name:
        return _load_archive(archive)
    place, separator, name = reference.rpartition(":")
    if not separator or not place or not name:
        raise ArchitectureError(f"'{reference}' names no model", _MODEL_HINT)
    with loaded(place, error=ModelCodeError, hint=_MODEL_HINT) as code:
        built = _build(code, name, reference, arguments)
    remember(built, reference)
    return built


def _build(
    code: ModuleType, name: str, reference: str, arguments: Mapping[str, object]
) -> nn.Module:
    target = attribute_of(code, name, error=ModelCodeError)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        names = [n for n, v in vars(code).items() if callable(v) and not n.startswith("_")]
        found = f"; it defines {', '.join(names[:8])}" if names else ""
        raise ArchitectureError(f"'{reference}': there is no callable '{name}'{found}", _MODEL_HINT)
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    hint = "pass what it needs with `model_arg=key=value`"
    with user_code(f"'{reference}': {name}({given}) fails", hint=hint):
        built = target(**arguments)
    if not isinstance(built, nn.Module):
        kind = type(built).__name__
        raise ArchitectureError(
            f"'{reference}': {name}() returns {kind}, no nn.Module", _MODEL_HINT
        )
    return built


def _load_archive(path: Path) -> nn.Module:
    """Return the model of an exported program or a TorchScript file."""
    with _loading_archive(path):
        if path.suffix == _PROGRAM:
            return torch.export.load(path).module()
        scripted: nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        return scripted


@contextmanager
def _loading_archive(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise ArchitectureError(f"'{path}': there is no such file", _MODEL_HINT)
    what = f"'{path}' is neither an exported program (.pt2) nor TorchScript"
    with user_code(what, hint=_MODEL_HINT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the format
        yield


def exported_inputs(reference: str) -> tuple[Tensor, ...] | None:
    """Return inputs of the shapes that a `.pt2` model was exported with, None for other models.

    Floats are random, whole numbers those of the export: they may be places in tables. None, too,
    where the file has no examples, or keywords among them.
    """
    path = Path(reference).expanduser()
    if path.suffix != _PROGRAM or ":" in path.name:
        return None
    with _loading_archive(path):
        examples = torch.export.load(path).example_inputs
    arguments, keywords = examples or ((), {})
    found = leaves(arguments)
    if keywords or not found or not all(isinstance(value, Tensor) for value in found):
        return None
    generator = torch.Generator().manual_seed(_SEED)
    return tuple(
        torch.randn(x.shape, generator=generator).to(x.dtype)
        if x.is_floating_point()
        else x.clone()
        for x in found
    )


BATCH = 2  # samples per input
STEPS = 32  # of a sequence for recurrent layers
TOKENS = 16  # of a sequence for embeddings
SIDES = (28, 32, 64, 96, 128, 224, 256, 299)  # of images, smallest first
ANY_SIDE = 64  # at which nets run, too, that run at any
LAST = 7  # pixels a side that the last convolutions see, as a rule: 224 ÷ 32 or 28 ÷ 4
IMAGE_AXES = 4  # samples, channels, height, width
_SEED = 0
_INPUT_HINT = (
    "give it with `input_shape`, e.g. `input_shape=1,3,32,32` (`input_dtype=long` for tokens)"
)


def deduce_inputs(
    model: nn.Module, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Return random inputs on which the model runs, from its first layer where none are given.

    A linear layer reads its own number of inputs, a recurrent one 32 steps, an embedding 16
    tokens, a convolution the smallest usual image at which the model runs, or one that suits its
    strides where it runs at any size.
    """
    module = looking_copy(model)
    if shape is not None:
        return (_draw(module, shape, dtype),)
    layer = _first_layer(module)
    if layer is None:
        raise ArchitectureError(
            "the model has no layer that tells the shape of its inputs", _INPUT_HINT
        )
    failures: dict[str, UserCodeError] = {}
    for candidate in (*_suitable_shapes(module, layer), *_shapes(layer)):
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
        _INPUT_HINT,
        details=first.details,
    ) from first


def _suitable_shapes(module: nn.Module, layer: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the shape of images of which a net's last convolutions see `LAST` pixels a side.

    That of nets that take any size: 224 where they reduce it by 32, and 32 (28 where there is one
    colour) where they reduce it by 4. What they learnt from small images would not come to bear on
    large ones, nor the other way round.
    """
    if not isinstance(layer, nn.Conv2d):
        return
    try:
        smallest, any_side = (_last_side(module, layer, side) for side in (SIDES[0], ANY_SIDE))
    except UserCodeError:
        return
    if smallest < any_side:
        least = SIDES[0] if layer.in_channels == 1 else SIDES[1]
        wanted = max(least, LAST * ANY_SIDE // any_side)
        side = next((side for side in SIDES if side >= wanted), SIDES[-1])
        yield (BATCH, layer.in_channels, side, side)


def _last_side(module: nn.Module, layer: nn.Conv2d, side: int) -> int:
    """Return the smallest side that any convolution leaves of images of a side."""
    sides = [side]

    def look(_: nn.Module, __: Any, made: Any) -> None:
        if isinstance(made, Tensor) and made.dim() == IMAGE_AXES:
            sides.append(made.shape[-1])

    parts = [part for part in module.modules() if isinstance(part, nn.Conv2d)]
    hooks = [part.register_forward_hook(look) for part in parts]
    try:
        with torch.no_grad():
            run_model(module, (_draw(module, (1, layer.in_channels, side, side), None),))
    finally:
        for hook in hooks:
            hook.remove()
    return max(1, min(sides))


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
    is_transposed = isinstance(layer, TransposedConvLayer)
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
    ConvLayer: _conv_shapes,
    BatchNormLayer: _norm_shapes,
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
