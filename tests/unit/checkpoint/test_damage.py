import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmerge.checkpoint import open_checkpoint
from fedmerge.errors import CheckpointError, FedmergeError
from tests.unit.checkpoint.samples import save_legacy, save_safetensors, save_zip, state

SAVERS = [save_zip, save_legacy, save_safetensors]


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensors:
        checkpoint.read(name)
        checkpoint.tensor_digest(name)


@pytest.mark.parametrize("save", SAVERS)
def test_a_truncated_file_is_refused_wherever_it_ends(
    tmp_path: Path, save: Callable[[Any, Path], Path]
) -> None:
    whole = save(state(), tmp_path / "whole").read_bytes()
    path = tmp_path / "a.pt"
    lengths = {*range(0, len(whole), 37), *range(24), *range(len(whole) - 24, len(whole))}
    for length in sorted(lengths):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"a\.pt: ") as caught:
            read_all(path)
        assert caught.value.exit_code == 1
        assert "\n" not in caught.value.problem
    path.write_bytes(whole)
    read_all(path)


@pytest.mark.parametrize("save", SAVERS)
def test_half_a_file_is_called_damaged(tmp_path: Path, save: Callable[[Any, Path], Path]) -> None:
    path = save(state(), tmp_path / "a.pt")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"a\.pt: truncated or damaged \(.+\)"):
        open_checkpoint(path)


@pytest.mark.parametrize("save", SAVERS)
def test_flipped_bytes_give_a_checkpoint_or_an_error_of_ours(
    tmp_path: Path, save: Callable[[Any, Path], Path]
) -> None:
    content = {f"net.{name}": tensor for name, tensor in state().items()}
    content["half"] = torch.ones(3).bfloat16()
    whole = save(content, tmp_path / "whole").read_bytes()
    rng = random.Random(0)
    problems: list[str] = []
    for _ in range(600):
        flipped = bytearray(whole)
        for _ in range(rng.choice([1, 1, 4])):
            flipped[rng.randrange(len(whole))] = rng.randrange(256)
        path = tmp_path / "a"
        path.write_bytes(flipped)
        try:
            read_all(path)
        except FedmergeError as error:
            problems.append(error.problem)
    assert 100 < len(problems) < 600
    assert not [p for p in problems if "weights_only" in p], "torch's advice to load unsafely"
