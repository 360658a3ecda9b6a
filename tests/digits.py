"""Small clients on skewed parts of scikit-learn's digits, and data to measure them on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from fedmerge.values import Array, IntArray

MODEL = "tests.digits:build"
TRAINED = 1200  # the first images are for training, the rest for evaluation

State = dict[str, Tensor]


def build(hidden: int = 16) -> nn.Sequential:
    """Return a perceptron for 8×8 images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


@cache
def images() -> tuple[Array, IntArray]:
    """Return all images (n, 1, 8, 8) in [0, 1] and their labels (n,)."""
    x, y = load_digits(return_X_y=True)
    return (x.reshape(-1, 1, 8, 8) / 16).astype(np.float32), y.astype(np.int64)


@cache
def client(number: int, hidden: int = 16) -> State:
    """Return the weights of a client that saw seven of the ten digits."""
    x, y = (torch.from_numpy(array[:TRAINED]) for array in images())
    own = ((y + 3 * number) % 10 < 7).nonzero().flatten()
    torch.manual_seed(number)
    model = build(hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(6):
        for batch in torch.split(own[torch.randperm(len(own))], 32):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(model(x[batch]), y[batch]))
            optimizer.step()
    return dict(model.state_dict())


def save_clients(folder: Path, count: int = 3) -> list[Path]:
    """Write clients as c1.pt, c2.pt, …"""
    return [save(client(k), folder / f"c{k}.pt") for k in range(1, count + 1)]


def save(state: State, path: Path) -> Path:
    """Write a state dict."""
    torch.save(state, path)
    return path


def save_test(folder: Path) -> Path:
    """Write the images that no client saw."""
    x, y = (array[TRAINED:] for array in images())
    np.savez(folder / "test.npz", x=x, y=y)
    return folder / "test.npz"


def logits(state: State) -> Tensor:
    """Return what a client makes of the test images (n, 10)."""
    model = build(len(state["1.bias"]))
    model.load_state_dict(state)
    with torch.no_grad():
        found: Tensor = model(torch.from_numpy(images()[0][TRAINED:]))
    return found


def quality(outputs: Tensor) -> tuple[float, float]:
    """Return loss and accuracy of logits for the test images."""
    targets = torch.from_numpy(images()[1][TRAINED:])
    loss = float(nn.functional.cross_entropy(outputs, targets))
    return loss, int((outputs.argmax(1) == targets).sum()) / len(targets)
