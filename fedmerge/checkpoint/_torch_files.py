"""Read what `torch.save` wrote, without torch: tensors are described, and read when asked for."""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch

from fedmerge.checkpoint._archive import Archive, open_archive
from fedmerge.checkpoint._contents import Contents, ReadOptions
from fedmerge.checkpoint._failures import damaged
from fedmerge.checkpoint._files import Region, SourceFile
from fedmerge.checkpoint._machine import Known, Trust
from fedmerge.checkpoint._pickle import NOTHING, PickleError, Unpickled, read_pickle
from fedmerge.checkpoint._rebuild import Storage, tensor_names
from fedmerge.checkpoint._refusals import RESAVE, admitting, understood, unsafe
from fedmerge.errors import CheckpointError

TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of torch's legacy files

_MOST_PICKLES = 100  # of a file that is none of torch's; nobody puts as many into one
_PICKLE_RECORD = re.compile(r"[^/]+/data\.pkl")
_Claim: TypeAlias = tuple[torch.dtype, int]  # what tensors say of a storage: its numbers and count
_COUNT = 8  # bytes that say how many numbers of a storage follow, in a legacy file


def read_zip(file: SourceFile, options: ReadOptions) -> Contents:
    """Read a zip file of `torch.save`."""
    return Contents("torch zip", zip_tree(file.whole, options), (file,))


def zip_tree(region: Region, options: ReadOptions) -> object:
    """Return what `torch.save` put into a zip file, or into a record of another one."""
    archive = open_archive(region)
    record = _pickle_record(archive.path, archive.entries)
    root = record.removesuffix("data.pkl")
    check_byte_order(archive, root)
    storages = ArchiveStorages(archive, f"{root}data/")
    trust = Trust(tensor_names(region.file.budget), admitting(options.allow_globals), storages.load)
    content = archive.content(record)
    content.check()
    return understood(archive.path, lambda: read_pickle(content, trust)).value


def check_byte_order(archive: Archive, root: str) -> None:
    """Refuse numbers that this machine would read from the wrong end."""
    if f"{root}byteorder" not in archive.entries:
        return
    order = archive.read(f"{root}byteorder")[:16].decode("ascii", "replace")
    if order != sys.byteorder:
        raise CheckpointError(
            f"{archive.path}: numbers are {order}-endian, this machine is {sys.byteorder}-endian",
            "save the model's state dict with torch.save on the machine that made it",
        )


class ArchiveStorages:
    """The storages that a pickle refers to, each a record of its archive."""

    def __init__(self, archive: Archive, folder: str) -> None:
        self._archive = archive
        self._folder = folder

    def load(self, reference: Any) -> Storage:
        """Return the storage that a reference means."""
        dtype, key, count = storage_reference(reference)
        record = self._folder + key
        if record not in self._archive.entries:
            raise ValueError(f"its record '{record}' is missing")
        held = self._archive.entries[record].size
        if count * dtype.itemsize > held:
            raise ValueError(f"its record '{record}' has {held:,} bytes, too few for {count:,}")
        owner = (self._archive.region.file, self._archive.region.start, record)
        return Storage(dtype, count, owner, lambda: self._archive.content(record))


def storage_reference(reference: Any) -> tuple[torch.dtype, str, int]:
    """Return dtype, key and size from ("storage", kind, key, device, count, …)."""
    mark, kind, key, _, count = reference[:5]
    is_kind = isinstance(kind, Known) and isinstance(kind.value, torch.dtype)
    if mark != "storage" or not is_kind or not isinstance(key, str) or type(count) is not int:
        raise ValueError("a reference to something that is no storage")
    if count < 0:
        raise ValueError(f"a storage of {count:,} numbers")
    return kind.value, key, count


def read_legacy(file: SourceFile, options: ReadOptions) -> Contents:
    """Read a file of `torch.save` before 1.6: pickles, then the numbers of all storages."""
    region, places = file.whole, dict[str, Region]()
    claims: dict[str, _Claim] = {}

    def load(reference: Any) -> Storage:
        dtype, key, count = storage_reference(reference)
        if claims.setdefault(key, (dtype, count)) != (dtype, count):
            raise ValueError(f"the storage '{key}' has two types or sizes")
        view = reference[5] if len(reference) > 5 else None
        size, own, locate = _legacy_view(view, key, count, dtype.itemsize, places)
        return Storage(dtype, size, (file, own), locate)

    plain = Trust(is_admitted=admitting(options.allow_globals))
    trust = Trust(tensor_names(file.budget), plain.is_admitted, load)
    found = NOTHING
    for _ in range(3):  # magic number, version, system
        found = _next_pickle(region, plain, found)
    system = found.value
    tree = _next_pickle(region, trust, found)
    keys = _next_pickle(region, plain, tree)
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise CheckpointError(f"{file.path}: numbers are big-endian", RESAVE)
    places |= _storage_places(region, keys, claims)
    return Contents("torch legacy", tree.value, (file,))


def _next_pickle(region: Region, trust: Trust, last: Unpickled) -> Unpickled:
    return understood(region.file.path, lambda: read_pickle(region, trust, after=last))


def _legacy_view(
    view: object, key: str, count: int, itemsize: int, places: Mapping[str, Region]
) -> tuple[int, object, Any]:
    """Return count, key and place of a storage, which may be a view of another one."""
    if view is None:
        return count, key, lambda: places[key]
    view_key, offset, size = view if isinstance(view, tuple) else (None, None, None)
    is_view = isinstance(view_key, str) and type(offset) is int and type(size) is int
    if not is_view or not 0 <= offset <= offset + size <= count:
        raise ValueError("a view beyond its storage")
    return (
        *(size, (key, view_key)),
        lambda: places[key].part(offset * itemsize, size * itemsize),
    )


def _storage_places(
    region: Region, keys: Unpickled, claims: Mapping[str, _Claim]
) -> dict[str, Region]:
    """Return where the numbers of each storage lie, in the order of the keys."""
    path = region.file.path
    listed = keys.value if isinstance(keys.value, list) else []
    is_named = all(isinstance(key, str) for key in listed)
    if not is_named or len(listed) != len(claims) or set(listed) != set(claims):
        raise damaged(path, "its storages are not those that its tensors need")
    places: dict[str, Region] = {}
    place = keys.end
    for key in listed:
        dtype, count = claims[key]
        size = count * dtype.itemsize
        if place + _COUNT + size > region.size:
            raise damaged(path, "it ends too early")
        found = int.from_bytes(region.read(place, _COUNT), "little")
        if found != count:
            raise damaged(path, f"a storage has {found:,} numbers, its tensors need {count:,}")
        places[key] = region.part(place + _COUNT, size)
        place += _COUNT + size
    return places


def is_torch_pickle(file: SourceFile) -> bool | None:
    """Return whether a file begins with torch's magic number; None if with no whole pickle."""
    try:
        return read_pickle(file.whole, Trust()).value == TORCH_MAGIC
    except PickleError:
        return None


def refuse_pickle(file: SourceFile, options: ReadOptions) -> NoReturn:
    """Refuse a pickle that torch did not write; all names of all its pickles are told."""
    asked: dict[str, None] = {}
    found = NOTHING
    try:
        for _ in range(_MOST_PICKLES):
            found = read_pickle(file.whole, Trust(), after=found)
            asked |= dict.fromkeys(found.asked)
    except PickleError as error:
        asked |= dict.fromkeys(error.asked)
    if asked:
        raise unsafe(file.path, list(asked))
    raise CheckpointError(f"{file.path}: a pickle but no torch checkpoint", RESAVE)


def _pickle_record(path: Path, names: Iterable[str]) -> str:
    records = [name for name in names if _PICKLE_RECORD.fullmatch(name)]
    if len(records) != 1:
        raise CheckpointError(f"{path}: a zip archive, but no torch checkpoint in it")
    return records[0]
