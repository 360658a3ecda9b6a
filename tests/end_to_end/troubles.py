"""A net, a task and a function of data that raise what they are told to, where they are told to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

CODE = """
import atexit, builtins, os, sys, threading, time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

PLACE, WHAT = "{place}", "{what}"


class Loud(KeyboardInterrupt):
    pass


class Odd(BaseException):
    pass


class Mute(Exception):
    def __str__(self):
        sys.exit(0)


def deep(number):
    return deep(number + 1)


def fail(what):
    if what == "sys.exit(0)":
        sys.exit(0)
    elif what == "RecursionError":
        deep(0)
    elif what == "RuntimeError of torch":
        torch.ones(2, 3) @ torch.ones(2, 3)
    elif what == "printed":
        print("a line of the user's code")
    elif what == "a handler that exits":
        atexit.register(lambda: os._exit(0))
        raise ValueError("no")
    elif what == "a thread that exits":
        threading.Thread(target=os._exit, args=[0]).start()
        time.sleep(0.2)
        raise ValueError("no")
    elif what == "another folder":
        os.chdir("/")
    elif what == "sleep":
        print("asleep", file=sys.stderr, flush=True)
        time.sleep(60)
    elif what:
        raise {{**vars(builtins), **globals()}}[what]("trouble at " + PLACE)


def at(place):
    if place == PLACE:
        fail(WHAT)


at("import")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        at("factory")

    def forward(self, x):
        at("forward")
        if self.training:
            at("training")
        out = self.last(self.first(x).relu())
        if PLACE == "backward" and out.requires_grad:
            out.register_hook(lambda gradient: at("backward"))
        return out

    def state_dict(self, *args, **kwargs):
        at("state_dict")
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args, **kwargs):
        at("load")
        return super()._load_from_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo):
        at("deepcopy")
        made = Net().to(next(self.parameters()).dtype)
        made.load_state_dict(self.state_dict())
        return made.train(self.training)

    def train(self, mode=True):
        at("mode")
        return super().train(mode)

    def named_parameters(self, *args, **kwargs):
        at("parameters")
        return super().named_parameters(*args, **kwargs)

    def __getattr__(self, name):
        if name == "first":
            at("getattr")
        return super().__getattr__(name)


class Task:
    def __init__(self):
        at("task")

    def loss(self, outputs, targets):
        at("loss")
        return functional.cross_entropy(outputs, targets)

    def metrics(self, outputs, targets):
        at("metrics")
        return {{"accuracy": float((outputs.argmax(1) == targets).float().mean())}}

    def class_counts(self, targets):
        at("counts")
        return np.bincount(targets, minlength=3)


def data(client):
    at("data")
    with np.load(Path(__file__).parent / "shards" / (client + ".npz")) as shard:
        return shard["x"], shard["y"]
"""


@dataclass(frozen=True)
class Trouble:
    """A folder with the code, two clients, their shards, and data to evaluate on."""

    folder: Path

    @property
    def clients(self) -> list[str]:
        return [str(self.folder / f"{name}.pt") for name in "ab"]

    @property
    def code(self) -> str:
        return str(self.folder / "net.py")

    def is_at(self, place: str, what: str) -> None:
        """Let the code raise something at a place."""
        (self.folder / "net.py").write_text(CODE.format(place=place, what=what))

    def command(self, name: str) -> list[str]:
        """Return a command that uses all of the code that it can."""
        model, task = ["--model", f"{self.code}:Net"], ["--task", f"{self.code}:Task"]
        data = ["--data", str(self.folder / "shards" / "evaluation.npz")]
        output = ["-o", str(self.folder / "out.pt")]
        shards = ["--shards", f"{self.code}:data", "--epochs", "1", "--batch-size", "8"]
        device = ["--device", "cpu"]
        return {
            "plan": ["plan", self.clients[0], *model],
            "match": ["match", *self.clients, *model, *output],
            "frontier": ["match", *self.clients, *model, *output, "--frontier"],
            "export": ["export", self.clients[0], *model, "-o", str(self.folder / "out.pt2")],
            "eval": ["eval", *self.clients, *model, *data, *task, *device],
            "compare": ["compare", *self.clients, *model, *data, *task, *device],
            "retrain": ["retrain", *self.clients, *model, *shards, *task, *output, *device],
        }[name]


def make_trouble(folder: Path) -> Trouble:
    """Write everything that the commands need."""
    (folder / "shards").mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b", "evaluation"):
        y = rng.integers(0, 3, 16)
        x = rng.normal(size=(16, 4)).astype(np.float32)
        np.savez(folder / "shards" / f"{name}.npz", x=x, y=y)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        parts = nn.ModuleDict({"first": nn.Linear(4, 6), "last": nn.Linear(6, 3)})
        state = {**parts.state_dict(), "steps": torch.zeros((), dtype=torch.long)}
        torch.save(state, folder / f"{name}.pt")
    trouble = Trouble(folder)
    trouble.is_at("", "")
    return trouble
