"""A merge as a folder that the library of its clients loads: weights, config.json, and the rest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedmerge.architecture.folder_config import FolderConfig
from fedmerge.architecture.from_library import ConfiguredModel, config_shapes, with_widths
from fedmerge.architecture.tensor_names import model_names
from fedmerge.checkpoint import (
    CONFIG,
    ModelFolder,
    different_companions,
    model_folder,
    new_folder,
    parse_size,
)
from fedmerge.errors import ArchitectureError
from fedmerge.merging.result import Merge
from fedmerge.report.model_card import CARD, library_of, model_card
from fedmerge.values.wording import MOST_LISTED, Progress, listed, silent

LARGEST_FILE = 5_000_000_000  # bytes of weights: more become shards, as the libraries do it
_DTYPE_FIELDS = ("dtype", "torch_dtype")


def write_merged_folder(
    merge: Merge,
    path: Path,
    folder: ModelFolder,
    *,
    force: bool,
    shard_size: str | int | None = None,
    progress: Progress = silent,
) -> tuple[Path, Merge]:
    """Write a merge as a folder like its first client's; return its weights and the merge.

    The merge that is returned also warns of files that differ between the clients' folders.
    """
    config = merged_config(merge, folder)
    merge = replace(merge, warnings=(*merge.warnings, *_different_files(merge)))
    most = parse_size(shard_size) or LARGEST_FILE
    shard = most if _stored_bytes(merge) > most else None
    with new_folder(path, force=force) as place:
        weights = merge.write(place / folder.weights_name, shard_size=shard, progress=progress)
        for name, source in folder.companions.items():
            target = place / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(source, target)
        (place / CONFIG).write_text(_readable(config), encoding="utf-8")
        card = model_card(merge, library_of(folder.config), path.name, weights.name)
        (place / CARD).write_text(card, encoding="utf-8")
    return path / weights.name, merge


def _stored_bytes(merge: Merge) -> int:
    """Return how many bytes the tensors of a merge fill in files."""
    return sum(info.size * getattr(torch, info.dtype).itemsize for info in merge.tensors.values())


def merged_config(merge: Merge, folder: ModelFolder) -> dict[str, Any]:
    """Return the first client's configuration with the merge's widths and precision."""
    held = merge.session.config or FolderConfig(None)
    grown = [
        (said, merge.widths[said.groups[0]])
        for said in held.said
        if merge.widths[said.groups[0]] != said.width
    ]
    config = with_widths(folder.config, grown)
    _check_says(merge, held, config)
    if merge.options.dtype is not None:
        name = next((name for name in _DTYPE_FIELDS if name in config), _DTYPE_FIELDS[0])
        config[name] = merge.options.dtype
    return config


def _check_says(merge: Merge, held: FolderConfig, config: Mapping[str, Any]) -> None:
    """Refuse a configuration by which the library would build a model of other shapes."""
    first = merge.session.clients[0]
    if all(merge.tensors[name].shape == info.shape for name, info in first.tensors.items()):
        return
    is_said = False
    model = None if held.code is None else held.code.template
    if isinstance(model, ConfiguredModel):
        names = model_names(first, model)
        built = config_shapes(model, config, first.name) or {}
        is_said = all(merge.tensors[own].shape == built.get(name) for own, name in names.items())
    if not is_said:
        raise ArchitectureError(
            f"{CONFIG} can't say the widths of the merge, which could not be loaded",
            "keep the widths with `max_growth=1`, or let the output end in .safetensors",
        )


def _different_files(merge: Merge) -> list[str]:
    folders = [model_folder(client.path) for client in merge.clients]
    known = [folder for folder in folders if folder is not None]
    names = different_companions(known)
    if not names:
        return []
    shown = listed(names, MOST_LISTED)
    return [f"the clients' folders differ in {shown}; the first one's is taken"]


def _readable(config: Mapping[str, Any]) -> str:
    """Return a configuration as the libraries write it."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
