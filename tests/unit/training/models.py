"""Small models and shards for the tests of training and engines."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedmerge.training import Shard, read_arrays
from fedmerge.user_code import seeded
from fedmerge.values import Array

BUILDER = "tests.unit.training.models:build"
SIDE = 6  # pixels
CLASSES = 3


class ImageNet(nn.Module):
    """Everything that training must take care of: a batch norm, dropout, several layers."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3)
        self.norm = nn.BatchNorm2d(channels)
        self.hidden = nn.Linear(channels * (SIDE - 2) ** 2, 8)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.conv(images)).relu().flatten(1)
        logits: torch.Tensor = self.out(self.drop(self.hidden(features).relu()))
        return logits


class TokenNet(nn.Module):
    """A recurrent net that returns its logits and its state."""

    def __init__(self, tokens: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 4)
        self.rnn = nn.LSTM(4, 6, batch_first=True)
        self.out = nn.Linear(6, tokens)

    def forward(self, text: torch.Tensor) -> tuple[torch.Tensor, object]:
        features, state = self.rnn(self.embed(text))
        return self.out(features), state


def build(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Return the image net at the channels that its weights have."""
    return ImageNet(shapes["conv.weight"][0])


def start_arrays(seed: int) -> dict[str, Array]:
    with seeded(seed):
        return read_arrays(ImageNet())


def images(samples: int = 50, seed: int = 0) -> Shard:
    """Noise with a bright row that tells the class."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES, samples)
    x = rng.normal(size=(samples, 1, SIDE, SIDE)).astype(np.float32)
    x[np.arange(samples), 0, y] += 3
    return Shard("images", x, y, origin="images.npz")


def write_images(path: Path, seed: int) -> Path:
    shard = images(seed=seed)
    np.savez(path, x=shard.x[:], y=shard.y)
    return path
