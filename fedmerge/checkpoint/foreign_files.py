"""Files that hold no checkpoint of a kind that is read: what they are, by their first bytes."""

import re
from pathlib import Path
from typing import Any, Literal

from fedmerge.checkpoint.files import damaged
from fedmerge.decoding import decode_json, read_text
from fedmerge.errors import CheckpointError

STATE_DICT = "save the model's state dict with torch.save or safetensors"
HEAD = 4096  # first bytes by which files are told apart
_UNPACK = "unpack it first"
_FOREIGN: tuple[tuple[str, str, str], ...] = (  # pattern of the first bytes, what it is, hint
    (r"version https://git-lfs", "a Git LFS pointer, not the file itself", "run `git lfs pull`"),
    (r"\s*<(!doctype html|html|head|\?xml)", "a web page, not a checkpoint", "download it again"),
    (r"\x93NUMPY", "a numpy array (.npy), not a checkpoint", STATE_DICT),
    (r"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras?), not a torch checkpoint", STATE_DICT),
    (
        r"GGUF|GGML|ggjt",
        "a GGUF/GGML file, quantised for llama.cpp, not a torch checkpoint",
        "merge the models before they are quantised and converted",
    ),
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


def refuse_foreign(path: Path, head: bytes) -> None:
    """Refuse a file whose first bytes are those of another format that people take for ours."""
    for pattern, what, hint in _FOREIGN_PATTERNS:
        if pattern.match(head):
            raise CheckpointError(f"{path}: {what}", hint)


def text_kind(path: Path, head: bytes) -> Literal["index"]:
    """Return what a file of text is if it can be read; refuse all that is not known."""
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
        head[: HEAD - 4].decode("utf-8")  # a character may be cut at the very end
    except UnicodeDecodeError:
        return False
    return re.search(rb"[\x00-\x08\x0e-\x1f]", head) is None


def _json_kind(path: Path) -> Literal["index"]:
    def fail(reason: str) -> CheckpointError:
        return damaged(path, f"it looks like JSON but cannot be parsed: {reason}")

    content = decode_json(read_text(path, fail=fail), Any, fail=fail)
    if isinstance(content, dict) and "weight_map" in content:
        return "index"
    raise CheckpointError(f"{path}: a JSON file, not a checkpoint")
