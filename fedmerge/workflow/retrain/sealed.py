"""Files that prove themselves: each carries the digest of all that it says.

The files of a work dir are replaced one by one, each at once. Digests in a file of their own would
be older or newer than what they are of whenever a run is killed between the two; so every file has
its own inside, and a file is whole or refused, whatever became of the others.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fedmerge.checkpoint import array_digest, open_tensors, readable, write_model, write_text
from fedmerge.decoding import Fail, decode_json, read_text
from fedmerge.errors import CheckpointError
from fedmerge.types.arrays import Array
from fedmerge.types.clients import TensorInfo
from fedmerge.types.work import Arrays

RECORD = "fedmerge"  # of the safetensors metadata
_DAMAGED = re.compile(r"truncated or damaged \((.*)\)", re.DOTALL)  # as the readers say it
SEAL = "sha256"  # among the values of a text
_Value = TypeVar("_Value")


class _Sealed(msgspec.Struct, frozen=True):
    """What a file of tensors says of itself."""

    about: msgspec.Raw
    sha256: str


@dataclass(frozen=True)
class SealedTensors:
    """The tensors of a file, and what was said of them as text."""

    arrays: Mapping[str, Array]
    about: bytes  # JSON


def write_sealed(path: Path, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Replace a file by arrays and what is to be said of them, with a digest of both."""
    infos = {name: TensorInfo(array.shape, array.dtype.name) for name, array in arrays.items()}

    def record(digests: Mapping[str, str]) -> dict[str, Any]:
        return {"about": about, SEAL: _tensors_digest(_compact(about), infos, digests)}

    write_model(path, infos, lambda name: arrays[name], record=record, force=True)


def read_sealed(path: Path, *, fail: Fail) -> SealedTensors:
    """Return the arrays of a file and what was said of them, if all is as it was written."""
    try:
        opened = open_tensors(path)
        arrays = {name: opened.read(name) for name in opened.tensors}
    except CheckpointError as error:
        raise fail(_reason(path, error)) from error
    sealed = decode_json(opened.metadata.get(RECORD, "{}"), _Sealed, fail=fail)
    about = bytes(sealed.about)
    digests = {n: array_digest(array, opened.tensors[n].dtype) for n, array in arrays.items()}
    if _tensors_digest(about, opened.tensors, digests) != sealed.sha256:
        raise fail("it is not as it was written")
    return SealedTensors(arrays, about)


def write_sealed_text(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a text file by JSON values and their digest."""
    write_text(path, readable({**values, SEAL: digest_of(values)}), force=True)


def read_sealed_text(path: Path, kind: type[_Value], *, fail: Fail) -> _Value:
    """Return the values of a text file, if all is as it was written."""
    content = read_text(path, fail=fail)
    values = decode_json(content, dict[str, Any], fail=fail)
    if digest_of({name: v for name, v in values.items() if name != SEAL}) != values.get(SEAL):
        raise fail("it is not as it was written")
    return decode_json(content, kind, fail=fail)


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, which may have been read from a file."""
    return hashlib.sha256(_compact(values)).hexdigest()


def _tensors_digest(
    about: bytes, infos: Mapping[str, TensorInfo], digests: Mapping[str, str]
) -> str:
    tensors = [[name, info.dtype, info.shape, digests[name]] for name, info in infos.items()]
    return hashlib.sha256(about + b"\n" + _compact({"tensors": tensors})).hexdigest()


def _compact(values: Mapping[str, Any]) -> bytes:
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="surrogatepass")


def _reason(path: Path, error: CheckpointError) -> str:
    """Return why a file can't be read, without its name."""
    found = _DAMAGED.fullmatch(error.problem.removeprefix(f"{path}: "))
    return found[1] if found else error.problem.removeprefix(f"{path}: ")


def damaged_file(path: Path, hint: str) -> Callable[[str], CheckpointError]:
    """Return what makes an error of the reason why a file can't be used."""
    return lambda reason: CheckpointError(f"{path}: is damaged ({reason})", hint)
