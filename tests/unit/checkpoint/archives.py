"""Exported programs and TorchScript archives, and ways to tamper with their records."""

import json
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[bytes], bytes | None]  # a record's new content, None to leave it out


class Net(nn.Module):
    """Tied weights, views, buffers of all kinds, constants and an unused layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6)
        self.third.weight = self.second.weight
        self.register_buffer("turned", torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("part", torch.randn(8)[2:5])
        self.register_buffer("temporary", torch.ones(6), persistent=False)
        self.scale = torch.full((6,), 2.0)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu() * self.scale + self.get_buffer("temporary")
        out: Tensor = self.third(self.second(hidden)) + self.get_buffer("turned").sum()
        return out


def save_exported(module: nn.Module, path: Path, *inputs: Tensor) -> Path:
    """Write an exported program."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module.eval(), inputs), path)
    return path


def save_scripted(module: nn.Module, path: Path, *inputs: Tensor) -> Path:
    """Write a TorchScript archive, traced where inputs are given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        jit: Any = torch.jit
        scripted = jit.trace(module, inputs) if inputs else jit.script(module)
        jit.save(scripted, str(path))
    return path


def loaded_by_torch(path: Path) -> Mapping[str, Tensor]:
    """Return what torch's own loaders make of an archive."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.suffix == ".pt2":
            exported: Mapping[str, Tensor] = torch.export.load(path).state_dict
            return exported
        state: Mapping[str, Tensor] = torch.jit.load(str(path)).state_dict()  # type: ignore[no-untyped-call]
        return state


def changed(path: Path, target: Path, changes: Mapping[str, Change]) -> Path:
    """Write a copy of an archive with some records changed, by the ends of their names."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
        for entry in source.infolist():
            content: bytes | None = source.read(entry)
            for end, change in changes.items():
                if entry.filename.endswith(end):
                    assert content is not None
                    content = change(content)
            if content is not None:
                copy.writestr(zipfile.ZipInfo(entry.filename), content)
    return target


def in_json(change: Callable[[Any], Any]) -> Change:
    """Return a change of a record that is JSON."""

    def apply(content: bytes) -> bytes:
        value = json.loads(content)
        change(value)
        return json.dumps(value).encode()

    return apply
