"""Which globals a pickle asks for, found by reading its opcodes and never by running it."""

import pickletools
import re
from collections import deque
from dataclasses import dataclass
from typing import IO

TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of torch's legacy files
UNRESOLVED = "a name that is computed while loading"

_STRINGS = {
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING"),
}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_SILENT = {"PROTO", "FRAME"}
_EXTENSIONS = {"EXT1", "EXT2", "EXT4"}
_NAMED = {"GLOBAL", "INST"}

# What tensors and their containers are made of; torch's own loader has the last word.
_PLUMBING = re.compile(
    r"collections\.(OrderedDict|Counter)"
    r"|builtins\.(set|bytearray|complex)|_codecs\.encode"
    r"|torch\.(Size|device|Tensor|\w+Storage|\w+Tensor)"
    r"|torch\.(u?int\d+|b?float\d\w*|complex\d+|q\w+|bits\w+|bool|per_\w+)"
    r"|torch\.(cuda|storage|sparse)\.\w+(Storage|Tensor)"
    r"|torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.nn\.parameter\.(Parameter|Buffer)|torch\.serialization\._get_layout"
)


@dataclass(frozen=True)
class Scan:
    """What the opcodes of consecutive pickles tell."""

    globals: tuple[str, ...]  # "module.name", each once, in order
    complete: int  # pickles that end properly
    protocol: int
    is_torch: bool  # starts with the magic number of torch's legacy files


def scan_pickles(stream: IO[bytes], most: int) -> Scan:
    """Read up to `most` consecutive pickles opcode by opcode, until one is malformed."""
    names: dict[str, None] = {}
    complete, protocol, is_torch = 0, 0, False
    # Hostile bytes make pickletools raise nearly anything; what was seen before still counts.
    try:
        while complete < most:
            reader = _Names()
            for opcode, argument, _ in pickletools.genops(stream):
                names.update(dict.fromkeys(reader.step(opcode.name, argument)))
                if opcode.name == "PROTO":
                    protocol = max(protocol, int(argument or 0))
                is_torch = is_torch or (complete == 0 and argument == TORCH_MAGIC)
            complete += 1
    except Exception:
        return Scan(tuple(names), complete, protocol, is_torch)
    return Scan(tuple(names), complete, protocol, is_torch)


def is_plumbing(name: str) -> bool:
    """Whether a global only serves to rebuild tensors and plain containers."""
    return _PLUMBING.fullmatch(name) is not None


class _Names:
    """Follows just enough of one pickle's stack to resolve STACK_GLOBAL."""

    def __init__(self) -> None:
        self._last: deque[str | None] = deque([None, None], maxlen=2)
        self._memo: dict[object, str | None] = {}

    def step(self, opcode: str, argument: object) -> list[str]:
        """Take one opcode and return the global it asks for, if any."""
        if opcode in _SILENT:
            return []
        if opcode == "MEMOIZE":
            self._memo[len(self._memo)] = self._last[-1]
            return []
        if opcode in _PUTS:
            self._memo[argument] = self._last[-1]
            return []
        asked = self._asked(opcode, argument)
        self._last.append(self._pushed(opcode, argument))
        return asked

    def _pushed(self, opcode: str, argument: object) -> str | None:
        if opcode in _GETS:
            return self._memo.get(argument)
        return str(argument) if opcode in _STRINGS else None

    def _asked(self, opcode: str, argument: object) -> list[str]:
        if opcode in _EXTENSIONS:
            return [f"copyreg extension {argument}"]
        if opcode in _NAMED:
            return [_dotted(*str(argument).split(" ", 1))]
        if opcode != "STACK_GLOBAL":
            return []
        module, name = self._last
        return [UNRESOLVED if module is None or name is None else _dotted(module, name)]


def _dotted(module: str, name: str = "") -> str:
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    return f"{module}.{name}"
