"""Read what `torch.save` wrote, always with torch's weights-only unpickler."""

import io
import re
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch

from fedmerge.checkpoint._allowed import import_globals
from fedmerge.checkpoint._contents import Contents, ReadOptions
from fedmerge.checkpoint._failures import damaged, listed, reason_of
from fedmerge.checkpoint._globals import UNRESOLVED, Scan, is_plumbing, scan_pickles
from fedmerge.errors import CheckpointError, UnsafeCheckpointError

_LEGACY_PICKLES = 5  # magic number, version, system, object, storage keys
_NEWEST_SAFE_PROTOCOL = 3  # torch's weights-only unpickler knows the opcodes up to here
_RESAVE = 'save only the tensors: `torch.save(model.state_dict(), "model.pt")`'
_PICKLE_RECORD = re.compile(r"[^/]+/data\.pkl")
_NEEDED_CLASS = re.compile(r"allowlisted via `add_safe_globals`,? but got <class '(\w+\.[\w.]+)'>")
_REFUSED_GLOBAL = re.compile(r"GLOBAL (\S+) (?:was not an allowed global|whose module)")
_DANGEROUS = {  # modules whose code nobody needs to load weights
    *("os", "posix", "nt", "sys", "subprocess", "shutil", "socket", "importlib", "runpy"),
    *("builtins", "pty", "webbrowser", "code", "ctypes", "pickle", UNRESOLVED),
}
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, struct.error, EOFError, OSError),
    *(ValueError, NotImplementedError, OverflowError, RuntimeError),
)
_OTHER_ARCHIVES: tuple[tuple[str, str, str], ...] = (  # part of a record's name, what, hint
    (
        "/constants.pkl",
        "a TorchScript archive, which fedmerge does not read yet",
        "where you trust it: `torch.save(torch.jit.load(path).state_dict(), 'model.pt')`",
    ),
    (
        "/archive_format",
        "an exported program (.pt2), which fedmerge does not read yet",
        "where you trust it: `torch.save(torch.export.load(path).state_dict, 'model.pt')`",
    ),
    (
        "serialized_exported_program.json",
        "an exported program (.pt2), which fedmerge does not read yet",
        "where you trust it: `torch.save(torch.export.load(path).state_dict, 'model.pt')`",
    ),
    (".npy", "a numpy archive (.npz), not a checkpoint", _RESAVE),
)


def read_zip(path: Path, options: ReadOptions) -> Contents:
    """Read a zip file of `torch.save`, its tensors memory-mapped."""
    record = _check_archive(path)
    tree = _load(path, options, lambda: _scan_record(path, record), mapped=True)
    return Contents("torch zip", tree, (path,), path.stat().st_size)


def read_legacy(path: Path, options: ReadOptions) -> Contents:
    """Read a file of `torch.save` before 1.6, its tensors held in memory."""
    tree = _load(path, options, lambda: _scan_file(path, _LEGACY_PICKLES), mapped=False)
    return Contents("torch legacy", tree, (path,), path.stat().st_size)


def refuse_pickle(path: Path, options: ReadOptions) -> NoReturn:
    """Refuse a pickle that torch did not write, without ever loading it."""
    scan = _scan_file(path, most=path.stat().st_size)
    if scan.globals:
        raise _unsafe(path, scan.globals)
    raise CheckpointError(f"{path}: a pickle but no torch checkpoint", _RESAVE)


def _load(path: Path, options: ReadOptions, scan: Callable[[], Scan], *, mapped: bool) -> object:
    admitted = import_globals(options.allow_globals)
    # torch takes a path that ends in .safetensors for such a file: hand it the open file then.
    by_path = mapped and path.suffix != ".safetensors"
    with torch.serialization.safe_globals(admitted), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if by_path:
                return torch.load(str(path), map_location="cpu", weights_only=True, mmap=True)
            with path.open("rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
        except Exception as error:  # hostile bytes make torch raise nearly anything
            raise _refusal(path, error, scan(), options) from error


def _scan_record(path: Path, record: zipfile.ZipInfo) -> Scan:
    """Scan a stored record whatever its checksum says, for torch may be told to write none."""
    with path.open("rb") as file:
        file.seek(record.header_offset + 26)  # in the record's own header: lengths of name, extra
        lengths = file.read(4)
        file.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), 1)
        return scan_pickles(io.BytesIO(file.read(record.file_size)), most=1)


def _scan_file(path: Path, most: int) -> Scan:
    with path.open("rb") as file:
        return scan_pickles(file, most)


def _check_archive(path: Path) -> zipfile.ZipInfo:
    """Return the pickle record of a zip whose sizes can be trusted."""
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except _ZIP_ERRORS as error:
        raise damaged(path, reason_of(error)) from error
    for part, what, hint in _OTHER_ARCHIVES:
        if any(part in entry.filename for entry in entries):
            raise CheckpointError(f"{path}: {what}", hint)
    records = [entry for entry in entries if _PICKLE_RECORD.fullmatch(entry.filename)]
    if len(records) != 1:
        raise CheckpointError(f"{path}: a zip archive, but no torch checkpoint in it")
    _check_sizes(path, entries, size)
    return records[0]


def _check_sizes(path: Path, entries: Sequence[zipfile.ZipInfo], size: int) -> None:
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(
                f"{path}: its record '{entry.filename}' is compressed or encrypted, "
                "which torch never writes",
                _RESAVE,
            )
    if sum(max(entry.file_size, entry.compress_size) for entry in entries) > size:
        raise damaged(path, "its records claim more bytes than the file has")


def _refusal(path: Path, error: Exception, scan: Scan, options: ReadOptions) -> CheckpointError:
    message = str(error)
    asked = [*scan.globals, *_NEEDED_CLASS.findall(message)]
    refused = [g for g in asked if not is_plumbing(g) and g not in options.allow_globals]
    # A name that only torch saw is one that the end of the file cut off.
    if refused := refused or [g for g in _REFUSED_GLOBAL.findall(message) if g in asked]:
        return _unsafe(path, refused)
    if scan.protocol > _NEWEST_SAFE_PROTOCOL:
        return CheckpointError(
            f"{path}: saved with pickle protocol {scan.protocol}, "
            "which torch's weights-only unpickler does not read",
            "save it again without `pickle_protocol`",
        )
    # What torch says before this mark is advice to load the file unsafely.
    _, _, reason = message.rpartition("WeightsUnpickler error:")
    return damaged(path, reason_of(error, reason))


def _unsafe(path: Path, asked: Sequence[str]) -> UnsafeCheckpointError:
    names = listed(list(asked), most=10)
    if any(name.startswith("torch.nn.modules.") for name in asked):
        return UnsafeCheckpointError(
            f"{path}: a pickled module, not a state dict; it asks for the code of {names}",
            f"load it where you trust it and {_RESAVE}",
        )
    if any(name.split(".")[0] in _DANGEROUS for name in asked):
        hint = "do not load this file: such code can do anything to this machine"
    else:
        admit = " ".join(f"--allow-global {name}" for name in asked[:5])
        hint = f"where you trust it, {_RESAVE}; or admit what you know to be harmless: {admit}"
    return UnsafeCheckpointError(
        f"{path}: refused, it asks for code that nobody allowed: {names}", hint
    )
