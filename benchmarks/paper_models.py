"""The paper's networks, as its appendix gives them, for `benchmarks.paper`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional

Start: TypeAlias = Literal["he", "torch"]  # He's normal weights and zero biases, or PyTorch's own


class LeNet(nn.Module):
    """Two 5×5 convolutions and two linear layers for grey 28×28 images: 431,080 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of images (n, 1, 28, 28)."""
        x = functional.max_pool2d(self.conv1(images).relu(), 2)
        x = functional.max_pool2d(self.conv2(x).relu(), 2)
        logits: torch.Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return logits


class CharLSTM(nn.Module):
    """An embedding of 8, one LSTM layer and a decoder."""

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(tokens, 8)
        self.rnn = nn.LSTM(8, hidden, batch_first=True)
        self.decoder = nn.Linear(hidden, tokens)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return logits (n, steps, tokens) of characters (n, steps)."""
        states, _ = self.rnn(self.encoder(characters))
        logits: torch.Tensor = self.decoder(states)
        return logits


def lenet(start: Start) -> nn.Module:
    """Return a fresh LeNet."""
    return _started(LeNet(), start)


def char_lstm(start: Start, tokens: int, hidden: int) -> nn.Module:
    """Return a fresh character model; it has no layer that He's rule is made for."""
    assert start == "torch"
    return CharLSTM(tokens, hidden)


def vgg9_half(start: Start) -> nn.Module:
    """Return a fresh VGG-9 of the paper with half its widths, its dropout as in the paper."""
    layers: list[nn.Module] = []
    for widths, dropout in (((3, 16, 32), 0.0), ((32, 64, 64), 0.05), ((64, 128, 128), 0.1)):
        layers += [*_block(widths), nn.MaxPool2d(2), nn.Dropout2d(dropout)]
    layers += [nn.Flatten(), nn.Linear(128 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, 256)]
    layers += [nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10)]
    return _started(nn.Sequential(*layers), start)


def _block(widths: Sequence[int]) -> list[nn.Module]:
    """Return 3×3 convolutions through these widths, each with a ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
    return layers


def _started(model: nn.Module, start: Start) -> nn.Module:
    """Return the model with the weights of an initialisation."""
    for module in model.modules() if start == "he" else ():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            assert module.bias is not None
            nn.init.zeros_(module.bias)
    return model
