"""A small run for the command line: its net, its shards, and how it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

CLASSES = 3
NET = """
import os, signal, time
from pathlib import Path

import numpy as np
from torch import nn


def build(hidden=6):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 5), nn.ReLU(),
                         nn.Linear(5, 3))


def load(client):
    '''Shards that do what a file `trouble-CLIENT` says, once per line.'''
    trouble = Path(__file__).parent / f"trouble-{client}"
    if trouble.exists():
        first, *rest = trouble.read_text().splitlines() or [""]
        trouble.write_text("\\n".join(rest))
        TROUBLES.get(first, lambda: None)()
    with np.load(Path(__file__).parent / "shards" / f"{client}.npz") as shard:
        return shard["x"], shard["y"]


def fail():
    raise RuntimeError("no data today")


TROUBLES = {
    "fail": fail,
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
    "nap": lambda: time.sleep(0.1),
}
"""


@dataclass(frozen=True)
class Scene:
    """A folder with a net, three clients and their shards, and data to evaluate on."""

    folder: Path

    @property
    def clients(self) -> list[Path]:
        return [self.folder / f"{name}.pt" for name in "abc"]

    @property
    def model(self) -> str:
        return f"{self.folder / 'net.py'}:build"

    @property
    def data(self) -> Path:
        return self.folder / "test.npz"

    def command(
        self,
        output: str,
        *more: object,
        clients: Sequence[Path] | None = None,
        shards: str | Path | None = None,
    ) -> list[str]:
        """Return a run of one epoch per round, for the command line."""
        given = self.clients if clients is None else clients
        words = [
            *("retrain", *given, "--shards", shards or self.folder / "shards"),
            *("--model", self.model),
            *("-o", self.folder / output, "--epochs", 1, "--batch-size", 8, "--device", "cpu"),
        ]
        return [str(word) for word in (*words, *more)]

    @property
    def function(self) -> str:
        """Shards that `trouble` can be made with."""
        return f"{self.folder / 'net.py'}:load"

    def trouble(self, client: str, *steps: str) -> None:
        """Let a client's shard do something each time it is loaded ("" is nothing)."""
        (self.folder / f"trouble-{client}").write_text("\n".join(steps))


def make_scene(folder: Path, samples: int = 30) -> Scene:
    """Write everything that a run needs."""
    (folder / "net.py").write_text(NET)
    (folder / "shards").mkdir()
    for seed, name in enumerate([*"abc", "test"]):
        rng = np.random.default_rng(seed)
        y = rng.integers(0, CLASSES, samples)
        x = rng.normal(size=(samples, 4)).astype(np.float32) + y[:, None].astype(np.float32)
        place = folder if name == "test" else folder / "shards"
        np.savez(place / f"{name}.npz", x=x, y=y)
        torch.manual_seed(seed)
        model = nn.Sequential(
            *(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES))
        )
        if name != "test":
            torch.save(model.state_dict(), folder / f"{name}.pt")
    return Scene(folder)
