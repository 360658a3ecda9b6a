"""A seeded generator of random networks: images, sequences and vectors, joined in odd ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from tests.random_steps import SEQUENCE_IDIOMS, VECTOR_IDIOMS

Step = Callable[[Tensor], Tensor]


class RandomNet(nn.Module):
    """Draws its layers while it first runs; later runs replay the same layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.rng = np.random.default_rng(seed)
        self.kinds: list[Callable[[RandomNet, Tensor], Tensor]] = []
        self.tape: list[Any] = []
        self.position = 0
        self.is_built = False

    def draw(self, *choices: Any) -> Any:
        """Return one of the choices: a new one while building, the same one ever after."""
        if not self.is_built:
            self.tape.append(choices[int(self.rng.integers(len(choices)))])
        self.position += 1
        return self.tape[self.position - 1]

    def layer(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Return a new layer while building, the same one ever after."""
        if not self.is_built:
            self.layers.append(build())
            self.tape.append(len(self.layers) - 1)
        self.position += 1
        found: nn.Module = self.layers[self.tape[self.position - 1]]
        return found

    def forward(self, x: Tensor) -> Tensor:
        self.position = 0
        makers = {4: image_step, 3: sequence_step, 2: vector_step}
        for _ in range(self.draw(2, 3, 4, 5, 6)):
            x = makers[x.dim()](self, x)
        if x.dim() == 4:
            x = to_vector(self, x)
        width = x.shape[-1]
        out: Tensor = self.layer(lambda: nn.Linear(width, 3))(x)
        return out


def activation(net: RandomNet, x: Tensor) -> Tensor:
    kind: str = net.draw("relu", "tanh", "gelu", "leaky_relu", "silu", "elu", "sigmoid", "none")
    return x if kind == "none" else getattr(fn, kind)(x)


def conv(net: RandomNet, x: Tensor, width: int | None = None) -> Tensor:
    inputs, outputs = x.shape[1], width or net.draw(4, 6, 8)
    groups = net.draw(1, 1, 1, 2) if inputs % 2 == outputs % 2 == 0 else 1
    kernel = net.draw(1, 3)
    made: Tensor = net.layer(
        lambda: nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups,
                          bias=bool(inputs % 4))
    )(x)  # fmt: skip
    return made


def depthwise(net: RandomNet, x: Tensor) -> Tensor:
    width, several = x.shape[1], net.draw(1, 1, 2) if x.shape[1] < 9 else 1
    return net.layer(lambda: nn.Conv2d(width, width * several, 3, padding=1, groups=width))(x)  # type: ignore[no-any-return]


def norm(net: RandomNet, x: Tensor) -> Tensor:
    width = x.shape[1]
    kind = net.draw("batch", "batch", "group", "instance", "prelu", "none")
    builders: dict[str, Callable[[], nn.Module]] = {
        "batch": lambda: nn.BatchNorm2d(width),
        "group": lambda: nn.GroupNorm(2 if width % 2 == 0 else 1, width),
        "instance": lambda: nn.InstanceNorm2d(width, affine=True),
        "prelu": lambda: nn.PReLU(width),
        "none": nn.Identity,
    }
    return net.layer(builders[kind])(x)  # type: ignore[no-any-return]


def conv_block(net: RandomNet, x: Tensor) -> Tensor:
    return activation(net, norm(net, conv(net, x)))


def residual(net: RandomNet, x: Tensor) -> Tensor:
    return x + norm(net, conv(net, conv_block(net, x), x.shape[1]))


def dense(net: RandomNet, x: Tensor) -> Tensor:
    parts = [x, conv_block(net, x)]
    return torch.cat(parts[:: net.draw(1, -1)], 1) if x.shape[1] < 24 else x


def squeeze(net: RandomNet, x: Tensor) -> Tensor:
    gate = conv(net, conv(net, x.mean((2, 3), keepdim=True), 2).relu(), x.shape[1])
    return x * gate.sigmoid()


def shuffle(net: RandomNet, x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        return x
    batch, width, high, wide = x.shape
    return x.view(batch, 2, width // 2, high, wide).transpose(1, 2).reshape(x.shape)


def halves(net: RandomNet, x: Tensor) -> Tensor:
    if x.shape[1] % 2:
        return x
    one, other = x.chunk(2, 1)
    kind = net.draw("gate", "swap", "glu", "max")
    if kind == "gate":
        return one * other.sigmoid()
    if kind == "swap":
        return torch.cat([other, one.tanh()], 1)
    return fn.glu(x, 1) if kind == "glu" else torch.maximum(one, other)


def padded(net: RandomNet, x: Tensor) -> Tensor:
    wider = fn.pad(x, (0, 0, 0, 0, net.draw(0, 1, 2), net.draw(0, 2)))
    return wider + conv(net, x, wider.shape[1])


def pooled(net: RandomNet, x: Tensor) -> Tensor:
    if x.shape[-1] < 4:
        return x
    kind = net.draw("max", "avg", "stride", "up")
    if kind == "up":
        return fn.interpolate(fn.max_pool2d(x, 2), scale_factor=2.0)
    return x[:, :, ::2, ::2] if kind == "stride" else getattr(fn, f"{kind}_pool2d")(x, 2)


def written(net: RandomNet, x: Tensor) -> Tensor:
    """Fill a buffer in place, part by part."""
    made = conv(net, x)
    cut = made.shape[1]
    buffer = torch.zeros(x.shape[0], cut + x.shape[1], *x.shape[2:])
    buffer[:, :cut] = made
    buffer[:, cut:].copy_(x)
    return buffer.mul_(2.0) if cut + x.shape[1] < 30 else made


def channels_last(net: RandomNet, x: Tensor) -> Tensor:
    width = x.shape[1]
    flat = x.permute(0, 2, 3, 1)
    mixed = net.layer(lambda: nn.Linear(width, width + 1))(flat)
    return activation(net, mixed).permute(0, 3, 1, 2)


def odd_view(net: RandomNet, x: Tensor) -> Tensor:
    """Regroup channels and pixels so that units need not align."""
    batch, width, high, wide = x.shape
    if width * high % 3 or width > 12:
        return x
    return x.reshape(batch, width * high // 3, 3, wide) if net.draw(True, False) else x


def to_vector(net: RandomNet, x: Tensor) -> Tensor:
    kind = net.draw("flatten", "mean", "max", "last")
    if kind == "flatten":
        return fn.adaptive_avg_pool2d(x, 2).flatten(1)
    if kind == "last":
        return x.permute(0, 2, 3, 1)[:, :2, :2].reshape(len(x), -1)
    return x.mean((2, 3)) if kind == "mean" else x.amax((2, 3))


def to_sequence(net: RandomNet, x: Tensor) -> Tensor:
    return fn.adaptive_avg_pool2d(x, 2).flatten(2).transpose(1, 2)


def linear_block(net: RandomNet, x: Tensor) -> Tensor:
    inputs, outputs = x.shape[-1], net.draw(4, 6, 8)
    bias = net.draw(True, False)
    return activation(net, net.layer(lambda: nn.Linear(inputs, outputs, bias=bias))(x))


def residual_linear(net: RandomNet, x: Tensor) -> Tensor:
    width = x.shape[-1]
    inner = linear_block(net, layer_norm(net, x))
    inside = inner.shape[-1]
    return x + net.layer(lambda: nn.Linear(inside, width))(inner)  # type: ignore[no-any-return]


def layer_norm(net: RandomNet, x: Tensor) -> Tensor:
    width = x.shape[-1]
    if net.draw(True, False):
        return net.layer(lambda: nn.LayerNorm(width))(x)  # type: ignore[no-any-return]
    return net.layer(lambda: nn.RMSNorm(width))(x)  # type: ignore[no-any-return]


def shared(net: RandomNet, x: Tensor) -> Tensor:
    width = x.shape[-1]
    layer = net.layer(lambda: nn.Linear(width, width))
    return layer(layer(x).tanh()) - fn.linear(x, layer.weight.t())  # type: ignore[operator, no-any-return]


def recurrent(net: RandomNet, x: Tensor) -> Tensor:
    kind = net.draw(nn.LSTM, nn.GRU, nn.RNN)
    layers, both = net.draw(1, 2), net.draw(True, False)
    width = x.shape[-1]
    steps, state = net.layer(
        lambda: kind(width, 5, layers, batch_first=True, bidirectional=both)
    )(x)  # fmt: skip
    last = state[0] if kind is nn.LSTM else state
    how = net.draw("steps", "last", "states", "sum")
    if how == "steps":
        return steps  # type: ignore[no-any-return]
    if how == "last":
        return torch.cat([last[-1], steps[:, 0]], -1)
    return torch.cat(last.unbind(0), -1) if how == "states" else last.sum(0) + last[0]


def attention(net: RandomNet, x: Tensor) -> Tensor:
    batch, steps, width = x.shape
    heads = net.draw(1, 2)
    stacked: Tensor = net.layer(lambda: nn.Linear(width, 3 * heads * 4))(x)
    if net.draw(True, False):
        split = stacked.view(batch, steps, 3, heads, 4).permute(2, 0, 3, 1, 4)
        q, k, v = split[0], split[1], split[2]
    else:
        q, k, v = (p.view(batch, steps, heads, 4).transpose(1, 2) for p in stacked.chunk(3, -1))
    if net.draw(True, False):
        seen = fn.scaled_dot_product_attention(q, k, v, is_causal=net.draw(True, False))
    else:
        seen = (q @ k.transpose(-2, -1)).softmax(-1) @ v
    seen = seen.transpose(1, 2).reshape(batch, steps, heads * 4)
    return x + net.layer(lambda: nn.Linear(heads * 4, width))(seen)  # type: ignore[no-any-return]


def mix_steps(net: RandomNet, x: Tensor) -> Tensor:
    steps, made = x.shape[1], net.draw(x.shape[1], 5)
    turned = x.transpose(1, 2)
    return net.layer(lambda: nn.Linear(steps, made))(turned).transpose(1, 2)  # type: ignore[no-any-return]


def reduce_steps(net: RandomNet, x: Tensor) -> Tensor:
    kind = net.draw("mean", "max", "first", "flatten", "stack")
    if kind == "stack":
        return torch.stack([x[:, 0], x[:, -1].tanh()], 1).flatten(1)
    if kind == "flatten":
        return x.flatten(1)
    return x.mean(1) if kind == "mean" else x.max(1).values if kind == "max" else x[:, 0]


def positions(net: RandomNet, x: Tensor) -> Tensor:
    """Ops that know the number of a unit, so that it is pinned."""
    kind = net.draw("cumsum", "flip", "roll", "sort", "scale", "index", "stride")
    if kind == "scale":
        return x * torch.arange(x.shape[-1])
    if kind == "index":
        return x[..., torch.arange(1, x.shape[-1])]
    if kind == "stride":
        return x[..., ::2]
    found = {"cumsum": x.cumsum(-1), "flip": x.flip(-1), "roll": x.roll(1, -1)}
    return found.get(kind, x.sort(-1).values)


IMAGE_STEPS = (
    conv_block, conv_block, residual, residual, dense, squeeze, shuffle, halves, padded, pooled,
    depthwise, written, channels_last, odd_view, to_vector, to_sequence,
)  # fmt: skip
SEQUENCE_STEPS = (
    linear_block, residual_linear, recurrent, recurrent, attention, attention, mix_steps,
    reduce_steps, shared, layer_norm, *SEQUENCE_IDIOMS,
)  # fmt: skip
VECTOR_STEPS = (
    linear_block, linear_block, residual_linear, shared, layer_norm, positions, *VECTOR_IDIOMS,
)  # fmt: skip


def image_step(net: RandomNet, x: Tensor) -> Tensor:
    return net.draw(*IMAGE_STEPS)(net, x)  # type: ignore[no-any-return]


def sequence_step(net: RandomNet, x: Tensor) -> Tensor:
    return net.draw(*SEQUENCE_STEPS)(net, x)  # type: ignore[no-any-return]


def vector_step(net: RandomNet, x: Tensor) -> Tensor:
    return net.draw(*VECTOR_STEPS)(net, x)  # type: ignore[no-any-return]


def random_net(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a random network and its inputs, always the same for a seed."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shape = [(2, 3, 8, 8), (2, 5, 6), (3, 7)][int(rng.choice(3, p=[0.55, 0.3, 0.15]))]
    inputs = torch.randn(shape)
    net = RandomNet(seed).eval()
    with torch.no_grad():
        net(inputs)
    net.is_built = True
    return net, (inputs,)
