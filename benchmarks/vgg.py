"""Clients for benchmarks: the paper's VGG-9, as permuted noisy copies or independent nets."""

from __future__ import annotations

from itertools import pairwise

import torch

Shapes = dict[str, tuple[int, ...]]

_CONVOLUTIONS = ((3, 32), (32, 64), (64, 128), (128, 128), (128, 256), (256, 256))
_LINEAR = ((4096, 512), (512, 512), (512, 10))


def vgg9_shapes() -> Shapes:
    """Return the shapes of the paper's VGG-9 (appendix, table of its architecture)."""
    shapes: Shapes = {}
    for number, (columns, rows) in enumerate(_CONVOLUTIONS, start=1):
        shapes |= {f"conv{number}.weight": (rows, columns, 3, 3), f"conv{number}.bias": (rows,)}
    for number, (columns, rows) in enumerate(_LINEAR, start=7):
        shapes |= {f"fc{number}.weight": (rows, columns), f"fc{number}.bias": (rows,)}
    return shapes


def independent(shapes: Shapes, seed: int) -> dict[str, torch.Tensor]:
    """Return a net with He-scaled random weights."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (2 / max(1, _fan_in(shape))) ** 0.5
        for name, shape in shapes.items()
    }


def noisy_copies(shapes: Shapes, count: int, noise: float = 0.1) -> list[dict[str, torch.Tensor]]:
    """Return copies of one net with every hidden layer in random order and a little noise."""
    original = independent(shapes, 0)
    copies = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        copy = {
            name: t + noise * t.std() * torch.randn(t.shape, generator=generator)
            for name, t in original.items()
        }
        copies.append(_permuted(copy, generator))
    return copies


def _permuted(
    state: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    layers = [name.removesuffix(".weight") for name in state if name.endswith(".weight")]
    for layer, following in pairwise(layers):
        rows = state[f"{layer}.weight"].shape[0]
        order = torch.randperm(rows, generator=generator)
        state[f"{layer}.weight"] = state[f"{layer}.weight"][order]
        state[f"{layer}.bias"] = state[f"{layer}.bias"][order]
        weight = state[f"{following}.weight"]
        blocks = weight.reshape(len(weight), rows, -1)[:, order]
        state[f"{following}.weight"] = blocks.reshape(weight.shape)
    return state


def _fan_in(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape[1:]).numel()) if len(shape) > 1 else 100
