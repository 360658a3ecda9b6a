"""Start-up times and whole runs as processes, as ratios to `import torch`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.measure import Result, best_of, peak_memory, run_process
from benchmarks.vgg import independent, noisy_copies, vgg9_shapes

LENET = {
    "conv1.weight": (6, 3, 5, 5), "conv1.bias": (6,), "conv2.weight": (16, 6, 5, 5),
    "conv2.bias": (16,), "fc1.weight": (120, 400), "fc1.bias": (120,), "fc2.weight": (84, 120),
    "fc2.bias": (84,), "fc3.weight": (10, 84), "fc3.bias": (10,),
}  # fmt: skip


def results(folder: Path) -> Iterator[Result]:
    """Yield the times of small commands."""
    files = []
    for seed in range(4):
        files.append(str(folder / f"lenet-{seed}.pt"))
        torch.save(independent(LENET, seed), files[-1])
    output = str(folder / "global.pt")
    base = best_of(3, lambda: run_process(["-c", "import torch"]))
    yield Result("import torch", base, "s")
    for command in ("--help", "--version"):
        taken = best_of(3, lambda: run_process(["-m", "fedmerge", command]))  # noqa: B023
        yield Result(f"fedmerge {command}", taken, "s", bar=0.3)
    inspect = best_of(3, lambda: run_process(["-m", "fedmerge", "inspect", files[0]]))
    yield Result("fedmerge inspect of a small file ÷ import torch", inspect / base, "×", bar=1.5)
    arguments = ["-m", "fedmerge", "match", *files, "-o", output, "--force", "-q"]
    match = best_of(3, lambda: run_process(arguments))
    yield Result("fedmerge match of 4 small nets ÷ import torch", match / base, "×", bar=1.5)


def memory_results(folder: Path) -> Iterator[Result]:
    """Yield the peak memory of a match beyond the interpreter with torch."""
    from safetensors.torch import save_file

    files = []
    for number, state in enumerate(noisy_copies(vgg9_shapes(), 8)):
        files.append(str(folder / f"vgg-{number}.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, files[-1])
    base = peak_memory(["-c", "import torch, fedmerge.cli.match"])
    output = str(folder / "vgg.safetensors")
    peak = peak_memory(["-m", "fedmerge", "match", *files, "-o", output, "--force", "-q"])
    client = sum(4 * int(torch.Size(shape).numel()) for shape in vgg9_shapes().values())
    largest = 8 * 4 * (512 * 4096 + 512)
    ratio = (peak - base) / (client + largest)
    yield Result("match of 8 VGG-9 ÷ (one client + largest group of all)", ratio, "×", bar=1.5)
