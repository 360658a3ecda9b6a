import pytest
import torch

from fedmerge.errors import UsageError
from fedmerge.training import choose_devices, choose_precision


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", ("cuda:0", "cuda:1")),
        ("cuda", ("cuda:0", "cuda:1")),
        ("cuda:1", ("cuda:1",)),
        ("cuda:1,cuda:0", ("cuda:1", "cuda:0")),
        ("cuda:0,cuda", ("cuda:0", "cuda:1")),
        ("cpu", ("cpu",)),
    ],
)
def test_devices_are_those_asked_for(asked: str, expected: tuple[str, ...]) -> None:
    assert choose_devices(asked) == expected


@pytest.mark.usefixtures("no_gpu")
def test_without_accelerators_there_is_the_cpu() -> None:
    assert choose_devices("auto") == ("cpu",)
    with pytest.raises(UsageError, match="`device=cuda:0` is not there"):
        choose_devices("cuda:0")


@pytest.mark.parametrize(
    ("device", "mixed", "has_bfloat16", "expected", "is_scaled"),
    [
        ("cuda:0", True, True, torch.bfloat16, False),
        ("cuda:0", True, False, torch.float16, True),
        ("cuda:0", False, True, None, False),
        ("cpu", True, True, None, False),
        ("mps", True, False, None, False),
    ],
)
def test_mixed_precision_is_used_where_the_device_gains_from_it(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    mixed: bool,
    has_bfloat16: bool,
    expected: torch.dtype | None,
    is_scaled: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bfloat16)
    precision = choose_precision(device, mixed=mixed)
    assert precision.dtype == expected
    assert precision.is_scaled == is_scaled
