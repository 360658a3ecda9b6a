"""Whether clients compute the same before and after they are placed into the global layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedmerge.architecture.model_code import ModelCode, outputs_of
from fedmerge.architecture.tensor_names import model_names
from fedmerge.architecture.widths import resize_module
from fedmerge.merging.result import Merge
from fedmerge.user_code import load_state

TOLERANCE = 1e-4  # relative to the largest output: float32 sums in another order


def output_differences(merge: Merge, code: ModelCode) -> Iterator[str]:
    """Yield every client whose outputs change when it is placed into the global layout."""
    names = model_names(merge.clients[0], code.build())
    own_names = {merge.clients[0].output_name(name): names[name] for name in names}
    inputs: tuple[Any, ...] | None = None
    for number, client in enumerate(merge.clients):
        reader = merge.session.aligned[number]
        own = {names[name]: torch.from_numpy(reader.read(name)) for name in names}
        moved = merge.placed_client(number)
        placed = {of_model: moved[name] for name, of_model in own_names.items()}
        model = _loaded(code, own)
        inputs = inputs or code.inputs(model)
        change = relative_difference(
            outputs_of(model, inputs), outputs_of(_loaded(code, placed), inputs)
        )
        if not change <= TOLERANCE:
            yield f"{client.name}'s outputs change by {change:.2g} in the global layout"


def relative_difference(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """Return the largest difference between outputs, relative to the largest output.

    Infinite where they differ in number or shape; truth values count as 0 and 1.
    """
    if [tensor.shape for tensor in before] != [tensor.shape for tensor in after]:
        return math.inf
    pairs = [(one, other.to(one.device)) for one, other in zip(before, after, strict=True)]
    numbers = [(one.double(), other.double()) for one, other in pairs if one.numel()]
    scale = max((float(one.abs().max()) for one, _ in numbers), default=1.0) or 1.0
    return max((float((a - b).abs().max()) for a, b in numbers), default=0.0) / scale


def _loaded(code: ModelCode, state: Mapping[str, torch.Tensor]) -> nn.Module:
    model = code.build()
    resize_module(model, {name: tuple(tensor.shape) for name, tensor in state.items()})
    load_state(model, dict(state))
    return model
