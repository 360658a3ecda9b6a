"""Write a folder whole or not at all: under a hidden name beside its place, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from fedmerge.checkpoint.outputs import (
    OUTPUT_SUFFIXES,
    PROGRAM,
    claim_names,
    give_up,
    hidden_name,
    naming_alone,
    sweep,
    sync_folder,
)
from fedmerge.checkpoint.paths import has_record, model_file
from fedmerge.errors import CheckpointError, UsageError

_NEW, _OLD = 0, 1  # hidden names: the folder that is written, and the one that it replaces


def is_folder_name(path: Path) -> bool:
    """Whether an output's name has no ending of a file that could be written.

    >>> [is_folder_name(Path(name)) for name in ("merged", "merged-v1.2", "merged.safetensors")]
    [True, True, False]
    """
    return path.suffix.lower() not in (*OUTPUT_SUFFIXES, PROGRAM)


def check_folder_output(path: Path, *, inputs: Sequence[Path], force: bool) -> None:
    """Raise `UsageError` if a folder cannot or must not be written."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{path}: its folder does not exist", f"mkdir -p {path.parent}")
    if not os.access(parent, os.W_OK):
        raise UsageError(f"{path}: its folder may not be written to")
    _refuse_inputs(path, inputs)
    _check_free(path, force=force)


def _refuse_inputs(path: Path, inputs: Sequence[Path]) -> None:
    """Refuse a place that is an input, is in one, or has one in it."""
    place = path.resolve()
    for source in inputs:
        own = source.resolve()
        if place == own or place in own.parents or (own.is_dir() and own in place.parents):
            raise UsageError(
                f"{path}: the output is also an input, or in one, or around one ({source})",
                "inputs are never overwritten; choose another name",
            )


def _check_free(path: Path, *, force: bool) -> None:
    """Refuse a name that is taken; with `force`, unless a merge or nothing is in that folder."""
    if not (path.exists() or path.is_symlink()):
        return
    if not force:
        raise UsageError(f"{path}: exists already", "overwrite it with `force`")
    if path.is_symlink() or not path.is_dir():
        raise UsageError(f"{path}: is no folder", "choose another name, or remove it")
    model = model_file(path)
    if any(path.iterdir()) and (model is None or not has_record(model)):
        raise UsageError(
            f"{path}: a folder that fedmerge did not write, which `force` does not replace",
            "choose another name, or remove it",
        )


def write_folder(path: Path, fill: Callable[[Path], None], *, force: bool) -> None:
    """Let `fill` write into a hidden folder, and give it its name when that is done.

    With `force`, a merged folder that has the name makes way for it.
    """
    parent = path.absolute().parent
    try:
        sweep(parent)
        claim = claim_names(parent)
    except OSError as error:
        raise _unwritten(path, error) from error
    new, old = hidden_name(claim, _NEW), hidden_name(claim, _OLD)
    try:
        new.mkdir()
        fill(new)
        _sync(new)
        with naming_alone(parent):
            _check_free(path, force=force)
            _give_name(new, path, old)
        sync_folder(parent)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        with suppress(OSError):
            give_up(claim)  # and what is left under its names


def _give_name(new: Path, path: Path, old: Path) -> None:
    """Rename a folder; if that fails, an old one gets its name back."""
    had_one = path.exists()
    if had_one:
        path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        if had_one and not path.exists():
            old.rename(path)
        raise
    if had_one:
        shutil.rmtree(old, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Put all files of a folder on disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be written ({error.strerror or error})", "nothing was changed"
    )
