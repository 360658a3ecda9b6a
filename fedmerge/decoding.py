"""From text to values: the one decoder of everything in a file that is no tensor.

Size, number of parts and depth are checked before a text is parsed, the schema while it is. What
is wrong with a text is an error of the caller's choice, never an exception of a library.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from fedmerge.errors import FedmergeError

if TYPE_CHECKING:
    from yaml import Event


Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Place: TypeAlias = Annotated[int, Meta(ge=-(2**53), le=2**53)]  # whoever has it knows its range
Number: TypeAlias = Annotated[float, Meta(ge=-1e100, le=1e100)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Cosine: TypeAlias = Annotated[float, Meta(ge=-1.01, le=1.01)]  # up to what rounding adds
Name: TypeAlias = Annotated[str, Meta(max_length=4096)]  # of what messages name again and again
Digest: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256


FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")

Fail: TypeAlias = Callable[[str], FedmergeError]  # from the reason, without a file's name
_Value = TypeVar("_Value")

LARGEST_TEXT = 100_000_000  # bytes, as the header of a safetensors file
MOST_PARTS = 1_500_000  # strings, lists and objects; each fills up to 120 bytes of memory and more
MOST_NUMBERS = 6_000_000  # 3 million units of all clients: a record has two numbers of each
LARGEST_YAML = 256_000  # bytes: its parser takes a hundred times as long as that of JSON
LONGEST_SCALAR = 2_000  # characters in YAML: 1:59:59 is a number, whose digits take their square
DEEPEST = 64  # lists and objects within each other
_LONGEST_REASON = 240  # characters
_MALFORMED = (
    *(msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError),
    *(LookupError, AttributeError),  # YAML's constructors, of tags that their values contradict
    FedmergeError,  # a type's own rules
)


def decode_json(content: bytes | str, kind: type[_Value], *, fail: Fail) -> _Value:
    """Return the value of a type that JSON describes; raise what `fail` makes of the reason.

    >>> decode_json('{"a": [1, 2]}', dict[str, list[int]], fail=FedmergeError)
    {'a': [1, 2]}
    >>> decode_json('{"a": [1, "b"]}', dict[str, list[int]], fail=FedmergeError)
    Traceback (most recent call last):
    fedmerge.errors.FedmergeError: Expected `int`, got `str` - at `$[...][1]`
    """
    try:
        text = content.encode() if isinstance(content, str) else content
        _check_size(text)
        value = msgspec.json.decode(text, type=kind)
        check_depth(value)
    except _MALFORMED as error:
        raise fail(_reason(error)) from error
    return value


def decode_yaml(text: str, kind: type[_Value], *, fail: Fail) -> _Value:
    """Return the value of a type that YAML describes, without anchors; as `decode_json` else."""
    import yaml  # few commands need it

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if len(text) > LARGEST_YAML:
            raise ValueError(f"it has more than {LARGEST_YAML:,} characters")
        depth = 0
        for event in yaml.parse(text, Loader=loader):  # lazily: nothing is built yet
            depth = _checked_depth(depth, event)
        value = msgspec.convert(yaml.load(text, Loader=loader), kind)
    except (yaml.YAMLError, *_MALFORMED) as error:
        raise fail(_reason(error)) from error
    return value


def decode_value(value: object, kind: type[_Value], *, fail: Fail) -> _Value:
    """Return plain values, as they come from JSON, as a value of a type."""
    try:
        return msgspec.convert(value, kind)
    except _MALFORMED as error:
        raise fail(_reason(error)) from error


def read_text(path: Path, *, fail: Fail) -> bytes:
    """Return a text file's bytes, unless it is too large to be one."""
    try:
        with open(path, "rb", opener=open_file) as file:
            content = file.read(LARGEST_TEXT + 1)
    except OSError as error:
        raise fail(error.strerror or str(error)) from error
    except ValueError as error:  # no path at all: it holds a null character
        raise fail(_reason(error)) from error
    if len(content) > LARGEST_TEXT:
        raise fail(f"it has more than {LARGEST_TEXT:,} bytes")
    return content


def open_file(path: str, flags: int) -> int:
    """Open a file as an `opener`; a pipe among files, to which nobody may ever write, is refused.

    Those of the shell, such as /dev/stdin, are what the user means.
    """
    if str(path).startswith("/dev/"):
        return os.open(path, flags)
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # Python itself refuses folders
        os.close(handle)
        raise OSError("not a regular file")
    return handle


def check_depth(value: object) -> None:
    """Raise ValueError if lists and objects lie too deep within each other."""
    level = [value]
    for _ in range(DEEPEST):
        level = [part for whole in level for part in _parts(whole) if isinstance(part, dict | list)]
        if not level:
            return
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _parts(value: object) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_size(text: bytes) -> None:
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"it has more than {LARGEST_TEXT:,} bytes")
    parts = text.count(b'"') // 2 + text.count(b"[") + text.count(b"{")
    if parts > MOST_PARTS:
        raise ValueError(f"it has more than {MOST_PARTS:,} strings, lists and objects")
    if text.count(b",") - parts > MOST_NUMBERS:
        raise ValueError(f"it has more than {MOST_NUMBERS:,} numbers")


def _checked_depth(depth: int, event: Event) -> int:
    """Return the depth after an event of YAML's parser."""
    import yaml

    if isinstance(event, yaml.AliasEvent):
        raise ValueError("aliases (*name) are not allowed: a few lines of them stand for billions")
    if isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_SCALAR:
        raise ValueError(f"a value of more than {LONGEST_SCALAR:,} characters")
    if isinstance(event, yaml.CollectionEndEvent):
        return depth - 1
    if not isinstance(event, yaml.CollectionStartEvent):
        return depth
    if depth == DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return depth + 1


def _reason(error: Exception) -> str:
    """Return what is wrong in one printable line."""
    if isinstance(error, RecursionError):
        return f"it is nested more than {DEEPEST} levels deep"
    if isinstance(error, LookupError | AttributeError):
        return "a value that contradicts its tag"
    return shortened(" ".join(str(error).split()) or type(error).__name__)


def shortened(text: str) -> str:
    """Return what stands in a stranger's text as one printable and short line.

    >>> shortened("a" + chr(7)), len(shortened("a" * 1_000_000))
    ('a?', 240)
    """
    cut = text[:_LONGEST_REASON]
    line = "".join(c if c.isprintable() else "?" for c in cut)
    return line if len(text) <= _LONGEST_REASON else line[:-1] + "…"
