"""Outputs that are folders: whole or absent, and never in the place of anybody else's files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedmerge.checkpoint.model_folders import TEMPLATES
from fedmerge.checkpoint.outputs import (
    claim_names,
    give_up,
    hidden_name,
    naming_alone,
    sweep,
    sync_folder,
)
from fedmerge.checkpoint.paths import check_targets, has_record
from fedmerge.errors import CheckpointError, UsageError

_PARKED = ".fedmerge-{}.old"  # an older folder while the new one takes its place; never swept


def check_folder(path: str | Path, *, inputs: Sequence[str | Path], force: bool) -> None:
    """Raise `UsageError` if a folder cannot or must not be written.

    An empty folder may be there already; with `force`, also one that fedmerge wrote.
    """
    path = _plain(path)
    if path.is_dir() and not path.is_symlink():
        _check_inputs(path, inputs)
        if not os.access(path.parent, os.W_OK):
            raise UsageError(f"{path}: its folder may not be written to")
        _check_replaced(path, force=force)
    else:
        check_targets([path], inputs=inputs, force=False)


@contextmanager
def new_folder(path: str | Path, *, force: bool) -> Iterator[Path]:
    """Yield a hidden folder to write files to; when all is well, it is put on disk and named.

    Nothing is left of it otherwise. Without `force` no folder with anything in it is replaced,
    also none that was made meanwhile; with it, one that fedmerge wrote.
    """
    path = _plain(path)
    try:
        with ExitStack() as stack:
            sweep(path.parent)
            claim = claim_names(path.parent)
            stack.callback(give_up, claim)
            hidden = hidden_name(claim, 0)
            hidden.mkdir()
            yield hidden
            _put_on_disk(hidden)
            with naming_alone(path.parent):
                _give_name(hidden, path, force=force)
            sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error})", "nothing was changed"
        ) from error


def _plain(path: str | Path) -> Path:
    """Return a path whose last part is the folder's own name, also of '..' or '.'."""
    path = Path(path)
    return path if path.name not in ("", "..") else path.resolve()


def _check_inputs(folder: Path, inputs: Sequence[str | Path]) -> None:
    for source in map(Path, inputs):
        if source.exists() and source.resolve().is_relative_to(folder.resolve()):
            raise UsageError(
                f"{folder}: the output is also an input, or the folder of one ({source})",
                "inputs are never overwritten; choose another name",
            )


def _check_replaced(folder: Path, *, force: bool) -> None:
    """Refuse to replace a folder that is not empty, unless it is ours and that is wanted."""
    entries = list(folder.iterdir())
    if not entries:
        return
    if not force:
        raise UsageError(f"{folder}: exists already", "overwrite it with `force`")
    if not _is_ours(entries):
        raise UsageError(
            f"{folder}: holds other things than a merged model, which are never removed",
            "choose another name, or empty the folder",
        )


def _is_ours(entries: Sequence[Path]) -> bool:
    """Return whether all entries are a model's, and one of them is merged, with its record."""
    files = [path for path in entries if path.is_file()]
    folders = {path.name for path in entries} - {path.name for path in files}
    return folders <= {TEMPLATES} and any(map(has_record, files))


def _put_on_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _give_name(hidden: Path, path: Path, *, force: bool) -> None:
    parked = path.with_name(_PARKED.format(path.name))
    _tidy(parked, path)
    if path.is_dir() and not path.is_symlink():
        _check_replaced(path, force=force)
        if any(path.iterdir()):
            path.rename(parked)
        else:
            path.rmdir()
    elif path.exists() or path.is_symlink():
        raise UsageError(f"{path}: exists already, and is no folder", "choose another name")
    try:
        hidden.rename(path)  # which never replaces a folder with anything in it
    except BaseException:
        if parked.exists() and not path.exists():
            parked.rename(path)
        raise
    shutil.rmtree(parked, ignore_errors=True)


def _tidy(parked: Path, path: Path) -> None:
    """Finish what a run that was killed while it gave its name began."""
    if not parked.exists():
        return
    with suppress(OSError):
        if path.exists():
            shutil.rmtree(parked)
        else:
            parked.rename(path)
