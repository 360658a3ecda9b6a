"""Whole merges of folders as large as people have them: GPT-2 and ViT-B, made from configurations.

Two independent models at random weights, and two that differ little from one, as after tuning.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.measure import MEGABYTE, Result, in_child, least_python
from benchmarks.processes import IMPORT_TORCH, RUNS

NOISE = 0.02  # of a tensor's deviation, that perturbed models differ by
SHARED, APART = "perturbed", "independent"
WEIGHTS_ALONE = ("--set", "probe=none", "--max-growth", "1")


@dataclass(frozen=True)
class Folder:
    """A model of a library's configuration, with its class."""

    title: str
    model: str
    config: str


@dataclass(frozen=True)
class Merging:
    """Two folders, and how they are merged."""

    folder: Folder
    pair: str
    flags: tuple[str, ...] = ()
    seconds: float | None = None  # the bar of CPU time beyond `import torch`
    memory: float | None = None  # × a file, beyond torch

    @property
    def title(self) -> str:
        """What is merged how."""
        how = " ".join(self.flags) or "by default"
        return f"{self.folder.title} × 2, {self.pair}, {how}"


GPT2 = Folder("GPT-2 (124M)", "GPT2LMHeadModel", "GPT2Config")
VIT = Folder("ViT-B/16", "ViTForImageClassification", "ViTConfig")
MERGINGS = (
    Merging(GPT2, APART, WEIGHTS_ALONE),
    Merging(GPT2, SHARED, WEIGHTS_ALONE),
    Merging(VIT, APART, WEIGHTS_ALONE, seconds=25, memory=2.5),
    Merging(VIT, SHARED, WEIGHTS_ALONE),
    Merging(GPT2, SHARED),
    Merging(VIT, SHARED),
    Merging(GPT2, APART),
    Merging(VIT, APART),
)


def slow_results() -> Iterator[Result]:
    """Yield time and peak memory of every merge, each a process with one thread."""
    base = least_python(IMPORT_TORCH, repeats=RUNS, threads=1)
    with tempfile.TemporaryDirectory() as name:
        for merging in MERGINGS:
            folders = written(merging, Path(name))
            size = (folders[0] / "model.safetensors").stat().st_size
            out = str(Path(name) / "out")
            command = ["-m", "fedmerge", "match", *map(str, folders), "-o", out, "--force", "-q"]
            run = least_python([*command, *merging.flags], repeats=1, threads=1)
            beyond = run.peak - base.peak
            seconds = run.cost.cpu - base.cost.cpu
            what = "CPU time beyond import torch"
            yield Result(f"{merging.title}: {what}", seconds, "s", bar=merging.seconds)
            yield Result(
                f"{merging.title}: peak memory beyond torch ÷ a file",
                beyond / size,
                "×",
                bar=merging.memory,
                note=f"{beyond / MEGABYTE:.0f} MB; a file has {size / MEGABYTE:.0f} MB",
            )


def written(merging: Merging, place: Path) -> list[Path]:
    """Write a pair's folders if they are not there yet, in a process of its own."""
    kind = merging.folder
    folders = [place / f"{kind.model}-{merging.pair}-{number}" for number in range(2)]
    if not folders[0].exists():
        given = {"model": kind.model, "config": kind.config, "pair": merging.pair}
        in_child(write, threads=None, folders=list(map(str, folders)), **given)
    return folders


def write(folders: list[str], model: str, config: str, pair: str) -> Mapping[str, int]:
    """Build models of a library's own sizes, and save them."""
    import transformers

    kind, settings = getattr(transformers, model), getattr(transformers, config)()
    for number, folder in enumerate(folders):
        torch.manual_seed(number if pair == APART else 0)
        built = kind(settings)
        if pair == SHARED:
            torch.manual_seed(1 + number)
            with torch.no_grad():
                for tensor in built.parameters():
                    tensor.add_(NOISE * tensor.std(correction=0) * torch.randn_like(tensor))
        built.save_pretrained(folder)
    return {"folders": len(folders)}
