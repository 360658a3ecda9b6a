"""Image nets that many repositories hold, written anew."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from benchmarks.real_libraries import Real

IMAGE = ((2, 3, 32, 32),)


def conv_norm(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Module:
    """Return a convolution and its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Excite(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = fn.avg_pool2d(x, x.size(2))
        out: Tensor = x * self.up(fn.relu(self.down(gate))).sigmoid()
        return out


class Block(nn.Module):
    """A residual block, pre-activated or not, with or without excitation."""

    def __init__(self, inputs: int, outputs: int, stride: int, excite: bool) -> None:
        super().__init__()
        self.one, self.two = conv_norm(inputs, outputs, 3, stride), conv_norm(outputs, outputs)
        self.excite = Excite(outputs) if excite else nn.Identity()
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Sequential() if same else conv_norm(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        made = self.excite(self.two(fn.relu(self.one(x))))
        return fn.relu(made + self.shortcut(x))


class CifarResNet(nn.Module):
    """The residual net of CIFAR repositories."""

    def __init__(self, *, excite: bool = False) -> None:
        super().__init__()
        self.stem = conv_norm(3, 16)
        widths = (16, 16, 24, 32)
        self.layers = nn.Sequential(
            *(Block(a, b, 1 + (a != b), excite) for a, b in pairwise(widths))
        )
        self.linear = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = fn.avg_pool2d(self.layers(fn.relu(self.stem(x))), 8)
        out: Tensor = self.linear(x.view(x.size(0), -1))
        return out


class DualPath(nn.Module):
    """A block of DPN: part of the result is added, part is appended."""

    def __init__(self, inputs: int, inner: int, outputs: int, dense: int, first: bool) -> None:
        super().__init__()
        self.outputs = outputs
        self.one, self.two = conv_norm(inputs, inner, 1), conv_norm(inner, inner, 3, groups=4)
        self.three = conv_norm(inner, outputs + dense, 1)
        self.shortcut = conv_norm(inputs, outputs + dense, 1) if first else nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        made = self.three(fn.relu(self.two(fn.relu(self.one(x)))))
        x, d = self.shortcut(x), self.outputs
        return fn.relu(torch.cat([x[:, :d] + made[:, :d], x[:, d:], made[:, d:]], 1))


class ShuffleUnit(nn.Module):
    """ShuffleNet v2: half of the channels pass, half are computed, then all are shuffled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.one, self.deep = conv_norm(half, half, 1), conv_norm(half, half, 3, groups=half)
        self.two = conv_norm(half, half, 1)

    def forward(self, x: Tensor) -> Tensor:
        half = x.size(1) // 2
        kept, made = x[:, :half], x[:, half:]
        made = fn.relu(self.two(self.deep(fn.relu(self.one(made)))))
        both = torch.cat([kept, made], 1)
        n, c, h, w = both.size()
        return both.view(n, 2, c // 2, h, w).permute(0, 2, 1, 3, 4).reshape(n, c, h, w)


class Down(nn.Module):
    """Two convolutions of a U-Net after pooling."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.both = nn.Sequential(
            conv_norm(inputs, outputs), nn.ReLU(True), conv_norm(outputs, outputs), nn.ReLU(True)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.both(x)
        return out


class UNet(nn.Module):
    """Skips that are padded to the size of what comes up."""

    def __init__(self, *, bilinear: bool) -> None:
        super().__init__()
        self.bilinear = bilinear
        self.inc, self.down1, self.down2 = Down(3, 8), Down(8, 12), Down(12, 16)
        self.up1, self.up2 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(12, 12, 2, 2)
        self.dec1, self.dec2 = Down(28, 12), Down(20, 8)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.inc(x)
        two = self.down1(fn.max_pool2d(one, 2))
        x = self.down2(fn.max_pool2d(two, 2))
        for skip, up, dec in ((two, self.up1, self.dec1), (one, self.up2, self.dec2)):
            x = (
                fn.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
                if self.bilinear
                else up(x)
            )
            high, wide = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = fn.pad(x, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
            x = dec(torch.cat([skip, x], dim=1))
        out: Tensor = self.out(x)
        return out


class RevNet(nn.Module):
    """Reversible blocks on two halves of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 12, 3, padding=1), nn.Linear(12, 5)
        self.f = nn.ModuleList(conv_norm(6, 6) for _ in range(2))
        self.g = nn.ModuleList(conv_norm(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.stem(x).chunk(2, 1)
        for f, g in zip(self.f, self.g, strict=True):
            one = one + fn.relu(f(two))
            two = two + fn.relu(g(one))
        out: Tensor = self.head(torch.cat([one, two], 1).mean((2, 3)))
        return out


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True),
        nn.Conv2d(8, 12, 4, 2, 1, bias=False), nn.BatchNorm2d(12), nn.LeakyReLU(0.2, True),
        nn.Conv2d(12, 1, 8, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip


def generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(10, 12, 4, 1, 0, bias=False), nn.BatchNorm2d(12), nn.ReLU(True),
        nn.ConvTranspose2d(12, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip


def dual_paths() -> nn.Module:
    return nn.Sequential(
        conv_norm(3, 8), nn.ReLU(), DualPath(8, 8, 12, 4, True), DualPath(20, 8, 12, 4, False),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


def shuffle_net() -> nn.Module:
    units = [ShuffleUnit(16) for _ in range(2)]
    return nn.Sequential(
        conv_norm(3, 16), nn.ReLU(), *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    )


IMAGES: Mapping[str, Real] = {
    "DCGAN, generator": Real(generator, ((2, 10, 1, 1),)),
    "DCGAN, discriminator": Real(discriminator, IMAGE),
    "CIFAR ResNet": Real(CifarResNet, IMAGE),
    "CIFAR SENet": Real(lambda: CifarResNet(excite=True), IMAGE),
    "DPN": Real(dual_paths, ((2, 3, 8, 8),)),
    "ShuffleNet v2": Real(shuffle_net, ((2, 3, 8, 8),)),
    "U-Net, bilinear": Real(lambda: UNet(bilinear=True), ((2, 3, 18, 22),)),
    "U-Net, transposed": Real(lambda: UNet(bilinear=False), ((2, 3, 18, 22),)),
    "RevNet": Real(RevNet, ((2, 3, 8, 8),)),
}
