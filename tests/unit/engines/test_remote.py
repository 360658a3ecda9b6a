"""Messages over other frameworks that lie about what they hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedmerge.engines import Answer, Reply, answer_of, from_bytes, to_bytes, unreadable
from fedmerge.errors import TrainingError
from fedmerge.values import Array

HEADER_LENGTH = 8  # bytes that say how long a header is
FAIL = unreadable("a framework")


def message(dtype: str, shape: list[int], content: bytes = b"") -> Array:
    """Return the bytes of an answer with one array as its header describes it."""
    said = to_bytes({}, answer_of(Reply("ok")))
    length = int.from_bytes(said[:HEADER_LENGTH].tobytes(), "little")
    header: dict[str, Any] = json.loads(said[HEADER_LENGTH : HEADER_LENGTH + length].tobytes())
    text = json.dumps({**header, "arrays": [["a", dtype, shape]]}).encode()
    whole = len(text).to_bytes(HEADER_LENGTH, "little") + text + content
    return np.frombuffer(whole, np.uint8)


def test_an_array_is_what_its_header_says() -> None:
    arrays, answer = from_bytes(message("<f4", [1], b"\0\0\x80\x3f"), Answer, fail=FAIL)
    assert arrays["a"].tolist() == [1.0]
    assert answer.status == "ok"


@pytest.mark.parametrize(
    ("dtype", "shape", "says"),
    [
        ("<f4", [0, 2**53, 2**53], "has the shape"),
        ("<f4", [1] * 65, "length <= 32"),
        ("<f4", [2**53] * 300_000, "length <= 32"),  # whose product takes minutes
        ("<f4", [2], "end inside 'a'"),
        ("O", [1], "no dtype of numbers"),
        ("f4,f4", [1], "no dtype of numbers"),
        ("import os", [1], "is no dtype"),
    ],
)
def test_shapes_and_dtypes_that_lie_are_refused(dtype: str, shape: list[int], says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        from_bytes(message(dtype, shape), Answer, fail=FAIL)


@pytest.mark.parametrize("content", [np.array(3, np.uint8), np.zeros((9, 9), np.uint8)])
def test_what_is_no_line_of_bytes_is_refused(content: Array) -> None:
    with pytest.raises(TrainingError, match="no line of bytes"):
        from_bytes(content, Answer, fail=FAIL)
