"""Read what `torch.save` wrote, always with torch's weights-only unpickler."""

import io
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import torch

from fedmerge.checkpoint._allowed import import_globals
from fedmerge.checkpoint._archive import Archive, checked_entries, open_archive, record_start
from fedmerge.checkpoint._contents import Contents, ReadOptions
from fedmerge.checkpoint._globals import Scan, scan_pickles
from fedmerge.checkpoint._refusals import RESAVE, refusal, unsafe
from fedmerge.errors import CheckpointError

_LEGACY_PICKLES = 5  # magic number, version, system, object, storage keys
_PICKLE_RECORD = re.compile(r"[^/]+/data\.pkl")


def read_zip(path: Path, options: ReadOptions) -> Contents:
    """Read a zip file of `torch.save`, its tensors memory-mapped."""
    archive = open_archive(path)
    record = _pickle_record(path, archive.entries)

    def scan() -> Scan:
        return scan_pickles(io.BytesIO(archive.read(record)), most=1)

    def load() -> object:
        if path.suffix != ".safetensors":
            return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
        # torch takes a path that ends so for such a file: hand it the open file.
        return _load_file(path)

    return Contents("torch zip", _load(path, options, scan, load), (path,), archive.size)


def read_legacy(path: Path, options: ReadOptions) -> Contents:
    """Read a file of `torch.save` before 1.6, its tensors held in memory."""
    tree = _load(path, options, lambda: _scan_file(path, _LEGACY_PICKLES), lambda: _load_file(path))
    return Contents("torch legacy", tree, (path,), path.stat().st_size)


def load_record(archive: Archive, record: str, options: ReadOptions) -> object:
    """Return what `torch.save` put into a record of another archive, held in memory."""
    content = archive.read(record)
    entries = checked_entries(archive.path, io.BytesIO(content), len(content))
    start = record_start(io.BytesIO(content), entries[_pickle_record(archive.path, entries)])

    def scan() -> Scan:
        return scan_pickles(io.BytesIO(content[start:]), most=1)

    def load() -> object:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)

    return _load(archive.path, options, scan, load)


def refuse_pickle(path: Path, options: ReadOptions) -> NoReturn:
    """Refuse a pickle that torch did not write, without ever loading it."""
    scan = _scan_file(path, most=path.stat().st_size)
    if scan.globals:
        raise unsafe(path, scan.globals)
    raise CheckpointError(f"{path}: a pickle but no torch checkpoint", RESAVE)


def _load(
    path: Path, options: ReadOptions, scan: Callable[[], Scan], load: Callable[[], object]
) -> object:
    admitted = import_globals(options.allow_globals)
    with torch.serialization.safe_globals(admitted), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return load()
        except Exception as error:  # hostile bytes make torch raise nearly anything
            raise refusal(path, error, scan(), options) from error


def _load_file(path: Path) -> object:
    with path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=False)


def _scan_file(path: Path, most: int) -> Scan:
    with path.open("rb") as file:
        return scan_pickles(file, most)


def _pickle_record(path: Path, names: Iterable[str]) -> str:
    records = [name for name in names if _PICKLE_RECORD.fullmatch(name)]
    if len(records) != 1:
        raise CheckpointError(f"{path}: a zip archive, but no torch checkpoint in it")
    return records[0]
