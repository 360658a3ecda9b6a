"""What a model of transformers is fed with to be planned: by the kind of its inputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmerge.errors import ModelCodeError, UserCodeError
from fedmerge.tracebacks import last_line
from fedmerge.user_code import run_model, user_code

BATCH = 2  # samples
TOKENS = 16  # of a text, at most
FRAMES = 16  # of a sound after its convolutions
MOST_NUMBERS = 20_000_000  # of an input
SIDE = 224  # of images whose configuration does not say it
_SEED = 0
_POSITIONS = ("max_position_embeddings", "max_target_positions")
_OFFSET = 2  # positions that some families keep for padding
_HINT = (
    "say what it is fed: `model=transformers:FOLDER` with an `input_shape` for each input, "
    "or the model's code with `model`"
)


def example_inputs(model: Any) -> tuple[Tensor, ...]:
    """Return the first of the usual sets of inputs on which a model runs, at random."""
    failure: UserCodeError | None = None
    for names in _usual_names(model):
        try:
            inputs = _drawn(model, names)
            with torch.no_grad():
                run_model(model, inputs)
        except UserCodeError as error:
            failure = failure or error
        else:
            return inputs
    reason = (
        "nothing is known of them" if failure is None else last_line(failure.__cause__ or failure)
    )
    raise ModelCodeError(f"the model runs on none of the usual inputs: {reason}", _HINT)


def names_of_inputs(model: Any, count: int) -> tuple[str, ...]:
    """Return which of forward's arguments so many inputs are."""
    usual = _usual_names(model)
    found = next((names for names in usual if len(names) == count), None)
    if found is None:
        raise ModelCodeError(
            f"the model is fed with {count} inputs, usual are {', '.join(map(str, usual))}", _HINT
        )
    return found


def dtype_of_input(name: str) -> torch.dtype:
    """Return the dtype of one of forward's arguments."""
    return torch.long if name.endswith("_ids") else torch.float32


def _usual_names(model: Any) -> list[tuple[str, ...]]:
    """Return sets of inputs, the likeliest first, no two of one size.

    The main input with that of the decoder, where there is one; the main input alone; all that we
    know how to make; what the library itself tries the model with.
    """
    known = [name for name in inspect.signature(_forward_of(model)).parameters if name in _KINDS]
    main = [model.main_input_name] if model.main_input_name in known else known[:1]
    decoder = [name for name in known if name.startswith("decoder_")]
    tried = [name for name, value in model.dummy_inputs.items() if isinstance(value, Tensor)]
    by_size: dict[int, tuple[str, ...]] = {}
    for names in ([*main, *decoder], main, known, tried):
        by_size.setdefault(len(names), tuple(names))
    return [names for count, names in by_size.items() if count]


def _drawn(model: Any, names: Sequence[str]) -> tuple[Tensor, ...]:
    with torch.random.fork_rng([]), user_code("what the model is fed with can't be told"):
        torch.manual_seed(_SEED)
        return tuple(
            _made(name, model.config) if name in _KINDS else model.dummy_inputs[name]
            for name in names
        )


def _made(name: str, config: Any) -> Tensor:
    """Return an input of a kind that we know, unless a configuration asks for too much."""
    shape = _KINDS[name](config)
    if math.prod(shape) > MOST_NUMBERS:
        raise ModelCodeError(f"config.json asks for inputs of {math.prod(shape):,} numbers", _HINT)
    if dtype_of_input(name) == torch.long:
        return torch.randint(config.get_text_config().vocab_size, shape)
    return torch.randn(shape)


def _forward_of(model: Any) -> Callable[..., Any]:
    forward: Callable[..., Any] = model.library_class.forward
    return forward


def _tokens(config: Any) -> tuple[int, ...]:
    text = config.get_text_config()
    known = (getattr(text, name, None) for name in _POSITIONS)
    most = min((size for size in known if isinstance(size, int) and size > 0), default=TOKENS + 2)
    return BATCH, max(1, min(TOKENS, most - _OFFSET))


def _images(config: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or SIDE
    height, width = (size, size) if isinstance(size, int) else size
    frames = getattr(vision, "num_frames", None)
    middle = (frames,) if isinstance(frames, int) else ()
    return BATCH, *middle, getattr(vision, "num_channels", 3), height, width


def _spectrogram(config: Any) -> tuple[int, ...]:
    bins = getattr(config, "num_mel_bins", 80)
    return BATCH, bins, 2 * getattr(config, "max_source_positions", 1500)


def _sound(config: Any) -> tuple[int, ...]:
    """Return the shape of a waveform; of a spectrogram where a configuration tells of bins."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return BATCH, config.max_length, config.num_mel_bins
    return BATCH, math.prod(getattr(config, "conv_stride", (320,))) * (FRAMES + 1)


_KINDS: Mapping[str, Callable[[Any], tuple[int, ...]]] = {  # the shapes of inputs
    "input_ids": _tokens,
    "pixel_values": _images,
    "input_features": _spectrogram,
    "input_values": _sound,
    "decoder_input_ids": _tokens,
}
