"""The networks of the real checkpoints that `benchmarks.oneshot` merges, by their files' names."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class CifarNet(nn.Module):
    """Two 5×5 convolutions and three linear layers for 32×32 images in colour."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of images (n, 3, 32, 32)."""
        x = functional.max_pool2d(self.conv1(images).relu(), 2)
        x = functional.max_pool2d(self.conv2(x).relu(), 2)
        logits: torch.Tensor = self.fc3(self.fc2(self.fc1(x.flatten(1)).relu()).relu())
        return logits


class NormedCnn(nn.Module):
    """Two 5×5 convolutions with batch norms and one linear layer for grey 28×28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = _normed(1, 16)
        self.layer2 = _normed(16, 32)
        self.fc = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of images (n, 1, 28, 28)."""
        logits: torch.Tensor = self.fc(self.layer2(self.layer1(images)).flatten(1))
        return logits


class Perceptron(nn.Module):
    """Two linear layers, 784-50-10, for grey 28×28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of images (n, 1, 28, 28)."""
        logits: torch.Tensor = self.fc2(self.fc1(images.flatten(1)).relu())
        return logits


class RowLSTM(nn.Module):
    """Two LSTM layers over the rows of grey 28×28 images, the last step decides."""

    def __init__(self, bidirectional: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(28, 128, 2, batch_first=True, bidirectional=bidirectional)
        self.fc = nn.Linear(256 if bidirectional else 128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of images (n, 1, 28, 28)."""
        states, _ = self.lstm(images[:, 0])
        logits: torch.Tensor = self.fc(states[:, -1])
        return logits


class CharGRU(nn.Module):
    """An embedding, two GRU layers and a decoder over the 100 printable ASCII characters."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(100, 100)
        self.rnn = nn.GRU(100, 100, 2, batch_first=True)
        self.decoder = nn.Linear(100, 100)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return logits (n, steps, 100) of characters (n, steps)."""
        states, _ = self.rnn(self.encoder(characters))
        logits: torch.Tensor = self.decoder(states)
        return logits


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norms beside a shortcut, by a convolution where it widens."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3(outputs, outputs, 1)
        self.bn2 = nn.BatchNorm2d(outputs)
        widened = nn.Sequential(_conv3(inputs, outputs, stride), nn.BatchNorm2d(outputs))
        self.downsample = None if inputs == outputs else widened

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, outputs, …) of (n, inputs, …)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        inner: torch.Tensor = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (inner + shortcut).relu()


class CifarResNet(nn.Module):
    """Three stages of two residual blocks, 16, 32 and 64 wide, for 32×32 images in colour."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = _conv3(3, 16, 1)
        self.bn = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 16, 1))
        self.layer2 = nn.Sequential(ResidualBlock(16, 32, 2), ResidualBlock(32, 32, 1))
        self.layer3 = nn.Sequential(ResidualBlock(32, 64, 2), ResidualBlock(64, 64, 1))
        self.fc = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of images (n, 3, 32, 32)."""
        x = self.layer3(self.layer2(self.layer1(self.bn(self.conv(images)).relu())))
        logits: torch.Tensor = self.fc(functional.avg_pool2d(x, 8).flatten(1))
        return logits


def _normed(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 5, padding=2),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def _conv3(inputs: int, outputs: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


class PlainBlock(nn.Module):
    """Two 3×3 convolutions with batch norms beside a shortcut without weights."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3(inputs, outputs, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3(outputs, outputs, 1)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, outputs, …) of (n, inputs, …); new channels of the shortcut are 0."""
        inner: torch.Tensor = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.conv1.stride[0] > 1:
            missing = inner.shape[1] - x.shape[1]
            sides = (missing // 2, missing - missing // 2)
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, *sides))
        return (inner + x).relu()


class ResNet20(nn.Module):
    """Three stages of three blocks, 16, 32 and 64 wide, for 32×32 images in colour."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = _conv3(3, 16, 1)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, 1)
        self.layer2 = _stage(16, 32, 2)
        self.layer3 = _stage(32, 64, 2)
        self.linear = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of images (n, 3, 32, 32)."""
        x = self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(images)).relu())))
        logits: torch.Tensor = self.linear(x.mean((2, 3)))
        return logits


class Patches(nn.Module):
    """Overlapping 4×4 patches of grey images, each as 48 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 48)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return (n, patches, 48) of images (n, 1, height, width)."""
        rows: torch.Tensor = self.proj(functional.unfold(images, 4, stride=2).transpose(1, 2))
        return rows


class PatchTransformer(nn.Module):
    """Four encoder layers over the patches of grey 28×28 images."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = Patches()
        self.pos_embed = nn.Parameter(torch.zeros(1, 169, 48))
        layer = nn.TransformerEncoderLayer(
            48, 8, 128, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(48)
        self.classifier = nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 10) of images (n, 1, 28, 28)."""
        states = self.norm(self.encoder(self.patch_embed(images) + self.pos_embed))
        logits: torch.Tensor = self.classifier(states.mean(1))
        return logits


def _stage(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    rest = (PlainBlock(outputs, outputs, 1) for _ in range(2))
    return nn.Sequential(PlainBlock(inputs, outputs, stride), *rest)
