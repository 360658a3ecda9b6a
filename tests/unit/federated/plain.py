"""FedMA's parts once more, as plainly as possible, to compare with."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.values import Array

State = Mapping[str, Tensor]


def train_plainly(
    model: nn.Module,
    shard: Mapping[str, Array],
    *,
    epochs: int,
    rate: float,
    decay: float,
    frozen: Collection[str] = (),
    mu: float = 0.0,
) -> dict[str, Tensor]:
    """Take one SGD step on all samples per epoch, and return the module's state."""
    x, y = torch.from_numpy(shard["x"]), torch.from_numpy(shard["y"])
    trained = [p for name, p in model.named_parameters() if name not in frozen]
    start = [p.detach().clone() for p in trained]
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9, weight_decay=decay)
    for _ in range(epochs):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss = loss + mu / 2 * sum(
            ((p - s) ** 2).sum() for p, s in zip(trained, start, strict=True)
        )
        torch.autograd.backward(loss)
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def class_shares(labels: list[Array], classes: int) -> Tensor:
    """Return each client's share (clients, classes) of every class."""
    counts = np.array([np.bincount(y, minlength=classes) for y in labels], dtype=np.float64)
    return torch.from_numpy(counts / counts.sum(axis=0))
