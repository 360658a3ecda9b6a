"""The merge record as text: inside a safetensors file or shard index, beside any other."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedmerge.checkpoint._contents import ReadOptions
from fedmerge.checkpoint._failures import damaged, unreadable
from fedmerge.checkpoint._files import SourceFile
from fedmerge.checkpoint._safetensors import read_safetensors
from fedmerge.checkpoint._sniff import kind_of
from fedmerge.decoding import Fail, decode_json, read_text
from fedmerge.errors import CheckpointError

RECORD_KEY = "fedmerge"  # of the safetensors metadata

# A list without lists, objects or strings in it. Strings hold no raw newline, so none can match.
_SPREAD_LIST = re.compile(r"\[\n([^\[\]{}\"]*)\]")


def record_path(path: str | Path) -> Path:
    """Return where the record of a file that is not safetensors lies.

    >>> record_path("global.pt").name
    'global.pt.json'
    """
    path = Path(path)
    return path.with_name(path.name + ".json")


def read_record(path: str | Path) -> dict[str, Any]:
    """Return the merge record of a merged file."""
    path = Path(path)
    try:
        return _PLACES.get(kind_of(path), _beside)(path)
    except OSError as error:
        raise unreadable(path, error) from error


def has_record(path: Path) -> bool:
    """Return whether a file is a merged model: its record is inside or beside it."""
    try:
        return RECORD_KEY in read_record(path)
    except CheckpointError:
        return False


def readable(record: Mapping[str, Any]) -> str:
    """Return a record as indented JSON, each list of numbers on one line.

    >>> print(readable({"seed": 0, "widths": [[1, 2], [3]]}), end="")
    {
     "seed": 0,
     "widths": [
      [1, 2],
      [3]
     ]
    }
    """
    text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    return _SPREAD_LIST.sub(lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def compact(content: Mapping[str, Any]) -> str:
    """Return JSON without any space."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _inside(path: Path) -> dict[str, Any]:
    text = read_safetensors(SourceFile.of(path), ReadOptions()).metadata.get(RECORD_KEY)
    if text is None:
        raise _missing(path, f"no '{RECORD_KEY}' in its metadata")
    return _parsed(path, text)


def _in_index(path: Path) -> dict[str, Any]:
    metadata = _parsed(path, read_text(path, fail=_unreadable(path))).get("metadata")
    record = metadata.get(RECORD_KEY) if isinstance(metadata, dict) else None
    if record is None:
        raise _missing(path, f"no '{RECORD_KEY}' in its metadata")
    if not isinstance(record, dict):
        raise damaged(path, "its merge record is no JSON object")
    return record


def _beside(path: Path) -> dict[str, Any]:
    place = record_path(path)
    if not place.exists():
        raise _missing(path, f"no {place.name} beside it")
    return _parsed(place, read_text(place, fail=_unreadable(place)))


def _parsed(path: Path, text: str | bytes) -> dict[str, Any]:
    return decode_json(
        text,
        dict[str, Any],
        fail=lambda reason: damaged(path, f"its merge record is no JSON object: {reason}"),
    )


def _unreadable(path: Path) -> Fail:
    return lambda reason: CheckpointError(f"{path}: cannot be read ({reason})")


def _missing(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: has no merge record ({why})", "only files that fedmerge wrote have one"
    )


_PLACES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "safetensors": _inside,
    "index": _in_index,
}
