"""What `torch.save` writes, read without torch: the same values as torch's own loader gives."""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmerge.checkpoint import open_checkpoint
from fedmerge.errors import CheckpointError
from tests.unit.checkpoint.samples import save_legacy, save_zip, state

Save = Callable[[object, Path], Path]


def attributed() -> Tensor:
    tensor = torch.ones(3)
    tensor.note = "kept by torch"  # type: ignore[attr-defined]
    return tensor


def quantised() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates them
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


SAVES = pytest.mark.parametrize("save", [save_zip, save_legacy])
BASE = torch.arange(24.0)
TENSORS: dict[str, Callable[[], Tensor]] = {
    "parameter": lambda: nn.Parameter(torch.ones(2, 3)),
    "buffer": lambda: nn.Buffer(torch.ones(2)),
    "attributed": attributed,
    "part": lambda: BASE[3:9],
    "strided": lambda: BASE.reshape(4, 6)[1::2, ::3],
    "transposed": lambda: BASE.reshape(4, 6).T,
    "expanded": lambda: torch.tensor([1.0, 2.0]).expand(3, 2),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    **{
        str(dtype): lambda dtype=dtype: torch.tensor([0, 1, 1]).to(dtype)  # type: ignore[misc]
        for dtype in (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
            *(torch.uint16, torch.uint32, torch.uint64),
        )
    },
}
OTHERS: dict[str, Any] = {
    "text": "a",
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab"),
    "set": {1, 2},
    "frozen": frozenset({1}),
    "complex": 1 + 2j,
    "counter": Counter("aab"),
    "size": torch.Size([2, 3]),
    "dtype": torch.float16,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "numbers": [1, -1, 2**40, -(2**80), 1.5, True, None],
    "keys": {(1, 2): "a", 1.5: "b", None: "c", b"d": "d"},
}


@SAVES
@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_read_as_it_was_saved(tmp_path: Path, save: Save, name: str) -> None:
    expected = TENSORS[name]()
    path = save({"w": expected, "fc.weight": torch.ones(2, 2)}, tmp_path / "a.pt")
    found = open_checkpoint(path).read_torch("w")
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@SAVES
@pytest.mark.parametrize("name", OTHERS)
def test_what_lies_beside_the_tensors_does_no_harm(tmp_path: Path, save: Save, name: str) -> None:
    if name == "frozen":
        pytest.skip("torch's own loader knows no frozen sets, nor do we")
    path = save({"net": state(), "other": OTHERS[name]}, tmp_path / "a.pt")
    assert torch.load(path)["net"].keys() == state().keys()  # torch allows it, too
    checkpoint = open_checkpoint(path)
    assert checkpoint.location == "net"
    assert list(checkpoint.tensors) == list(state())


@SAVES
def test_a_state_dict_of_a_module_keeps_its_order_and_ties(tmp_path: Path, save: Save) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    content = model.state_dict()
    assert isinstance(content, OrderedDict)  # which has metadata beside its entries
    checkpoint = open_checkpoint(save(content, tmp_path / "a.pt"))
    assert list(checkpoint.tensors) == list(content)
    assert dict(checkpoint.aliases) == {"2.weight": "0.weight"}
    for name, tensor in content.items():
        assert torch.equal(checkpoint.read_torch(name), tensor)


@SAVES
@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (lambda: torch.eye(3).to_sparse(), "is sparse"),
        (lambda: torch.ones(2, device="meta"), "is a meta tensor"),
        (quantised, "is quantised"),
        (lambda: torch.ones(2, dtype=torch.complex64), "has dtype complex64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_cannot_be_merged_are_named(
    tmp_path: Path, save: Save, tensor: Callable[[], Tensor], problem: str
) -> None:
    path = save({"odd.weight": tensor(), **state()}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"'odd\.weight' {problem}"):
        open_checkpoint(path)
