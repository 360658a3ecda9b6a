"""Make a stretch of work depend on its seed alone, and leave no trace behind."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: str = "cpu") -> Iterator[None]:
    """Seed torch, numpy and Python for a while, and put their states back.

    Models draw from any of the three: dropout, augmentation, the initialisation itself.
    """
    python, old = random.getstate(), np.random.get_state()  # noqa: NPY002 (not ours: the user's)
    kind, _, index = device.partition(":")
    with torch.random.fork_rng([int(index or 0)] if kind == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(old)  # noqa: NPY002


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads for a while: sums depend on how they are cut into parts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def derived_seed(seed: int, *path: str | int) -> int:
    """Return a seed of its own for each path, such as a client's name and a round.

    >>> derived_seed(0, "client-1", 2) == derived_seed(0, "client-1", 2)
    True
    >>> derived_seed(0, "client-1", 2) == derived_seed(0, "client-1", 3)
    False
    """
    text = json.dumps([seed, *path]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
