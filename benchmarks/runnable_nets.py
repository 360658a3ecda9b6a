"""Nets of the size that people merge: ResNet-18 and ViT-B/16 as torchvision builds them."""

from __future__ import annotations

import torch
from torch import nn

PATCHED = 224  # pixels of a side


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a skip, which is convolved where sizes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1:
            convolved = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolved, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, outputs, height, width)."""
        skipped = x if self.downsample is None else self.downsample(x)
        made = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        result: torch.Tensor = self.relu(made + skipped)
        return result


class ResNet18(nn.Module):
    """Four stages of two blocks for pictures of 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, 1000)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 1000) of pictures (n, 3, height, width)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits


class EncoderBlock(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a skip."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, steps, width)."""
        seen = self.ln_1(x)
        x = x + self.self_attention(seen, seen, seen, need_weights=False)[0]
        result: torch.Tensor = x + self.mlp(self.ln_2(x))
        return result


class VisionTransformer(nn.Module):
    """ViT-B/16: twelve blocks over patches of 16×16 pixels, 86 million parameters."""

    def __init__(self, width: int = 768, heads: int = 12, hidden: int = 3072) -> None:
        super().__init__()
        steps = (PATCHED // 16) ** 2 + 1
        self.conv_proj = nn.Conv2d(3, width, 16, 16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, steps, width))
        self.layers = nn.Sequential(*[EncoderBlock(width, heads, hidden) for _ in range(12)])
        self.ln = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (n, 1000) of pictures (n, 3, 224, 224)."""
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), patches], dim=1)
        states = self.ln(self.layers(x + self.pos_embedding))
        logits: torch.Tensor = self.head(states[:, 0])
        return logits
