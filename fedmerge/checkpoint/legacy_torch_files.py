"""Read files that torch wrote before version 1.6: pickles one after the other, then all numbers."""

from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

import torch

from fedmerge.checkpoint.files import (
    RESAVE,
    Contents,
    ReadOptions,
    Region,
    SourceFile,
    damaged,
)
from fedmerge.checkpoint.pickle_machine import Known, Trust
from fedmerge.checkpoint.pickle_steps import NOTHING, PickleError, Unpickled, read_pickle
from fedmerge.checkpoint.torch_files import (
    Storage,
    admitting,
    as_kind,
    storage_reference,
    trusting,
    understood,
    unsafe,
    with_modules,
)
from fedmerge.errors import CheckpointError

TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of torch's legacy files


_MOST_PICKLES = 100  # of a file that is none of torch's; nobody puts as many into one


_Claim: TypeAlias = tuple[torch.dtype, int]  # what tensors say of a storage: its numbers and count


_COUNT = 8  # bytes that say how many numbers of a storage follow, in a legacy file


def read_legacy(file: SourceFile, options: ReadOptions) -> Contents:
    """Read a file of `torch.save` before 1.6: pickles, then the numbers of all storages."""
    region, places = file.whole, dict[str, Region]()
    claims: dict[str, _Claim] = {}

    def load(reference: Any) -> Storage | Known:
        if reference[0] == "module":  # a class, and the text of its code
            return as_kind(reference[1], Known)
        dtype, key, count = storage_reference(reference)
        if claims.setdefault(key, (dtype, count)) != (dtype, count):
            raise ValueError(f"the storage '{key}' has two types or sizes")
        view = reference[5] if len(reference) > 5 else None
        size, own, locate = _legacy_view(view, key, count, dtype.itemsize, places)
        return Storage(dtype, size, (file, own), locate)

    plain = Trust(is_admitted=admitting(options.allow_globals))
    trust = trusting(file.budget, options, load)
    found = NOTHING
    for _ in range(3):  # magic number, version, system
        found = _next_pickle(region, plain, found)
    system = found.value
    tree = with_modules(file.path, lambda: read_pickle(region, trust, after=found))
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
