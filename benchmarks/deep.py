"""CPU time and memory of whole merges of nets that are run, next to what running them takes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import MEGABYTE, Result, cost_of, in_child, least_python
from benchmarks.oneshot_models import CifarNet
from benchmarks.processes import IMPORT_TORCH, RUNS, match_arguments
from benchmarks.runnable_nets import ResNet18, VisionTransformer
from fedmerge import ModelCode, load_model

MEMORY_BAR = 2.5  # × a file
FORWARD_BAR = 8.0  # × all clients run once over the inputs
INPUTS = 1000
SIDE = 32  # pixels


@dataclass(frozen=True)
class Merging:
    """Independent nets of one class, and how they are merged."""

    title: str
    net: Callable[[], nn.Module]
    clients: int
    flags: tuple[str, ...] = ()
    bar: float | None = None  # of CPU seconds beyond `import torch`
    memory_bar: float | None = None  # × a file, beyond torch

    @property
    def code(self) -> str:
        """The class as the command line names it."""
        return f"{self.net.__module__}:{self.net.__name__}"


MERGINGS = (
    Merging("LeNet-5 × 4 without data, --effort fast", CifarNet, 4, ("--effort", "fast"), bar=4),
    Merging("LeNet-5 × 4 without data", CifarNet, 4, bar=8),
    Merging(
        "ViT-B/16 × 2, --set probe=none --max-growth 1",
        VisionTransformer,
        2,
        flags=("--set", "probe=none", "--max-growth", "1"),
        bar=25,
        memory_bar=MEMORY_BAR,
    ),
    Merging("ResNet-18 × 2 by default", ResNet18, 2, bar=60),
)


def results() -> Iterator[Result]:
    """Yield what whole merges take, in processes of their own with one thread."""
    base = least_python(IMPORT_TORCH, repeats=RUNS, threads=1)
    yield from _against_forward(base.cost.cpu)
    for merging in MERGINGS:
        with tempfile.TemporaryDirectory() as folder:
            files = _saved(merging, Path(folder))
            size = Path(files[0]).stat().st_size
            arguments = match_arguments(files, f"{folder}/global.pt")
            flags = (*merging.flags, "--model", merging.code, "--set", "threads=1")
            run = least_python([*arguments, *flags], repeats=1, threads=1)
        beyond = run.peak - base.peak
        yield Result(
            f"{merging.title}: CPU time beyond import torch",
            run.cost.cpu - base.cost.cpu,
            "s",
            bar=merging.bar,
        )
        if merging.memory_bar is not None:
            yield Result(
                f"{merging.title}: peak memory beyond torch ÷ a file",
                beyond / size,
                "×",
                bar=merging.memory_bar,
                note=f"{beyond / MEGABYTE:.0f} MB; a file has {size / MEGABYTE:.0f} MB",
            )


def _against_forward(base: float) -> Iterator[Result]:
    """Yield what a merge with inputs takes ÷ what it takes to run all clients over them once."""
    merging = Merging("LeNet-5 × 4 with 1,000 inputs, --effort fast", CifarNet, 4)
    with tempfile.TemporaryDirectory() as folder:
        files = _saved(merging, Path(folder))
        inputs = f"{folder}/inputs.pt"
        torch.save({"x": torch.rand(INPUTS, 3, SIDE, SIDE)}, inputs)
        forward = in_child(forward_of, threads=1, files=files, code=merging.code, inputs=inputs)
        flags = ("--model", merging.code, "--probe-data", inputs, "--effort", "fast")
        arguments = [*match_arguments(files, f"{folder}/global.pt"), *flags]
        run = least_python([*arguments, "--set", "threads=1"], repeats=2, threads=1)
    beyond = run.cost.cpu - base
    yield Result(
        f"{merging.title}: CPU time beyond import torch ÷ all clients run once",
        beyond / forward["cpu"],
        "×",
        bar=FORWARD_BAR,
        note=f"{beyond:.3g} s against {forward['cpu']:.3g} s",
    )


def forward_of(files: list[str], code: str, inputs: str) -> Mapping[str, Any]:
    """Return the CPU seconds that running all clients once over the inputs takes."""
    x = torch.load(inputs)["x"]
    models = [load_model(ModelCode(code).build, file).eval() for file in files]

    def run() -> None:
        with torch.no_grad():
            for model in models:
                for batch in x.split(128):
                    model(batch)

    return {"cpu": cost_of(run, repeats=3).cpu}


def _saved(merging: Merging, folder: Path) -> list[str]:
    """Write independent clients, and return their paths."""
    files = []
    for number in range(merging.clients):
        torch.manual_seed(number)
        files.append(str(folder / f"client-{number}.pt"))
        torch.save(merging.net().state_dict(), files[-1])
    return files
