"""Clients for benchmarks: permuted noisy copies, or independent nets, of a few architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Generator, Tensor

State = dict[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

NOISE = 0.1  # of a copy, relative to each tensor's standard deviation
BIAS_FAN_IN = 100  # biases are a tenth of a standard normal, times √2
GATES = 4  # row blocks of an LSTM's tensors


@dataclass(frozen=True)
class Net:
    """An architecture: its tensors, and how its hidden units may be reordered."""

    shapes: Shapes
    reorder: Callable[[State, Generator], State]

    @property
    def numbers(self) -> int:
        """How many numbers a client holds."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())


def independent(net: Net, seed: int) -> State:
    """Return a net with He-scaled random weights."""
    generator = Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).mul_((2 / _fan_in(shape)) ** 0.5)
        for name, shape in net.shapes.items()
    }


def independent_clients(net: Net, count: int) -> Iterator[State]:
    """Yield independent nets."""
    return (independent(net, seed) for seed in range(count))


def noisy_copies(net: Net, count: int) -> Iterator[State]:
    """Yield copies of one net, hidden units in random order and a little noise added."""
    original = independent(net, 0)
    for seed in range(count):
        generator = Generator().manual_seed(seed)
        copy = {
            name: torch.randn(t.shape, generator=generator).mul_(NOISE * t.std()).add_(t)
            for name, t in original.items()
        }
        yield net.reorder(copy, generator)


def chain(convolutions: Sequence[tuple[int, int]], linear: Sequence[tuple[int, int]]) -> Net:
    """Return a chain of 3×3 convolutions and linear layers, each given as (inputs, outputs)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for number, (columns, rows) in enumerate(convolutions, start=1):
        shapes |= {f"conv{number}.weight": (rows, columns, 3, 3), f"conv{number}.bias": (rows,)}
    for number, (columns, rows) in enumerate(linear, start=len(convolutions) + 1):
        shapes |= {f"fc{number}.weight": (rows, columns), f"fc{number}.bias": (rows,)}
    return Net(shapes, _reorder_chain)


def vgg9() -> Net:
    """Return the paper's VGG-9 (appendix, table of its architecture)."""
    convolutions = ((3, 32), (32, 64), (64, 128), (128, 128), (128, 256), (256, 256))
    return chain(convolutions, ((4096, 512), (512, 512), (512, 10)))


def lenet5() -> Net:
    """Return the net of PyTorch's image classification tutorial."""
    shapes = {
        "conv1.weight": (6, 3, 5, 5), "conv1.bias": (6,),
        "conv2.weight": (16, 6, 5, 5), "conv2.bias": (16,),
        "fc1.weight": (120, 400), "fc1.bias": (120,),
        "fc2.weight": (84, 120), "fc2.bias": (84,),
        "fc3.weight": (10, 84), "fc3.bias": (10,),
    }  # fmt: skip
    return Net(shapes, _reorder_chain)


def large_vgg() -> Net:
    """Return VGG-16's convolutions and narrower linear layers: 400 MB in float32.

    The first linear layer is half of it, so that one group is much larger than all others.
    """
    widths = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    hidden = [(2048, 2048)] * 8
    return chain(tuple(pairwise(widths)), ((512 * 49, 2048), *hidden, (2048, 10)))


def char_lstm(tokens: int = 80, embedding: int = 8, hidden: int = 256) -> Net:
    """Return the paper's character model: embedding, one LSTM layer, decoder."""
    shapes = {
        "encoder.weight": (tokens, embedding),
        "rnn.weight_ih_l0": (GATES * hidden, embedding),
        "rnn.weight_hh_l0": (GATES * hidden, hidden),
        "rnn.bias_ih_l0": (GATES * hidden,),
        "rnn.bias_hh_l0": (GATES * hidden,),
        "decoder.weight": (tokens, hidden),
        "decoder.bias": (tokens,),
    }
    return Net(shapes, _reorder_lstm)


NETS: Mapping[str, Callable[[], Net]] = {
    "VGG-9": vgg9,
    "char-LSTM": char_lstm,
    "LeNet-5": lenet5,
    "large VGG": large_vgg,
}


def _reorder_chain(state: State, generator: Generator) -> State:
    """Permute the outputs of every layer but the last, in place of the dict."""
    layers = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    for layer, following in pairwise(layers):
        rows = len(state[f"{layer}.bias"])
        order = torch.randperm(rows, generator=generator)
        for name in (f"{layer}.weight", f"{layer}.bias"):
            state[name] = state[name][order]
        weight = state[f"{following}.weight"]
        blocks = weight.reshape(len(weight), rows, -1)[:, order]
        state[f"{following}.weight"] = blocks.reshape(weight.shape)
    return state


def _reorder_lstm(state: State, generator: Generator) -> State:
    """Permute the embedding's dimensions and the hidden units, these alike in every gate."""
    hidden = state["decoder.weight"].shape[1]
    inputs = torch.randperm(state["encoder.weight"].shape[1], generator=generator)
    units = torch.randperm(hidden, generator=generator)
    rows = torch.cat([units + gate * hidden for gate in range(GATES)])
    return {
        "encoder.weight": state["encoder.weight"][:, inputs].contiguous(),
        "rnn.weight_ih_l0": state["rnn.weight_ih_l0"][rows][:, inputs].contiguous(),
        "rnn.weight_hh_l0": state["rnn.weight_hh_l0"][rows][:, units].contiguous(),
        "rnn.bias_ih_l0": state["rnn.bias_ih_l0"][rows],
        "rnn.bias_hh_l0": state["rnn.bias_hh_l0"][rows],
        "decoder.weight": state["decoder.weight"][:, units].contiguous(),
        "decoder.bias": state["decoder.bias"],
    }


def _fan_in(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[1:]).numel() if len(shape) > 1 else BIAS_FAN_IN
