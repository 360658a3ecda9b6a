"""What a file is, decided by its first bytes and never by its name."""

import re
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fedmerge.checkpoint._failures import damaged, unreadable
from fedmerge.checkpoint._files import SourceFile
from fedmerge.checkpoint._safetensors import LARGEST_HEADER
from fedmerge.checkpoint._torch_files import is_torch_pickle
from fedmerge.checkpoint._zip import read_directory
from fedmerge.decoding import decode_json, read_text
from fedmerge.errors import CheckpointError

Kind: TypeAlias = Literal[
    "zip", "legacy", "safetensors", "index", "pickle", "exported program", "TorchScript"
]

_HEAD = 4096
_STATE_DICT = "save the model's state dict with torch.save or safetensors"
_UNPACK = "unpack it first"

_FOREIGN: tuple[tuple[str, str, str], ...] = (  # pattern of the first bytes, what it is, hint
    (r"version https://git-lfs", "a Git LFS pointer, not the file itself", "run `git lfs pull`"),
    (r"\s*<(!doctype html|html|head|\?xml)", "a web page, not a checkpoint", "download it again"),
    (r"\x93NUMPY", "a numpy array (.npy), not a checkpoint", _STATE_DICT),
    (r"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras?), not a torch checkpoint", _STATE_DICT),
    (r"GGUF|GGML|ggjt", "a GGUF/GGML file, not a torch checkpoint", _STATE_DICT),
    (r"\x1f\x8b", "a gzip file", _UNPACK),
    (r"BZh|\xfd7zXZ|7z\xbc\xaf|\x28\xb5\x2f\xfd|Rar!", "a compressed archive", _UNPACK),
    (
        r".{257}ustar",
        "a tar archive, as torch wrote before version 0.1.10 or as made by `tar`",
        "unpack it, or save the state dict again with a current torch",
    ),
)
_FOREIGN_PATTERNS = tuple(
    (re.compile(pattern.encode("latin-1"), re.IGNORECASE | re.DOTALL), what, hint)
    for pattern, what, hint in _FOREIGN
)


_ARCHIVES: tuple[tuple[str, Kind], ...] = (  # pattern of a record's name, what such a zip is
    (r"[^/]+/constants\.pkl", "TorchScript"),
    (r"([^/]+/)?(archive_format|serialized_exported_program\.json)", "exported program"),
)


def kind_of(path: Path) -> Kind:
    """Return which reader a file needs; raise what it is if none."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {_no_file(path)}")
        return _kind(SourceFile.of(path))
    except OSError as error:
        raise unreadable(path, error) from error


def _no_file(path: Path) -> str:
    if not path.exists():
        return "no such file"
    return "a folder, not a checkpoint" if path.is_dir() else "not a regular file"


def _kind(file: SourceFile) -> Kind:
    path, head = file.path, file.whole.read(0, min(_HEAD, file.size))
    if not head:
        raise CheckpointError(f"{path}: an empty file", "copy or download it again")
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_kind(file)
    if _is_safetensors(head):
        return "safetensors"
    for pattern, what, hint in _FOREIGN_PATTERNS:
        if pattern.match(head):
            raise CheckpointError(f"{path}: {what}", hint)
    return _pickle_kind(file, head) or _text_kind(path, head)


def _zip_kind(file: SourceFile) -> Kind:
    names = [entry.name for entry in read_directory(file.whole)]
    for pattern, kind in _ARCHIVES:
        if any(re.fullmatch(pattern, name) for name in names):
            return kind
    if names and all(name.endswith(".npy") for name in names):
        raise CheckpointError(f"{file.path}: a numpy archive (.npz), not a checkpoint", _STATE_DICT)
    return "zip"


def _is_safetensors(head: bytes) -> bool:
    length = int.from_bytes(head[:8], "little")
    return head[8:9] == b"{" and 2 <= length <= LARGEST_HEADER


def _pickle_kind(file: SourceFile, head: bytes) -> Kind | None:
    is_torch = is_torch_pickle(file)
    if is_torch:
        return "legacy"
    # Protocols 0 and 1 have no mark of their own, so only a whole pickle counts as one.
    return "pickle" if is_torch is not None or re.match(rb"\x80[\x02-\x05]", head) else None


def _text_kind(path: Path, head: bytes) -> Kind:
    if head.lstrip()[:1] in (b"{", b"["):
        return _json_kind(path)
    if _is_text(head):
        raise CheckpointError(f"{path}: a text file, not a checkpoint")
    raise CheckpointError(
        f"{path}: not a checkpoint (unknown format)",
        "fedmerge reads torch files (.pt, .pth, .bin, .ckpt, .pt2, TorchScript) and safetensors",
    )


def _is_text(head: bytes) -> bool:
    try:
        head[: _HEAD - 4].decode("utf-8")  # a character may be cut at the very end
    except UnicodeDecodeError:
        return False
    return re.search(rb"[\x00-\x08\x0e-\x1f]", head) is None


def _json_kind(path: Path) -> Kind:
    def fail(reason: str) -> CheckpointError:
        return damaged(path, f"it looks like JSON but cannot be parsed: {reason}")

    content = decode_json(read_text(path, fail=fail), Any, fail=fail)
    if isinstance(content, dict) and "weight_map" in content:
        return "index"
    raise CheckpointError(f"{path}: a JSON file, not a checkpoint")
