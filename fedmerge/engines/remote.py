"""What engines over other frameworks share: what server and sites say, and a site's work."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from fedmerge.decoding import Count, Fail, Name, decode_json
from fedmerge.engines.engine import (
    CallWork,
    Outcome,
    Reply,
    Status,
    Task,
    call_work,
    in_time,
)
from fedmerge.engines.processes import HEADER_LENGTH, send
from fedmerge.errors import TrainingError
from fedmerge.values.arrays import Array
from fedmerge.values.work import Arrays, Place

GRACE = 60.0  # seconds for a message's way and the start of an app, beyond the work's own time
_MOST_AXES = 32
_MOST_BYTES = 2**62
_NUMBERS = "biufc"  # kinds of dtypes whose bytes are values


class Order(msgspec.Struct, frozen=True):
    """What a client is to do."""

    function: Name
    settings: dict[str, Any]
    timeout: float | None


class Answer(msgspec.Struct, frozen=True):
    """What became of it; a site's own defects are that client's failures, not the server's."""

    status: Status
    values: dict[str, Any]
    message: str
    hint: str
    details: str
    seconds: float


class Card(msgspec.Struct, frozen=True):
    """Which client a site is."""

    client: Name


Said = TypeVar("Said", Order, Answer, Card)


def order_of(task: Task, timeout: float | None) -> Order:
    """Return what a client is told of a task."""
    return Order(task.function, dict(task.settings), timeout)


def outcome_of(task: Task, reply: Reply) -> Outcome:
    """Return what became of a task."""
    return Outcome(task.id, task.client, **vars(reply))


def reply_of(arrays: Arrays, answer: Answer) -> Reply:
    """Return a client's answer as the reply to a call."""
    return Reply(arrays=arrays, **msgspec.structs.asdict(answer))


def answer_of(reply: Reply) -> Answer:
    """Return what is said of a reply beside its arrays."""
    return Answer(**{name: vars(reply)[name] for name in Answer.__struct_fields__})


@dataclass(frozen=True)
class Site:
    """What a site does, and where: a server only says which of its works, and for how long."""

    works: Collection[str]
    call: CallWork = call_work
    device: str = "cpu"
    threads: int = 1

    def reply(self, arrays: Arrays, order: Order) -> Reply:
        """Do what is ordered, if it is among the site's works."""
        if order.function not in self.works:
            refusal = f"the server asks for {order.function!r}, which this client does not do"
            return Reply("app", message=refusal)
        place = Place(self.device, self.threads, order.timeout)
        return in_time(self.call(order.function, arrays, order.settings, place), order.timeout)


def to_bytes(arrays: Arrays, said: Order | Answer) -> Array:
    """Return arrays and what is said beside them as one array of bytes, whatever their dtypes."""
    buffer = io.BytesIO()
    send(buffer, {"said": msgspec.json.encode(said).decode()}, arrays)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


class _Header(msgspec.Struct):
    """What stands before the bytes of the arrays."""

    message: dict[str, str]
    arrays: list[tuple[Name, Name, Annotated[list[Count], Meta(max_length=_MOST_AXES)]]]


def from_bytes(content: Array, kind: type[Said], *, fail: Fail) -> tuple[dict[str, Array], Said]:
    """Return what `to_bytes` packed; of bytes that lie, nothing is allocated that they name."""
    if content.dtype != np.uint8 or content.ndim != 1:
        raise fail("it is no line of bytes")
    start = HEADER_LENGTH + int.from_bytes(content[:HEADER_LENGTH].tobytes(), "little")
    if start > content.size:
        raise fail("its bytes end before its header does")
    header = decode_json(content[HEADER_LENGTH:start].tobytes(), _Header, fail=fail)
    arrays: dict[str, Array] = {}
    for name, dtype_name, shape in header.arrays:
        dtype = _dtype(dtype_name, fail)
        if prod(max(1, count) for count in shape) * dtype.itemsize >= _MOST_BYTES:
            raise fail(f"'{name}' has the shape {shape}")
        end = start + dtype.itemsize * prod(shape)
        if end > content.size:
            raise fail(f"its bytes end inside '{name}'")
        arrays[name] = np.frombuffer(bytearray(content[start:end]), dtype).reshape(shape)
        start = end
    return arrays, decode_json(header.message.get("said", ""), kind, fail=fail)


def _dtype(name: str, fail: Fail) -> np.dtype[Any]:
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise fail(f"'{name}' is no dtype") from error
    if dtype.kind not in _NUMBERS or dtype.subdtype is not None or not dtype.isnative:
        raise fail(f"'{name}' is no dtype of numbers")
    return dtype


def unreadable(framework: str) -> Fail:
    """Return what makes the error of a message that can't be read."""

    def fail(reason: str) -> TrainingError:
        return TrainingError(f"a message of {framework}'s that fedmerge can't read ({reason})")

    return fail
