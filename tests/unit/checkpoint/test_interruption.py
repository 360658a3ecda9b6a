"""A process that is killed while it overwrites a model leaves the old one or the new one."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedmerge.checkpoint import open_checkpoint, read_record, written_path

_WRITER = """
import itertools, sys
import numpy as np
from fedmerge.checkpoint import write_model
from fedmerge.values import TensorInfo

infos = {f"fc{i}.weight": TensorInfo((256, 256), "float32") for i in range(6)}
for version in itertools.count():
    values = np.full((256, 256), version, dtype=np.float32)
    write_model(sys.argv[1], infos, lambda _: values, force=True, shard_size=SHARD,
                record=lambda digests: {"version": version, "tensors": dict(digests)})
    print(version, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
@pytest.mark.parametrize(
    ("suffix", "shard_size"), [(".pt", None), (".safetensors", None), (".safetensors", 600_000)]
)
@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_model(
    tmp_path: Path, suffix: str, shard_size: int | None
) -> None:
    path = tmp_path / f"global{suffix}"
    opened = written_path(path, sharded=shard_size is not None)
    writer = f"SHARD = {shard_size}\n" + _WRITER
    rng = random.Random(0)
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", writer, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        time.sleep(rng.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        checkpoint = open_checkpoint(opened)
        values = {value for name in checkpoint.tensors for value in checkpoint.read(name).flat}
        assert len(checkpoint.tensors) == 6
        assert len(values) == 1
        assert "version" in read_record(opened)
