"""A machine that reads pickles as data: nothing that a file names is imported or called."""

import _compat_pickle
import codecs
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

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


Step: TypeAlias = Callable[[Machine], None]

_LONGEST_NUMBER = 1_000  # bytes
_MOST_MARKS = 10_000  # Python itself nests a thousand levels deep


def _global(machine: Machine) -> None:
    module, name = (machine.stream.line().decode() for _ in range(2))
    machine.push(machine.find(module, name))


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.push(machine.find(module, name))


def _extension(size: int) -> Step:
    def step(machine: Machine) -> None:
        code = int.from_bytes(machine.take(size), "little")
        machine.push(machine.find("copyreg", f"extension {code}"))

    return step


def _instance(machine: Machine) -> None:
    module, name = (machine.stream.line().decode() for _ in range(2))
    arguments = tuple(machine.above_mark())
    machine.push(machine.call(machine.find(module, name), arguments))


def _object(machine: Machine) -> None:
    function, *arguments = machine.above_mark()
    machine.push(machine.call(function, tuple(arguments)))


def _reduce(machine: Machine) -> None:
    arguments = machine.stack.pop()
    machine.push(machine.call(machine.stack.pop(), arguments))


def _new(machine: Machine) -> None:
    arguments = machine.stack.pop()
    machine.push(machine.new(machine.stack.pop(), arguments))


def _new_with_keywords(machine: Machine) -> None:
    machine.stack.pop()
    _reduce(machine)


def _build(machine: Machine) -> None:
    state = machine.stack.pop()
    machine.give_state(machine.stack[-1], state)


def _persistent(machine: Machine) -> None:
    if machine.trust.load_storage is None:
        raise ValueError("it refers to something outside of it")
    machine.push(machine.trust.load_storage(machine.stack.pop()))


def _number(text: bytes) -> int:
    return int.from_bytes(text, "little", signed=True)


def _short_number(length: int) -> Step:
    def step(machine: Machine) -> None:
        size = int.from_bytes(machine.take(length), "little")
        if size > _LONGEST_NUMBER:
            raise ValueError(f"a number of {size:,} bytes")
        machine.push(_number(machine.take(size)))

    return step


def _line_number(machine: Machine) -> None:
    text = machine.stream.line().decode()
    is_flag = text in ("00", "01")
    machine.push(text == "01" if is_flag else int(text.removesuffix("L")))


def _line_string(machine: Machine) -> None:
    text = machine.stream.line().strip()
    if len(text) < 2 or text[:1] not in b"'\"" or text[:1] != text[-1:]:
        raise ValueError("a string without quotes")
    machine.push(_old_text(codecs.escape_decode(text[1:-1])[0]))


def _sized(length: int, decode: Callable[[bytes], object]) -> Step:
    """Return the step that takes a size of some bytes and then so many bytes."""

    def step(machine: Machine) -> None:
        size = int.from_bytes(machine.take(length), "little")
        machine.push(decode(machine.take(size)))

    return step


def _fixed(length: int, decode: Callable[[bytes], object]) -> Step:
    return lambda machine: machine.push(decode(machine.take(length)))


def _constant(value: object) -> Step:
    return lambda machine: machine.push(value)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


def _old_text(content: bytes) -> str:
    """Return a string of Python 2, which may be any bytes."""
    return content.decode("utf-8", "replace")


def _unsigned(content: bytes) -> int:
    return int.from_bytes(content, "little")


def _empty(build: Callable[[], object]) -> Step:
    def step(machine: Machine) -> None:
        machine.budget.take_value()
        machine.push(build())

    return step


def _from_mark(build: Callable[[list[Any]], object]) -> Step:
    def step(machine: Machine) -> None:
        machine.budget.take_value()
        machine.push(build(machine.above_mark()))

    return step


def _from_top(count: int) -> Step:
    def step(machine: Machine) -> None:
        if len(machine.stack) < count:
            raise IndexError("its stack is empty")
        machine.budget.take_value()
        items = tuple(machine.stack[-count:])
        del machine.stack[-count:]
        machine.push(items)

    return step


def _put(length: int) -> Step:
    def step(machine: Machine) -> None:
        machine.remember(_unsigned(machine.take(length)))

    return step


def _get(length: int) -> Step:
    def step(machine: Machine) -> None:
        machine.push(machine.memo[_unsigned(machine.take(length))])

    return step


def _mark(machine: Machine) -> None:
    if len(machine.marks) >= _MOST_MARKS:
        raise ValueError(f"more than {_MOST_MARKS:,} marks within each other")
    machine.marks.append(machine.stack)
    machine.stack = []


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.above_mark()


def _pop_mark(machine: Machine) -> None:
    machine.above_mark()


def _frame(machine: Machine) -> None:
    machine.take(8)  # its size says nothing that its steps do not say


def _protocol(machine: Machine) -> None:
    machine.protocol = machine.take(1)[0]
    if machine.protocol > pickle.HIGHEST_PROTOCOL:
        raise ValueError(f"the unknown protocol {machine.protocol}")


def _dictionary(items: list[Any]) -> dict[object, object]:
    return dict(zip(map(as_key, items[::2]), items[1::2], strict=True))


STOP = pickle.STOP[0]
_NAMED: Mapping[bytes, Step] = {
    pickle.MARK: _mark,
    pickle.POP: _pop,
    pickle.POP_MARK: _pop_mark,
    pickle.DUP: lambda machine: machine.push(machine.stack[-1]),
    pickle.FLOAT: lambda machine: machine.push(float(machine.stream.line())),
    pickle.INT: _line_number,
    pickle.LONG: _line_number,
    pickle.BININT: _fixed(4, _number),
    pickle.BININT1: _fixed(1, _unsigned),
    pickle.BININT2: _fixed(2, _unsigned),
    pickle.BINFLOAT: _fixed(8, lambda content: struct.unpack(">d", content)[0]),
    pickle.LONG1: _short_number(1),
    pickle.LONG4: _short_number(4),
    pickle.NONE: _constant(None),
    pickle.NEWTRUE: _constant(True),
    pickle.NEWFALSE: _constant(False),
    pickle.BINPERSID: _persistent,
    pickle.STRING: _line_string,
    pickle.UNICODE: lambda machine: machine.push(_text(machine.stream.line())),
    pickle.BINSTRING: _sized(4, _old_text),
    pickle.SHORT_BINSTRING: _sized(1, _old_text),
    pickle.BINUNICODE: _sized(4, _text),
    pickle.SHORT_BINUNICODE: _sized(1, _text),
    pickle.BINUNICODE8: _sized(8, _text),
    pickle.BINBYTES: _sized(4, bytes),
    pickle.SHORT_BINBYTES: _sized(1, bytes),
    pickle.BINBYTES8: _sized(8, bytes),
    pickle.BYTEARRAY8: _sized(8, bytes),
    pickle.EMPTY_DICT: _empty(dict),
    pickle.EMPTY_LIST: _empty(list),
    pickle.EMPTY_SET: _empty(list),  # nobody asks what is in a set
    pickle.EMPTY_TUPLE: _constant(()),
    pickle.DICT: _from_mark(_dictionary),
    pickle.LIST: _from_mark(list),
    pickle.TUPLE: _from_mark(tuple),
    pickle.FROZENSET: _from_mark(list),
    pickle.TUPLE1: _from_top(1),
    pickle.TUPLE2: _from_top(2),
    pickle.TUPLE3: _from_top(3),
    pickle.APPEND: lambda machine: machine.add_items([machine.stack.pop()]),
    pickle.APPENDS: lambda machine: machine.add_items(machine.above_mark()),
    pickle.ADDITEMS: lambda machine: machine.add_items(machine.above_mark()),
    pickle.SETITEM: lambda machine: machine.add_entries(
        [machine.stack.pop(-2), machine.stack.pop()]
    ),
    pickle.SETITEMS: lambda machine: machine.add_entries(machine.above_mark()),
    pickle.PUT: lambda machine: machine.remember(int(machine.stream.line())),
    pickle.BINPUT: _put(1),
    pickle.LONG_BINPUT: _put(4),
    pickle.MEMOIZE: lambda machine: machine.remember(len(machine.memo)),
    pickle.GET: lambda machine: machine.push(machine.memo[int(machine.stream.line())]),
    pickle.BINGET: _get(1),
    pickle.LONG_BINGET: _get(4),
    pickle.GLOBAL: _global,
    pickle.STACK_GLOBAL: _stack_global,
    pickle.INST: _instance,
    pickle.OBJ: _object,
    pickle.NEWOBJ: _new,
    pickle.NEWOBJ_EX: _new_with_keywords,
    pickle.REDUCE: _reduce,
    pickle.BUILD: _build,
    pickle.EXT1: _extension(1),
    pickle.EXT2: _extension(2),
    pickle.EXT4: _extension(4),
    pickle.PROTO: _protocol,
    pickle.FRAME: _frame,
}  # buffers outside of the pickle have no place in a file
STEPS: Mapping[int, Step] = {name[0]: step for name, step in _NAMED.items()}


class PickleError(Exception):
    """A pickle that is damaged or over budget; `asked` are the names it gave until then."""

    def __init__(self, reason: str, asked: tuple[str, ...]) -> None:
        super().__init__(reason)
        self.asked = asked


@dataclass(frozen=True, slots=True)
class Unpickled:
    """What a pickle holds."""

    value: object
    asked: tuple[str, ...]  # names that ask for code
    end: int = 0  # where the pickle ends in its region


NOTHING = Unpickled(None, ())


def read_pickle(region: Region, trust: Trust, *, after: Unpickled = NOTHING) -> Unpickled:
    """Return what the pickle at the beginning of a file, or after another one, holds."""
    machine = Machine(Stream(region, after.end), trust, region.file.budget)
    try:
        value = _run(machine)
    except (*MALFORMED, struct.error) as error:
        reason = str(error) or type(error).__name__
        raise PickleError(reason, machine.asked) from error
    return Unpickled(value, machine.asked, machine.stream.place)


def _run(machine: Machine) -> object:
    """Take step after step; return what is on top of the stack after the last."""
    take, count = machine.take, machine.budget.take_step
    while (code := take(1)[0]) != STOP:
        count()
        step = STEPS.get(code)
        if step is None:
            raise ValueError(f"the unknown step 0x{code:02x}")
        step(machine)
    return machine.stack.pop()
