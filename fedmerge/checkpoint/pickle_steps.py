"""What each step of a pickle does to the machine that reads it."""

import codecs
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from fedmerge.checkpoint.files import Region
from fedmerge.checkpoint.pickle_machine import MALFORMED, Machine, Stream, Trust, as_key

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
