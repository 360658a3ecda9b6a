"""Convolutional models of the zoo."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as fn


class LeNet(nn.Module):
    """Two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 6, 3)
        self.fc1, self.fc2 = nn.Linear(6 * 4, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = fn.max_pool2d(self.conv1(x).relu(), 2)
        x = fn.max_pool2d(self.conv2(x).relu(), 2)
        out: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return out


def vgg() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, padding="same", bias=False), nn.BatchNorm2d(5, eps=1e-3), nn.ReLU(),
        nn.Conv2d(5, 6, 3, padding=1), nn.PReLU(6), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(), nn.Linear(24, 7), nn.ReLU(), nn.Linear(7, 3),
    )  # fmt: skip


class ChannelsLast(nn.Module):
    """Flatten with the channels last: pixels × channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)
        self.fc1, self.fc2 = nn.Linear(5 * 16, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x).relu()).relu().permute(0, 2, 3, 1)
        out: Tensor = self.fc2(self.fc1(x.reshape(len(x), -1)).relu())
        return out


class Conv1dTo3d(nn.Module):
    """Convolutions of one and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.pool = nn.Conv1d(2, 4, 3), nn.AvgPool1d(2)
        self.cube, self.norm = nn.Conv3d(4, 5, 1), nn.BatchNorm3d(5)
        self.last, self.head = nn.Conv1d(5, 6, 1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.line(x)).relu()[..., None, None]
        x = fn.max_pool1d(self.norm(self.cube(x)).relu().flatten(2), 2)
        out: Tensor = self.head(self.last(x).relu().amax(-1))
        return out


class Block(nn.Module):
    """A residual block; shortcut A pads with zero channels, B convolves."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.pad = (outputs - inputs) // 2
        self.shortcut: nn.Module | None = None
        if stride > 1 and shortcut == "B":
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.pad:
            x = fn.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        total: Tensor = out + x
        return total.relu()


class ResNet(nn.Module):
    """Three stages of one block: three inner widths, and three streams (B) or five (A)."""

    def __init__(self, shortcut: str) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        widths = [4, 4, 8, 16]
        self.blocks = nn.Sequential(
            *(Block(widths[k], widths[k + 1], 1 + (k > 0), shortcut) for k in range(3))
        )
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.bn1(self.conv1(x)).relu())
        out: Tensor = self.fc(fn.adaptive_avg_pool2d(x, 1).flatten(1))
        return out


class PreActivation(nn.Module):
    """Norm and activation before the convolution; two streams, two inner widths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norms1 = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])
        self.convs1 = nn.ModuleList([nn.Conv2d(4, 6, 3, 1, 1), nn.Conv2d(4, 5, 3, 2, 1)])
        self.norms2 = nn.ModuleList([nn.BatchNorm2d(6), nn.BatchNorm2d(5)])
        self.convs2 = nn.ModuleList([nn.Conv2d(6, 4, 3, 1, 1), nn.Conv2d(5, 8, 3, 1, 1)])
        self.shortcut, self.norm = nn.Conv2d(4, 8, 1, 2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for k in range(2):
            seen = self.norms1[k](x).relu()
            x = self.shortcut(seen) if k else x
            x = x + self.convs2[k](self.norms2[k](self.convs1[k](seen)).relu())
        out: Tensor = self.head(self.norm(x).relu().mean((2, 3)))
        return out


class DenseNet(nn.Module):
    """Every layer reads all before it: stem, two layers, transition, two layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(w) for w in (4, 7, 5, 8)])
        self.convs = nn.ModuleList([nn.Conv2d(w, 3, 3, padding=1) for w in (4, 7, 5, 8)])
        self.norm, self.narrow = nn.BatchNorm2d(10), nn.Conv2d(10, 5, 1)
        self.last, self.fc, self.head = nn.BatchNorm2d(11), nn.Linear(11, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for k in range(2):
            x = torch.cat([x, self.convs[k](self.norms[k](x).relu())], 1)
        x = fn.avg_pool2d(self.narrow(self.norm(x).relu()), 2)
        for k in range(2, 4):
            x = torch.cat([x, self.convs[k](self.norms[k](x).relu())], 1)
        x = self.fc(self.last(x).relu().mean((2, 3))).relu()
        out: Tensor = self.head(x)
        return out


class UNet(nn.Module):
    """Two levels down, two up, with concatenated skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 5, 3, 1, 1)
        self.middle = nn.Conv2d(5, 6, 3, 1, 1)
        self.up2, self.conv2 = nn.ConvTranspose2d(6, 5, 2, 2), nn.Conv2d(10, 7, 3, 1, 1)
        self.conv1, self.head = nn.Conv2d(11, 6, 3, 1, 1), nn.Conv2d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x).relu()
        two = self.down2(fn.max_pool2d(one, 2)).relu()
        x = self.up2(self.middle(fn.max_pool2d(two, 2)).relu())
        x = self.conv2(torch.cat([x, two], 1)).relu()
        x = fn.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        out: Tensor = self.head(self.conv1(torch.cat([x, one], 1)).relu())
        return out


class MobileNet(nn.Module):
    """Two inverted residual blocks: stem stream, wide, wide, second stream (+ two squeezes)."""

    def __init__(self, *, excite: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.wide = nn.ModuleList([nn.Conv2d(4, 8, 1), nn.Conv2d(4, 6, 1)])
        self.depth = nn.ModuleList(
            [nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Conv2d(6, 6, 3, 2, 1, groups=6)]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(6)])
        self.squeeze = nn.ModuleList([nn.Conv2d(8, 2, 1), nn.Conv2d(6, 3, 1)] if excite else [])
        self.excite = nn.ModuleList([nn.Conv2d(2, 8, 1), nn.Conv2d(3, 6, 1)] if excite else [])
        self.narrow = nn.ModuleList([nn.Conv2d(8, 4, 1), nn.Conv2d(6, 5, 1)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for k in range(2):
            seen = fn.hardswish(self.norms[k](self.depth[k](fn.relu6(self.wide[k](x)))))
            if len(self.squeeze):
                squeezed = self.squeeze[k](seen.mean((2, 3), keepdim=True)).relu()
                seen = seen * fn.hardsigmoid(self.excite[k](squeezed))
            seen = self.narrow[k](seen)
            x = x + seen if k == 0 else seen
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Shuffle(nn.Module):
    """Grouped convolutions with a channel shuffle between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.conv1 = nn.Conv2d(8, 12, 3, 1, 1, groups=2)
        self.conv2 = nn.Conv2d(12, 6, 3, 1, 1, groups=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.stem(x).relu()).relu()
        batch, channels, high, wide = x.shape
        x = x.view(batch, 2, channels // 2, high, wide).transpose(1, 2).reshape(x.shape)
        out: Tensor = self.head(self.conv2(x).relu().mean((2, 3)))
        return out


class GroupNorms(nn.Module):
    """Group norm and instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.conv2, self.norm2 = nn.Conv2d(8, 5, 3, bias=False), nn.InstanceNorm2d(5, affine=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())).relu()
        out: Tensor = self.head(x.amax((2, 3)))
        return out


class PixelShuffle(nn.Module):
    """Channels that become pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 12, 1)
        self.head = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = fn.pixel_shuffle(self.conv2(self.conv1(x).relu()), 2).relu()
        out: Tensor = self.head(x)
        return out


def dcgan() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(5, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 4, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.ConvTranspose2d(6, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(6, 5, 2, 2), nn.ReLU(), nn.ConvTranspose2d(5, 1, 2, 2),
    )  # fmt: skip


def weight_normed() -> nn.Module:
    normed = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        normed(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(), normed(nn.Linear(144, 7)), nn.ReLU(),
        nn.Linear(7, 2),
    )  # fmt: skip
