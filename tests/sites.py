"""Three sites with data of their own, for FedMA over frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from fedmerge.values import Array

NAMES = ("north", "south", "west")
OPTIONS: Mapping[str, Any] = {"epochs": 1, "passes": 2, "batch_size": 8, "max_growth": 1.5}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


def data(client: str) -> tuple[Array, Array]:
    rng = np.random.default_rng(NAMES.index(client))
    x = rng.standard_normal((24, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 1)
