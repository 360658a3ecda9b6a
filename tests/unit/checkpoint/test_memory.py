"""Peak memory of reading and writing, measured in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoint.samples import save_safetensors, save_sharded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB there")

_TENSORS = 24  # of 4 MB each
_MOST = 24  # MB, a quarter of all; one tensor and what allocators keep

_PEAK = """
import resource, sys
import numpy as np
from fedmerge.checkpoint import open_checkpoint, write_model
from fedmerge.types.clients import TensorInfo

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
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
    write_model(path, infos, lambda _: np.ones(size, dtype=np.float32))

write(sys.argv[1] + "/small.safetensors", 1, 2)
before = peak()
write(sys.argv[1] + "/large.safetensors", %d, 1 << 20)
print(peak() - before)
"""


def grown(script: str, argument: Path) -> int:
    run = [sys.executable, "-c", _PEAK + script, str(argument)]
    return int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)


def test_reading_safetensors_needs_the_memory_of_one_tensor(tmp_path: Path) -> None:
    tensors = {f"fc{i}.weight": torch.zeros(1 << 20) for i in range(_TENSORS)}
    tensors["small.weight"] = torch.zeros(2)
    assert grown(_READ, save_sharded(tensors, tmp_path, save_safetensors)) < _MOST


def test_writing_safetensors_needs_the_memory_of_one_tensor(tmp_path: Path) -> None:
    assert grown(_WRITE % _TENSORS, tmp_path) < _MOST
    assert (tmp_path / "large.safetensors").stat().st_size > _TENSORS << 22
