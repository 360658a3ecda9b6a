"""A machine that reads pickles as data: nothing that a file names is imported or called."""

import _compat_pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from fedmerge.checkpoint.files import Budget, Region

UNRESOLVED = "a name that is computed while loading"
MALFORMED = (  # what our steps raise on a program that makes no sense
    *(IndexError, KeyError, TypeError, ValueError, AttributeError),
    *(OverflowError, RecursionError),
)

_CHUNK = 1 << 18  # bytes read at once
_LONGEST_LINE = 10_000  # bytes of a number, name or string that ends with a line
_LARGEST_KEY = 1 << 60  # of integers: hashes of larger ones can be made to collide
_LONGEST_NAME = 1_000  # characters of a function's or class's
_MOST_MEMORIES = 600_000
_MOST_NAMES = 10_000  # that the table does not know


@dataclass(eq=False, slots=True)
class Uses:
    """What a pickle does with a name that nobody knows."""

    calls: int = 0  # of the name, or of what it made
    modules: int = 0  # those that make a module as torch does: `cls.__new__(cls)`, then its state


@dataclass(frozen=True, eq=False, slots=True)
class Known:
    """A name that stands for a function of ours, or for a value that is never called."""

    name: str
    call: Callable[..., object] | None = None
    value: object = None
    uses: Uses | None = None  # of a name that the table does not have


@dataclass(eq=False, slots=True)
class Inert:
    """An object of a class that was never imported: what the file says of it, nothing else."""

    name: str
    state: object = None
    content: dict[Any, Any] | list[Any] | None = None
    uses: Uses | None = None  # of its class, if it was made without arguments


@dataclass(frozen=True)
class Trust:
    """What the names in a pickle stand for."""

    known: Mapping[str, Known] = field(default_factory=dict)
    is_admitted: Callable[[str], bool] = lambda name: False  # as a class of inert objects
    is_harmless: Callable[[str, Uses], bool] = lambda name, uses: False  # by what is done with it
    load_storage: Callable[[Any], object] | None = None  # from a persistent id


class Stream:
    """The bytes of a region one after the other."""

    def __init__(self, region: Region, start: int) -> None:
        self._region = region
        self._next = start  # place in the region of what follows the buffer
        self._buffer = b""
        self._at = 0

    @property
    def place(self) -> int:
        """How far the region was read."""
        return self._next - len(self._buffer) + self._at

    def take(self, count: int) -> bytes:
        """Return so many bytes, which must be there."""
        end = self._at + count
        if end > len(self._buffer):
            self._fill(count)
            end = self._at + count
        taken = self._buffer[self._at : end]
        self._at = end
        return taken

    def line(self) -> bytes:
        """Return the bytes up to the end of a line, without it."""
        if len(self._buffer) - self._at <= _LONGEST_LINE:
            self._fill(min(_LONGEST_LINE, self._region.size - self.place))
        end = self._buffer.find(b"\n", self._at, self._at + _LONGEST_LINE)
        if end < 0:
            raise ValueError("a line that does not end")
        return self.take(end - self._at + 1)[:-1]

    def _fill(self, count: int) -> None:
        """Have so many bytes in the buffer from here on."""
        rest = self._buffer[self._at :]
        left = self._region.size - self._next
        if count - len(rest) > left:
            raise ValueError("it ends too early")
        more = min(left, max(_CHUNK, count - len(rest)))
        self._buffer = rest + self._region.read(self._next, more)
        self._next += more
        self._at = 0


class Machine:
    """The stack, the marks and the memo of one pickle."""

    def __init__(self, stream: Stream, trust: Trust, budget: Budget) -> None:
        self.stream = stream
        self.take = stream.take
        self.trust = trust
        self.budget = budget
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.unknown: dict[str, Uses] = {}
        self.protocol = 0
        self._found: dict[str, Known] = {}

    @property
    def asked(self) -> tuple[str, ...]:
        """The names that ask for code: neither the table nor the user knows them."""
        is_harmless = self.trust.is_harmless
        return tuple(name for name, uses in self.unknown.items() if not is_harmless(name, uses))

    def push(self, value: object) -> None:
        """Put a value on top."""
        self.stack.append(value)

    def above_mark(self) -> list[Any]:
        """Return what was pushed since the last mark, without it."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def remember(self, number: int) -> None:
        """Keep what is on top for later."""
        if not 0 <= number < _LARGEST_KEY or len(self.memo) >= _MOST_MEMORIES:
            raise ValueError(f"it keeps more than {_MOST_MEMORIES:,} values for later")
        self.memo[number] = self.stack[-1]

    def find(self, module: object, name: object) -> object:
        """Return what a name stands for; note it where that is nothing."""
        if isinstance(module, str) and isinstance(name, str):
            if len(module) + len(name) > _LONGEST_NAME:
                raise ValueError(f"a name of {len(module) + len(name):,} characters")
            full = _modern(module, name) if self.protocol < 3 else f"{module}.{name}"
        else:
            full = UNRESOLVED
        if full not in self._found:
            self._found[full] = self.trust.known.get(full) or self._unknown(full)
        return self._found[full]

    def _unknown(self, name: str) -> Known:
        uses = Uses()
        if not self.trust.is_admitted(name):
            self.unknown[name] = uses
        if len(self._found) >= _MOST_NAMES:
            raise ValueError(f"it names more than {_MOST_NAMES:,} functions and classes")
        return Known(name, call=lambda *args: Inert(name), uses=uses)

    def new(self, kind: object, arguments: object) -> object:
        """Return an object of a class, as `cls.__new__(cls, …)` would."""
        made = self.call(kind, arguments)
        if isinstance(made, Inert) and isinstance(kind, Known) and arguments == ():
            made.uses = kind.uses
        return made

    def give_state(self, target: object, state: object) -> None:
        """Let an object of an unknown class keep its state, and count modules among them."""
        if not isinstance(target, Inert):
            return
        if target.uses is not None and target.state is None and is_module_state(state):
            target.uses.modules += 1
        elif target.uses is not None:  # no module, or more than one in it
            target.uses.calls += 1
        target.state = state

    def call(self, function: object, arguments: object) -> object:
        """Return what one of our functions makes of a file's arguments."""
        self.budget.take_value()
        if isinstance(function, Known | Inert) and function.uses is not None:
            function.uses.calls += 1
        if isinstance(function, Inert):  # what an unknown function would have made
            return Inert(function.name)
        if not isinstance(function, Known) or function.call is None:
            raise ValueError("it calls something that is no function")
        if not isinstance(arguments, tuple):
            raise ValueError(f"'{function.name}' is called without a tuple of arguments")
        given = sum(len(a) for a in arguments if isinstance(a, list | tuple | dict))
        self.budget.take_items(len(arguments) + given)
        try:
            return function.call(*arguments)
        except MALFORMED as error:
            raise ValueError(f"'{function.name}': {error}") from error

    def add_entries(self, items: list[Any]) -> None:
        """Put keys and values, one after the other, into the dictionary on top."""
        if len(items) % 2:
            raise ValueError("a key without a value")
        target = self.stack[-1]
        if isinstance(target, Inert):
            target.content = target.content if isinstance(target.content, dict) else {}
            target = target.content
        if not isinstance(target, dict):
            raise ValueError("entries of something that is no dictionary")
        target.update(zip(map(as_key, items[::2]), items[1::2], strict=True))

    def add_items(self, items: list[Any]) -> None:
        """Append to the list on top."""
        target = self.stack[-1]
        if isinstance(target, Inert):
            target.content = target.content if isinstance(target.content, list) else []
            target = target.content
        if not isinstance(target, list):
            raise ValueError("items of something that is no list")
        target += items


def _modern(module: str, name: str) -> str:
    """Return a name of Python 2 as Python 3 has it."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[(module, name)]
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


_MODULE_PARTS = ("_parameters", "_buffers", "_modules")


def is_module(node: object) -> TypeGuard[Inert]:
    """Whether an inert object has what every `nn.Module` has."""
    return isinstance(node, Inert) and is_module_state(node.state)


def is_module_state(state: object) -> bool:
    """Whether these are the attributes of an `nn.Module`."""
    return isinstance(state, dict) and all(
        isinstance(state.get(part), dict) for part in _MODULE_PARTS
    )


class _OddKey:
    """Stands for a key that is neither text nor a plain number: hashing it could take for ever."""

    __slots__ = ()


def as_key(value: object) -> object:
    """Return what stands for a key in our dictionaries."""
    if type(value) is str or value is None or type(value) is bool:
        return value
    return value if type(value) is int and abs(value) < _LARGEST_KEY else _OddKey()
