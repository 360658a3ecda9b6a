import io

import numpy as np
import pytest

from fedmerge.engines import receive, send
from fedmerge.values import Array


def sent(arrays: dict[str, Array]) -> bytes:
    stream = io.BytesIO()
    send(stream, {"status": "ok"}, arrays)
    return stream.getvalue()


def test_messages_follow_one_another() -> None:
    stream = io.BytesIO(sent({"x": np.arange(3)}) + sent({}))
    message, arrays = receive(stream)
    assert (message, arrays["x"].tolist()) == ({"status": "ok"}, [0, 1, 2])
    assert receive(stream) == ({"status": "ok"}, {})


def test_a_message_is_its_header_and_the_numbers() -> None:
    header = b'{"message": {"status": "ok"}, "arrays": [["x", "<f4", [2]]]}'
    expected = len(header).to_bytes(8, "little") + header + np.array([1, 2], "<f4").tobytes()
    assert sent({"x": np.array([1, 2], "<f4")}) == expected


@pytest.mark.parametrize("cut", [0, 4, 20, -1])
def test_a_stream_that_ends_inside_a_message_is_noticed(cut: int) -> None:
    whole = sent({"x": np.arange(3)})
    with pytest.raises(EOFError, match="ended inside a message"):
        receive(io.BytesIO(whole[:cut]))


def test_received_arrays_can_be_written_to() -> None:
    _, arrays = receive(io.BytesIO(sent({"x": np.zeros(2)})))
    arrays["x"][0] = 1
    assert arrays["x"].tolist() == [1, 0]
