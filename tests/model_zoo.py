"""Small models of every architecture that fedmerge plans from code, groups counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import (
    model_zoo_attention as attention,
)
from tests import (
    model_zoo_convolution as convolution,
)
from tests import (
    model_zoo_recurrent as recurrent,
)


@dataclass(frozen=True)
class Model:
    """One model of the zoo."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]  # of the inputs
    groups: int  # counted by hand
    growing: int | None = None  # how many of them can grow; default all
    tokens: int = 0  # if the first input is tokens: how many there are
    state: tuple[tuple[int, int], ...] = ()

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the model's inputs, always the same."""
        generator = torch.Generator().manual_seed(7)
        floats = [torch.randn(shape, generator=generator) for shape in self.shapes]
        if self.tokens:
            floats[0] = torch.randint(self.tokens, self.shapes[0], generator=generator)
        return tuple(floats)

    @property
    def can_grow(self) -> int:
        """How many groups can grow."""
        return self.groups if self.growing is None else self.growing


class ResidualMlp(nn.Module):
    """A stream that blocks read and add to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.wide = nn.ModuleList(nn.Linear(8, 12) for _ in range(2))
        self.narrow = nn.ModuleList(nn.Linear(12, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = x + narrow(wide(x).relu())
        out: Tensor = self.head(x)
        return out


class SharedLayer(nn.Module):
    """One layer used twice, so that what it reads is what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shared, self.head = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        out: Tensor = self.head(self.shared(self.shared(x).relu()).relu())
        return out


class Glu(nn.Module):
    """Gated linear units, by the op and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 12), nn.Linear(6, 14), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.glu(self.first(x), -1)
        value, gate = self.second(x).chunk(2, -1)
        out: Tensor = self.head(value * gate.sigmoid())
        return out


class HardCodedView(nn.Module):
    """The tutorial's flatten with a number in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 5, 3)
        self.fc1, self.fc2 = nn.Linear(5 * 16, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x).relu()).relu().view(-1, 80)
        out: Tensor = self.fc2(self.fc1(x).relu())
        return out


class OwnMatrices(nn.Module):
    """Plain parameters, einsum, a scale and a tied transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(6, 7))
        self.scale, self.shift = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bi,ih->bh", x, self.a) * self.scale
        x = (torch.einsum("bh,oh->bo", x.tanh(), self.b) + self.shift).tanh()
        return x @ self.b @ self.a.t()


class Distances(nn.Module):
    """Distances to prototypes, and a bilinear layer with a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.places = nn.Linear(6, 8), nn.Parameter(torch.randn(5, 8))
        self.pairs, self.head = nn.Bilinear(8, 8, 4), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        near = torch.cdist(x, self.places)
        out: Tensor = self.head(torch.cat([near, self.pairs(x, x).softmax(-1)], -1))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))


def mlp_norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.PReLU(8), nn.Linear(8, 7), nn.LayerNorm(7),
        nn.Linear(7, 9), nn.RMSNorm(9), nn.Linear(9, 3), nn.Softmax(-1),
    )  # fmt: skip


IMAGE = (2, 1, 8, 8)
RGB = (2, 3, 8, 8)
STEPS = (2, 4, 5)


def _recurrent(
    kind: Callable[..., nn.RNNBase], groups: int, growing: int | None = None, **settings: Any
) -> Model:
    return Model(lambda: recurrent.Recurrent(kind, **settings), (STEPS,), groups, growing)


ZOO: dict[str, Model] = {
    "mlp": Model(mlp, ((2, 6),), 2),
    "mlp with norms": Model(mlp_norms, ((2, 6),), 3, 1),
    "residual mlp": Model(ResidualMlp, ((2, 6),), 3),
    "shared layer": Model(SharedLayer, ((2, 5),), 1),
    "glu": Model(Glu, ((2, 5),), 2),
    "own matrices": Model(OwnMatrices, ((2, 5),), 2),
    "distances and bilinear": Model(Distances, ((2, 6),), 3, 2),
    "hard-coded view": Model(HardCodedView, (IMAGE,), 3, 2),
    "lenet": Model(convolution.LeNet, ((2, 1, 14, 14),), 3),
    "vgg": Model(convolution.vgg, (RGB,), 4),
    "channels-last flatten": Model(convolution.ChannelsLast, (RGB,), 3),
    "conv 1d and 3d": Model(convolution.Conv1dTo3d, ((2, 2, 9),), 3),
    # Padding is a number in the code: padded streams stay; the first and three inner ones grow.
    "resnet A": Model(lambda: convolution.ResNet("A"), (RGB,), 8, 4),
    "resnet B": Model(lambda: convolution.ResNet("B"), (RGB,), 6),
    "pre-activation resnet": Model(convolution.PreActivation, (RGB,), 4),
    "densenet": Model(convolution.DenseNet, (RGB,), 7),
    "u-net": Model(convolution.UNet, (RGB,), 6),
    "mobilenet": Model(lambda: convolution.MobileNet(excite=False), (RGB,), 4),
    "mobilenet with squeeze-excite": Model(lambda: convolution.MobileNet(excite=True), (RGB,), 6),
    "grouped conv with shuffle": Model(convolution.Shuffle, (RGB,), 3),
    "group and instance norm": Model(convolution.GroupNorms, (RGB,), 2, 1),
    "dcgan generator": Model(convolution.dcgan, ((2, 5, 1, 1),), 2),
    "conv autoencoder": Model(convolution.autoencoder, (IMAGE,), 3),
    "pixel shuffle": Model(convolution.PixelShuffle, (RGB,), 2),
    "weight norm": Model(convolution.weight_normed, (RGB,), 2, 0),
    "lstm": _recurrent(nn.LSTM, 1),
    "lstm, 2 layers": _recurrent(nn.LSTM, 2, num_layers=2),
    "lstm, 2 layers, both directions": _recurrent(nn.LSTM, 4, num_layers=2, bidirectional=True),
    "lstm with projection": _recurrent(nn.LSTM, 4, num_layers=2, proj_size=4),
    "gru, 2 layers": _recurrent(nn.GRU, 2, num_layers=2),
    "gru, both directions": _recurrent(nn.GRU, 2, bidirectional=True, bias=False),
    "rnn, relu": _recurrent(nn.RNN, 2, num_layers=2, nonlinearity="relu"),
    "lstm, last states": Model(recurrent.LastStates, (STEPS,), 4),
    "lstm from zeros": Model(recurrent.FromZeros, (STEPS,), 2),
    "lstm from learned states": Model(recurrent.FromLearned, (STEPS,), 1),
    "gru on packed sequences": Model(recurrent.Packed, (STEPS,), 1),
    "lstm with given state": Model(recurrent.Stateful, (STEPS, (1, 2, 6), (1, 2, 6)), 0),
    "lstm with carried state": Model(
        recurrent.Stateful, (STEPS, (1, 2, 6), (1, 2, 6)), 1, state=((1, 1), (2, 2))
    ),
    "lstm with carried state, 2 layers": Model(
        lambda: recurrent.Stateful(2), (STEPS, (2, 2, 6), (2, 2, 6)), 2, state=((1, 1), (2, 2))
    ),
    "lstm cell": Model(lambda: recurrent.Cells("lstm"), (STEPS,), 1),
    "gru cell": Model(lambda: recurrent.Cells("gru"), (STEPS,), 1),
    "rnn cell": Model(lambda: recurrent.Cells("rnn"), (STEPS,), 1),
    "hand-written lstm": Model(recurrent.HandWritten, (STEPS,), 1),
    "language model": Model(lambda: recurrent.Language(tied=False), ((2, 5),), 3, tokens=11),
    "tied language model": Model(lambda: recurrent.Language(tied=True), ((2, 5),), 2, tokens=11),
    "mlp-mixer": Model(attention.Mixer, (RGB,), 4, 2),
    # Every attention has three groups: its heads, the units of queries and keys, those of values.
    # Blocks add the hidden layer, and all share the stream, which is the input in the encoder.
    "vit": Model(attention.VisionTransformer, (RGB,), 1 + 2 * (3 + 1), 2),
    "gpt": Model(attention.Gpt, ((2, 5),), 1 + 2 * (3 + 1), 2, tokens=11),
    "transformer encoder": Model(attention.Encoder, ((2, 4, 8),), 3 + 1, 1),
    "encoder and decoder": Model(
        attention.SequenceToSequence, ((2, 4),), 1 + (3 + 1) + (3 + 3 + 1), 2, tokens=9
    ),
    # The stream, the two heads of keys and values, the two queries of each, the units of values,
    # the hidden layer; rotation pins the units of queries and keys.
    "llama": Model(attention.Llama, ((2, 5),), 5, 1, tokens=11),
    "attention with growing heads": Model(attention.GrowingHeads, ((2, 4, 5),), 1 + 3, 1 + 1),
    "attention that counts its heads": Model(attention.CountedHeads, ((2, 4, 5),), 1 + 3, 1 + 1),
    "convnext": Model(attention.ConvNext, (RGB,), 2, 1),
    "cross attention": Model(attention.CrossAttention, ((2, 4, 5), (2, 3, 6)), 1 + 3, 0),
}
