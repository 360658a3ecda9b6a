"""Files that are right, which mutants are made of, and what is done with a mutant of each."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fuzz import mutations
from benchmarks.fuzz.mutations import Mutate
from benchmarks.fuzz.promises import CANARY
from fedmerge.checkpoint import open_checkpoint
from fedmerge.cli.exit_codes import run
from fedmerge.training import open_columns
from tests.adapters import adapter
from tests.end_to_end.retraining import make_scene
from tests.unit.checkpoint.archives import Net, save_exported, save_scripted
from tests.unit.checkpoint.samples import save_legacy, save_safetensors, save_sharded, save_zip


@dataclass(frozen=True)
class Seed:
    """A file of a folder that is to be damaged, how, and what reads it then."""

    name: str
    folder: Path
    file: str
    mutations: Sequence[Mutate]
    read: Callable[[Path], object]  # of the damaged file
    is_checkpoint: bool = True


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (CANARY,)


def make_seeds(folder: Path) -> list[Seed]:
    """Write all seeds, each into a folder of its own."""
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
        return [*_checkpoints(folder), *_others(folder)]


def read_all(path: Path) -> None:
    """Open a checkpoint and read every tensor of it."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensors:
        checkpoint.read_torch(name)


def _state() -> dict[str, torch.Tensor]:
    return {
        "fc1.weight": torch.randn(5, 4),
        "fc1.bias": torch.randn(5),
        "fc2.weight": torch.randn(3, 5).half(),
        "n": torch.tensor(3),
    }


def _checkpoints(folder: Path) -> list[Seed]:
    def made(name: str) -> Path:
        (folder / name).mkdir(parents=True)
        return folder / name

    net = Net().eval()
    nested = {"epoch": 3, "state_dict": _state(), "optimizer": {"state": {}, "param_groups": []}}
    records = [mutations.zip_records, mutations.zip_records, mutations.zip_directory]
    zipped, pickled = [mutations.any_bytes, *records], [mutations.legacy_pickles]
    save_zip(nested, made("zip") / "a.pt")
    save_legacy(nested, made("legacy") / "a.pt")
    hyper = {"width": 8, "rates": [0.1, None], "names": {"a": "b"}}
    lightning = {"pytorch-lightning_version": "2.5.0", "hyper_parameters": hyper}
    save_zip(nested | lightning, made("lightning") / "a.ckpt")
    save_zip({"state": _state(), "extra": Payload()}, made("hostile") / "a.pt")
    save_zip({"model": net, "epoch": 3}, made("module") / "a.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it keeps no text of the classes' code
        save_legacy(net, made("old module") / "a.pt")
    (made("pickle") / "a.pt").write_bytes(pickle.dumps({"a": [Payload(), 1]}, 2))
    save_safetensors(_state(), made("safetensors") / "a.safetensors")
    save_sharded(_state(), made("index"), save_safetensors)
    save_exported(net, made("exported") / "a.pt2", torch.randn(2, 4))
    save_scripted(net, made("scripted") / "a.pt", torch.randn(2, 4))
    index = "model.safetensors.index.json"
    both = [mutations.any_bytes, mutations.safetensors_header]
    return [
        Seed("torch zip", folder / "zip", "a.pt", zipped, read_all),
        Seed("hostile zip", folder / "hostile", "a.pt", zipped[1:], read_all),
        Seed("Lightning", folder / "lightning", "a.ckpt", zipped[1:], read_all),
        Seed("torch legacy", folder / "legacy", "a.pt", [*pickled, zipped[0]], read_all),
        Seed("pickled module", folder / "module", "a.pt", zipped[1:], read_all),
        Seed("legacy module", folder / "old module", "a.pt", pickled, read_all),
        Seed("pickle", folder / "pickle", "a.pt", [mutations.pickle_steps], read_all),
        Seed("safetensors", folder / "safetensors", "a.safetensors", both, read_all),
        Seed("shard index", folder / "index", index, [mutations.json_values], read_all),
        Seed("exported program", folder / "exported", "a.pt2", zipped, _inspected),
        Seed("TorchScript", folder / "scripted", "a.pt", zipped, read_all),
    ]


def _others(folder: Path) -> list[Seed]:
    place = folder / "merge"
    place.mkdir()
    for name in ("a", "b"):
        torch.save({k: v.float() for k, v in list(_state().items())[:3]}, place / f"{name}.pt")
    clients = ["a.pt", "b.pt"]
    _done(place, "match", *clients, "-o", "g.pt")
    _done(place, "match", *clients, "-o", "s.safetensors")
    _done(place, "plan", *clients, "-o", "plan.json")
    (place / "counts.json").write_text(json.dumps({"a": [1, 2, 3], "b": [3, 2, 1]}))
    (place / "config.json").write_text(json.dumps({"max-growth": 1, "seed": 3, "keep": ["fc2.*"]}))
    (place / "config.yaml").write_text("max_growth: 1\nseed: 3\nkeep: ['fc2.*']\n")
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    np.savez(place / "plain.npz", x=x, y=np.arange(40))
    np.savez_compressed(place / "small.npz", x=x, y=np.arange(40))
    match = ("match", *clients, "-o", "new.pt", "--force")
    text = [mutations.any_bytes, mutations.yaml_text]
    values = [mutations.any_bytes, mutations.json_values]
    npz = [mutations.any_bytes, mutations.zip_records, mutations.zip_directory]
    header = [mutations.safetensors_header]

    def seed(name: str, file: str, ways: Sequence[Mutate], *command: str) -> Seed:
        def read(path: Path) -> object:
            return _run(path.parent, *command)

        return Seed(name, place, file, ways, read, is_checkpoint=False)

    return [
        Seed("npz", place, "plain.npz", npz, _columns, is_checkpoint=False),
        Seed("compressed npz", place, "small.npz", npz, _columns, is_checkpoint=False),
        seed("record beside", "g.pt.json", values, "verify", "g.pt", *clients),
        seed("record inside", "s.safetensors", header, "verify", "s.safetensors", *clients),
        seed("record replayed", "g.pt.json", values, *match, "--config", "g.pt.json"),
        seed("plan", "plan.json", values, *match, "--plan", "plan.json"),
        seed("class counts", "counts.json", values, *match, "--class-counts", "counts.json"),
        seed("config, JSON", "config.json", values, *match, "--config", "config.json"),
        seed("config, YAML", "config.yaml", text, *match, "--config", "config.yaml"),
        *_adapters(folder / "adapters"),
        *_work_dirs(folder / "rounds"),
    ]


def _adapters(folder: Path) -> list[Seed]:
    """Return the files of LoRA adapters, and of what was merged of them."""
    runs = [str(adapter(folder / name, seed, rank=2)) for seed, name in enumerate("ab")]
    _done(folder, "match", *runs, "-o", "merged", "--max-growth", "1")
    match = ("match", *runs, "-o", "new", "--force")
    verify = ("verify", "merged", *runs)
    values = [mutations.any_bytes, mutations.json_values]
    header = [mutations.any_bytes, mutations.safetensors_header]

    def seed(name: str, file: str, ways: Sequence[Mutate], *command: str) -> Seed:
        return Seed(name, folder, file, ways, lambda _: _run(folder, *command), is_checkpoint=False)

    return [
        seed("adapter's configuration", "b/adapter_config.json", values, *match),
        seed("adapter's factors", "b/adapter_model.safetensors", header, *match),
        seed("merged adapter", "merged/adapter_model.safetensors", header, *verify),
        seed("merged configuration", "merged/adapter_config.json", values, *verify),
    ]


def _work_dirs(folder: Path) -> list[Seed]:
    """Return the files of a run after its first rounds."""
    folder.mkdir()
    scene = make_scene(folder)
    command = scene.command("g.pt", "--passes", 1, "--work-dir", folder / "work")
    assert run(command) == 0
    again = [*command, "--resume", "--force", "--quiet"]
    kept = [path for path in sorted((folder / "work").iterdir()) if path.is_file()]
    shutil.copytree(folder / "work", folder / "kept")
    expected = (folder / "g.pt").read_bytes()

    def read(path: Path) -> object:
        code = run(again)
        if code == 0 and (folder / "g.pt").read_bytes() != expected:
            raise AssertionError("a damaged work dir was resumed to another result")
        return _Exit(code)

    return [
        Seed(f"work dir, {path.name}", folder / "work", path.name, _of(path), read, False)
        for path in kept
    ]


def _of(path: Path) -> list[Mutate]:
    is_json = path.suffix == ".json"
    shaped = mutations.json_values if is_json else mutations.safetensors_header
    return [mutations.any_bytes, shaped]


@dataclass(frozen=True)
class _Exit:
    """How a command ended."""

    code: int


def _inspected(path: Path) -> object:
    read_all(path)
    return _run(path.parent, "inspect", path.name)


def _columns(path: Path) -> None:
    for read in open_columns(path).values():
        np.asarray(read()[:])


def _run(folder: Path, *arguments: str) -> _Exit:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return _Exit(run(list(arguments)))
    finally:
        os.chdir(before)


def _done(folder: Path, *arguments: str) -> None:
    assert _run(folder, *arguments).code == 0, arguments
