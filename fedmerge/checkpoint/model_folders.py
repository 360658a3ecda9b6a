"""Folders that hold a model, its config.json and what belongs to it, as libraries save them."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fedmerge.checkpoint.paths import INDEX, model_file
from fedmerge.decoding import decode_json, read_text
from fedmerge.errors import CheckpointError

CONFIG = "config.json"
TEMPLATES = "additional_chat_templates"  # the one folder within such a folder
_WEIGHTS = "model.safetensors"
_RENAMED = {"pytorch_model": "model"}  # as the library itself calls its safetensors

# What a model needs besides weights: how texts, images and sounds become inputs, and how it writes.
_COMPANIONS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "vocab-*"),
    *("merges.txt", "normalizer.json", "sentencepiece*", "spiece.model", "spm.model", "*.spm"),
    *("*.tiktoken", "tekken.json", "chat_template*", f"{TEMPLATES}/*"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("generation_config.json",),
)
_CODE = "*.py"  # goes along, unread, where the configuration asks for it by `auto_map`


@dataclass(frozen=True)
class ModelFolder:
    """A folder that holds a model, and what its config.json says."""

    path: Path
    config: Mapping[str, Any]

    @property
    def label(self) -> str:
        """How messages call the configuration."""
        return str(self.path / CONFIG)

    @property
    def weights_name(self) -> str:
        """What the folder's weights are called, as safetensors."""
        found = model_file(self.path)
        name = _WEIGHTS if found is None else found.name.removesuffix(INDEX)
        stem = name.removesuffix(".bin").removesuffix(".safetensors")
        return f"{_RENAMED.get(stem, stem)}.safetensors"

    @property
    def companions(self) -> dict[str, Path]:
        """The files that belong to the model besides weights, by their names in the folder."""
        patterns = (*_COMPANIONS, _CODE) if "auto_map" in self.config else _COMPANIONS
        names = {path.relative_to(self.path).as_posix(): path for path in _files_in(self.path)}
        return {
            name: path
            for name, path in sorted(names.items())
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        }


def _files_in(folder: Path) -> Iterator[Path]:
    """Yield a folder's files, and those of the folders in it.

    Links that lead elsewhere are left out, but for those of the Hub's cache, whose files are links
    to its blobs: what a stranger's folder points at on this machine is nothing to pass on.
    """
    homes = (folder.resolve(), folder.resolve().parent.parent / "blobs")
    for path in folder.iterdir():
        is_folder = path.is_dir() and not path.name.startswith(".")
        for inner in path.iterdir() if is_folder else (path,):
            if inner.is_file() and any(inner.resolve().is_relative_to(home) for home in homes):
                yield inner


def model_folder(path: Path | None) -> ModelFolder | None:
    """Return the folder that a client is, with its configuration; None if it is none."""
    if path is None or not path.is_dir() or not (path / CONFIG).is_file():
        return None

    def fail(reason: str) -> CheckpointError:
        return CheckpointError(f"{path / CONFIG}: cannot be read ({reason})")

    text = read_text(path / CONFIG, fail=fail)
    return ModelFolder(path, decode_json(text, dict[str, Any], fail=fail))


def different_companions(folders: Sequence[ModelFolder]) -> list[str]:
    """Return the names of files that are not the same in all folders."""
    first, *others = (folder.companions for folder in folders)
    every = {name: None for own in (first, *others) for name in own}
    return [name for name in every if not all(_are_same(first, own, name) for own in others)]


def _are_same(one: Mapping[str, Path], other: Mapping[str, Path], name: str) -> bool:
    if name not in one or name not in other:
        return False
    return filecmp.cmp(one[name], other[name], shallow=False)
