"""The clients of `benchmarks.oneshot`: strangers' checkpoints, or nets that are trained for it."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedmerge
from benchmarks.oneshot_suites import (
    CHARACTERS,
    FAMILIES,
    PAPER_MODELS,
    RECIPES,
    UNLABELLED,
    Family,
    Measure,
    Recipe,
    measure_of,
)
from benchmarks.paper_data import Scene, Split, write_scene
from fedmerge.training import find_task, read_shard, train_model
from fedmerge.user_code import derived_seed, seeded
from fedmerge.values import Array, IntArray

DATA: Mapping[str, str] = {  # data set → its file in the folder of data
    "mnist": "mnist*.npz",
    "cifar10": "cifar10*.npz",
    "shakespeare": "*shakespeare*.txt",
}
TASKS: Mapping[str, str] = {"shakespeare": "language-model"}  # others are classification
TESTED = 60_000  # characters at the end of the text


@dataclass(frozen=True)
class Folders:
    """Where data and checkpoints are read, and where what is made of them is kept."""

    data: Path
    checkpoints: Path
    work: Path

    def source(self, dataset: str) -> Path:
        """Return a data set's file."""
        return _only(self.data, DATA[dataset])

    def strangers(self, family: str) -> list[Path]:
        """Return a family's checkpoints."""
        name = FAMILIES[family].files or family
        found = sorted(self.checkpoints.glob(f"{name}-*"))
        if len(found) < 2:
            raise SystemExit(f"{self.checkpoints}: no two checkpoints {name}-*")
        return found

    def digest(self, case: str) -> str:
        """Return the SHA-256 of all files that a case's results depend on."""
        made = case in RECIPES
        dataset = (RECIPES if made else FAMILIES)[case].dataset
        files = [self.source(dataset), *([] if made else self.strangers(case))]
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@dataclass(frozen=True)
class Setting:
    """Clients' files, the code that runs them, what they are tested on, and unlabelled inputs."""

    files: tuple[Path, ...]
    code: fedmerge.ModelCode
    x: Tensor  # (n, …)
    y: Tensor  # (n,), or (n, steps) of texts
    measure: Measure
    unlabelled: Path | None  # inputs that no client has


def setting(case: str, seed: int, folders: Folders) -> Setting:
    """Return what a case is made of, written to the working folder if it isn't there."""
    if case in FAMILIES:
        return _of_strangers(case, seed, folders)
    return _of_trained(RECIPES[case], seed, folders)


def _of_strangers(case: str, seed: int, folders: Folders) -> Setting:
    family = FAMILIES[case]
    reader = _images if family.preparation else _text
    probes, x, y = reader(family, folders.source(family.dataset), np.random.default_rng(seed))
    return Setting(
        files=tuple(folders.strangers(case)),
        code=_code(family),
        x=x,
        y=y,
        measure=measure_of(case),
        unlabelled=_kept(folders.work / f"{case}-unlabelled-{seed}.npz", probes),
    )


def _code(family: Family) -> fedmerge.ModelCode:
    return fedmerge.ModelCode(
        family.model,
        dict(family.arguments),
        input_shapes=(family.input_shape,),
        input_dtypes=() if family.preparation else ("long",),
    )


def _images(family: Family, source: Path, rng: np.random.Generator) -> tuple[Array, Tensor, Tensor]:
    """Return training images drawn at random, and all test images with their classes."""
    assert family.preparation is not None
    with np.load(source) as data:
        images = data["x_train"]
        rows = rng.choice(len(images), UNLABELLED, replace=False)
        probes = family.preparation(images[np.sort(rows)])
        x, y = family.preparation(data["x_test"]), data["y_test"].astype(np.int64)
    return probes, torch.from_numpy(x), torch.from_numpy(y)


def _text(_: Family, source: Path, rng: np.random.Generator) -> tuple[Array, Tensor, Tensor]:
    """Return sequences that begin anywhere before the end of a text, and those of its end."""
    text = source.read_text(encoding="utf-8")
    numbers = np.array([string.printable.index(character) for character in text], np.int64)
    border = len(numbers) - TESTED
    starts = rng.integers(0, border - CHARACTERS, UNLABELLED)
    probes = np.stack([numbers[start : start + CHARACTERS] for start in starts])
    x, y = (_cut(numbers[border - 1 + shift : len(numbers) - 1 + shift]) for shift in (0, 1))
    return probes, torch.from_numpy(x), torch.from_numpy(y)


def _cut(numbers: IntArray) -> IntArray:
    """Return whole sequences (n, CHARACTERS)."""
    whole = len(numbers) // CHARACTERS * CHARACTERS
    return numbers[:whole].reshape(-1, CHARACTERS)


def _of_trained(recipe: Recipe, seed: int, folders: Folders) -> Setting:
    """Train the clients of a recipe, each alone, unless that was done before."""
    folder = folders.work / hashlib.sha256(f"{recipe} {seed}".encode()).hexdigest()[:16]
    source = folders.source(recipe.dataset)
    scene = _scene(source, folder / recipe.on, _split(recipe, seed, recipe.on))
    with np.load(scene.evaluation) as held_out:
        x, y = held_out["x"], held_out["y"].astype(np.int64)
    if recipe.on == "validation" and not recipe.is_language_model:
        rows = _unlabelled_rows(len(x), seed)
        x, y = np.delete(x, rows, axis=0), np.delete(y, rows)
    code = _recipe_code(recipe, scene, x)
    return Setting(
        files=tuple(_trained(n, p, recipe, code, seed) for n, p in scene.clients.items()),
        code=code,
        x=torch.from_numpy(x),
        y=torch.from_numpy(y),
        measure="accuracy",
        unlabelled=None if recipe.is_language_model else _unseen(source, folder, recipe, seed),
    )


def _unseen(source: Path, folder: Path, recipe: Recipe, seed: int) -> Path:
    """Write training images that no client has; a validation would be made on them."""
    others = _scene(source, folder / "validation", _split(recipe, seed, "validation")).evaluation
    with np.load(others) as data:
        images = data["x"]
    return _kept(folder / "unlabelled.npz", images[_unlabelled_rows(len(images), seed)])


def _unlabelled_rows(count: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).permutation(count)[:UNLABELLED]


def _split(recipe: Recipe, seed: int, on: str) -> Split:
    return Split(recipe.dataset, recipe.clients, recipe.samples, seed, on, recipe.dirichlet)


def _scene(source: Path, folder: Path, split: Split) -> Scene:
    """Deal out data, or find them dealt out; an unfinished scene is none."""
    done = folder / "evaluation.npz"
    if done.exists():
        tokens = len(set(source.read_text(encoding="utf-8"))) if source.suffix == ".txt" else 0
        return Scene(folder / "shards", done, tokens)
    return write_scene(source, folder, split)


def _recipe_code(recipe: Recipe, scene: Scene, x: Array) -> fedmerge.ModelCode:
    arguments: dict[str, Any] = {}
    if recipe.factory.startswith(PAPER_MODELS):
        arguments["start"] = recipe.start
    if recipe.is_language_model:
        arguments |= {"tokens": scene.tokens, "hidden": recipe.hidden}
    return fedmerge.ModelCode(
        recipe.factory,
        arguments,
        input_shapes=((2, *x.shape[1:]),),
        input_dtypes=("long",) if recipe.is_language_model else (),
    )


def _trained(name: str, shard: Path, recipe: Recipe, code: fedmerge.ModelCode, seed: int) -> Path:
    """Return the file of one client, trained alone from its own initial weights, or from all's."""
    path = shard.parents[1] / f"{name}.pt"
    if path.exists():
        return path
    settings = fedmerge.TrainSettings(
        learning_rate=recipe.learning_rate,
        batch_size=recipe.batch_size,
        epochs=recipe.epochs,
        clip_norm=recipe.clip_norm,
        seed=derived_seed(seed, "training", name, 1),
    )
    with seeded(derived_seed(seed, "init", "client", "all" if recipe.is_shared else name)):
        model = code.build()
    task = find_task(TASKS.get(recipe.dataset, "classification"))
    train_model(model, read_shard(shard, client=name), task, settings)
    _written(path, lambda fresh: torch.save(model.state_dict(), fresh))
    return path


def _kept(path: Path, inputs: Array) -> Path:
    """Write inputs without labels as `--probe-data` takes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, x=inputs)
    return path


def _written(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_suffix(".tmp")
    write(fresh)
    fresh.replace(path)


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise SystemExit(f"{folder}: there is no {pattern}")
    return found[0]
