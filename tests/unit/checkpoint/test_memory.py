"""Peak memory of reading and writing, measured in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.samples import save_safetensors, save_sharded, save_zip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="no /proc elsewhere"),
]

_TENSORS = 64  # of 4 MB each
_MOST = 64  # MB, a quarter of all: far above one tensor and what allocators keep, which varies

_PEAK = """
import re, sys
from pathlib import Path
import numpy as np
from fedmerge.checkpoint import open_checkpoint, write_model
from fedmerge.values import TensorInfo

def peak():
    # ru_maxrss would include the parent's peak before exec
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", status)[1]) // 1024
"""
_READ = """
checkpoint = open_checkpoint(sys.argv[1])
checkpoint.read("small.weight")
before = peak()
for name in checkpoint.tensors:
    checkpoint.read(name)
print(peak() - before)
"""
_WRITE = """
def write(path, count, size):
    infos = {f"fc{i}.weight": TensorInfo((size,), "float32") for i in range(count)}
    write_model(path, infos, lambda _: np.ones(size, dtype=np.float32), shard_size=SHARD)

write(sys.argv[1] + "/small" + SUFFIX, 1, 2)
before = peak()
write(sys.argv[1] + "/large" + SUFFIX, %d, 1 << 20)
print(peak() - before)
"""


def grown(script: str, argument: Path) -> int:
    run = [sys.executable, "-c", _PEAK + script, str(argument)]
    return int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_reading_safetensors_needs_the_memory_of_one_tensor(tmp_path: Path) -> None:
    tensors = {f"fc{i}.weight": torch.zeros(1 << 20) for i in range(_TENSORS)}
    tensors["small.weight"] = torch.zeros(2)
    assert grown(_READ, save_sharded(tensors, tmp_path, save_safetensors)) < _MOST


def test_reading_a_torch_file_leaves_no_mapped_pages_resident(tmp_path: Path) -> None:
    tensors = {f"fc{i}.weight": torch.zeros(1 << 10, 1 << 10) for i in range(_TENSORS)}
    tensors["fc0.weight"] = tensors["fc0.weight"].T  # dense, but in another order
    tensors["small.weight"] = torch.zeros(2)
    assert grown(_READ, save_zip(tensors, tmp_path / "a.pt")) < _MOST


def test_a_memory_map_would_leave_them(tmp_path: Path) -> None:
    tensors = {f"fc{i}.weight": torch.zeros(1 << 20) for i in range(_TENSORS)}
    mapped = """
import torch
before = peak()
for tensor in torch.load(sys.argv[1], mmap=True).values():
    tensor.clone()
print(peak() - before)
"""
    assert grown(mapped, save_zip(tensors, tmp_path / "a.pt")) > 3 * _MOST


@pytest.mark.parametrize(
    ("suffix", "shard_size"), [(".pt", None), (".safetensors", None), (".safetensors", 10**7)]
)
def test_writing_needs_the_memory_of_one_tensor(
    tmp_path: Path, suffix: str, shard_size: int | None
) -> None:
    settings = f"SUFFIX, SHARD = {suffix!r}, {shard_size}\n"
    assert grown(settings + _WRITE % _TENSORS, tmp_path) < _MOST
    large = sum(path.stat().st_size for path in tmp_path.glob("large*"))
    assert large > _TENSORS << 22
