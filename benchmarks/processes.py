"""Start-up times and whole runs, as processes, next to what `import torch` takes."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.floor import Floor
from benchmarks.measure import Cost, Result, in_child, least_python, run_python
from benchmarks.nets import NETS, independent_clients, noisy_copies
from fedmerge import MatchOptions, match
from fedmerge.merging import option_name

RUNS = 5
STARTUP_BAR, RUN_BAR, CPU_BAR = 0.3, 1.5, 4.0
CLIENTS = 16
DEFAULTS: Mapping[str, Any] = {}
ONE_PASS: Mapping[str, Any] = {
    "max_growth": "none",
    "refine": 0,
}  # one matching at a fixed threshold
IMPORT_TORCH = ("-c", "import torch")
SAY_TORCH = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
from fedmerge.cli import main
sys.argv[0] = "fedmerge"
main()
"""


def startup_results() -> Iterator[Result]:
    """Yield the times of small commands."""
    with tempfile.TemporaryDirectory() as folder:
        files = save_pt(Path(folder), 4)
        took = _in_turns(
            {
                "torch": IMPORT_TORCH,
                "--help": ("-m", "fedmerge", "--help"),
                "--version": ("-m", "fedmerge", "--version"),
                "inspect": ("-m", "fedmerge", "inspect", files[0]),
                "match": match_arguments(files, f"{folder}/global.pt"),
            }
        )
    yield Result("import torch", took["torch"].wall, "s")
    for command in ("--help", "--version"):
        yield Result(f"fedmerge {command}", took[command].wall, "s", bar=STARTUP_BAR)
        yield Result(
            f"fedmerge {command}: torch imported", float(imports_torch(command)), "", bar=0
        )
    for command, what in (("inspect", "a LeNet-5 file"), ("match", "4 LeNet-5 files")):
        yield Result(
            f"fedmerge {command} of {what} ÷ import torch",
            took[command].wall / took["torch"].wall,
            "×",
            bar=RUN_BAR,
            note=f"in CPU time {took[command].cpu / took['torch'].cpu:.2f} ×",
        )


def imports_torch(*arguments: str) -> bool:
    """Return whether a command of fedmerge imports torch."""
    done = subprocess.run(
        [sys.executable, "-c", SAY_TORCH, *arguments], check=True, capture_output=True, text=True
    )
    return done.stderr.split()[-1] == "True"


def _in_turns(commands: Mapping[str, Sequence[str]]) -> dict[str, Cost]:
    """Return the least costs of processes that are run one after another, several times."""
    took = dict.fromkeys(commands, Cost(math.inf, math.inf))
    for _ in range(RUNS):
        for name, arguments in commands.items():
            took[name] = took[name].least(run_python(arguments).cost)
    return took


def run_results() -> Iterator[Result]:
    """Yield whole merges of VGG-9 copies in safetensors, and their CPU time ÷ matrix products."""
    with tempfile.TemporaryDirectory() as folder:
        files = save_safetensors(Path(folder), "VGG-9", CLIENTS)
        output = f"{folder}/global.safetensors"
        title = f"fedmerge match, {CLIENTS} VGG-9 copies in safetensors"
        own = least_python(match_arguments(files, output), repeats=2)
        yield Result(f"{title}, all cores", own.cost.wall, "s", note=f"CPU {own.cost.cpu:.3g} s")
        base = least_python(IMPORT_TORCH, repeats=RUNS, threads=1).cost.cpu
        for options in (ONE_PASS, DEFAULTS):
            flags = [
                text for name, value in options.items() for text in (option_name(name), str(value))
            ]
            arguments = [*match_arguments(files, output), "--set", "threads=1", *flags]
            beyond = least_python(arguments, repeats=RUNS).cost.cpu - base
            products = in_child(products_of, threads=1, files=files, options=options)
            yield Result(
                f"match {' '.join(flags) or 'by default'}, CPU beyond import torch ÷ its products",
                beyond / products["cpu"],
                "×",
                bar=CPU_BAR,
                note=f"{beyond:.3g} s against {products['cpu']:.3g} s of {products['steps']} steps",
            )


def products_of(files: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CPU seconds of one float32 product per step of a merge of these files."""
    floor = Floor()
    with floor.watching():
        match(list(files), MatchOptions(**options))
    return {"cpu": floor.products.cpu, "steps": floor.steps}


def match_arguments(files: Sequence[str], output: str) -> list[str]:
    """Return the command line of a quiet merge that may be repeated."""
    return ["-m", "fedmerge", "match", *files, "-o", output, "--force", "-q"]


def save_pt(folder: Path, count: int) -> list[str]:
    """Write independent LeNet-5 clients in torch's format, and return their paths."""
    import torch

    files = []
    for number, state in enumerate(independent_clients(NETS["LeNet-5"](), count)):
        files.append(str(folder / f"client-{number}.pt"))
        torch.save(state, files[-1])
    return files


def save_safetensors(folder: Path, net: str, count: int) -> list[str]:
    """Write permuted noisy copies in safetensors one by one, and return their paths."""
    from safetensors.torch import save_file

    files = []
    for number, state in enumerate(noisy_copies(NETS[net](), count)):
        files.append(str(folder / f"client-{number}.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, files[-1])
    return files
