"""More steps of random networks: idioms that were met in published models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as fn


class Drawing(Protocol):
    """A network that draws its layers while it first runs."""

    def draw(self, *choices: Any) -> Any:
        """Return one of the choices."""

    def layer(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return a layer."""


def grouped_queries(net: Drawing, x: Tensor) -> Tensor:
    """Attention whose heads of keys and values serve several heads of queries each."""
    batch, steps, width = x.shape
    few, times, size = net.draw(1, 2), net.draw(2, 3), net.draw(2, 4)
    q = net.layer(lambda: nn.Linear(width, few * times * size))(x).view(batch, steps, -1, size)
    k, v = (
        net.layer(lambda: nn.Linear(width, few * size))(x).view(batch, steps, few, size)
        for _ in range(2)
    )
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    is_causal = net.draw(True, False)
    seen = fn.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    made = seen.transpose(1, 2).reshape(batch, steps, few * times * size)
    return x + net.layer(lambda: nn.Linear(few * times * size, width))(made)  # type: ignore[no-any-return]


def inner_stack(net: Drawing, x: Tensor) -> Tensor:
    """Queries, keys and values taken from the middle of heads × 3 × units."""
    batch, steps, width = x.shape
    heads = net.draw(1, 2, 3)
    fused = net.layer(lambda: nn.Linear(width, heads * 12))(x).view(batch, steps, heads, 3, 4)
    parts = fused.unbind(3) if net.draw(True, False) else [fused[..., k, :] for k in range(3)]
    q, k, v = (part.transpose(1, 2) for part in parts)
    seen = (q @ k.transpose(-2, -1)).softmax(-1) @ v
    made = seen.transpose(1, 2).reshape(batch, steps, heads * 4)
    return x + net.layer(lambda: nn.Linear(heads * 4, width))(made)  # type: ignore[no-any-return]


def whole_kernel(net: Drawing, x: Tensor) -> Tensor:
    """A convolution over steps with a kernel as wide as the units, or slightly narrower."""
    width, padding = x.shape[2], net.draw(0, 0, 1)
    kernel = max(1, width - net.draw(0, 0, 1))
    made = net.layer(lambda: nn.Conv2d(1, 6, (1, kernel), padding=(0, padding)))(x.unsqueeze(1))
    return made.relu().amax(3).transpose(1, 2)  # type: ignore[no-any-return]


def pooled_last(net: Drawing, x: Tensor) -> Tensor:
    """Pool the steps of a tensor whose channels lie last in memory."""
    pool = net.draw(fn.adaptive_avg_pool1d, fn.adaptive_max_pool1d)
    return pool(x.transpose(1, 2), 1).flatten(1)  # type: ignore[no-any-return]


def messages(net: Drawing, x: Tensor) -> Tensor:
    """Sum or pick along the steps by an index."""
    steps = x.shape[1]
    ends = torch.arange(steps).flip(0) // 2
    how = net.draw("add", "scatter", "gather", "put")
    if how == "add":
        return x + torch.zeros_like(x).index_add_(1, ends, x.tanh())
    wide = ends[None, :, None].expand_as(x)
    if how == "scatter":
        return x + torch.zeros_like(x).scatter_add(1, wide, x.sin())
    return x + x.gather(1, wide) if how == "gather" else torch.zeros_like(x).index_copy(1, ends, x)


def one_unit(net: Drawing, x: Tensor) -> Tensor:
    """Take one unit for its shape, or for its value."""
    unit = x[..., -1]
    return x + (unit if net.draw(True, False) else torch.ones(unit.shape)).unsqueeze(-1)


def powers(net: Drawing, x: Tensor) -> Tensor:
    """Numbers before a tensor: 2 ** x, 1 - x, 1 / x."""
    kind = net.draw("power", "rest", "inverse", "choose")
    if kind == "choose":
        return torch.where(x > 0, 0.5, x)
    found = {"power": 2.0 ** x.tanh(), "rest": 1 - x, "inverse": 1 / (2 + x.tanh())}
    return found[kind]


SEQUENCE_IDIOMS = (
    grouped_queries, grouped_queries, inner_stack, inner_stack, whole_kernel, pooled_last, messages,
    one_unit, powers,
)  # fmt: skip
VECTOR_IDIOMS = (one_unit, powers)
