"""Averages of large files without a plan: against a plain loop and mergekit's linear merge.

mergekit has requirements of its own; the variable MERGEKIT names its `mergekit-yaml` in another
environment, e.g. `python -m venv mk && mk/bin/pip install mergekit`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.measure import MEGABYTE, ProcessCost, Result, in_child, run_program, run_python

CLIENTS = 2
LAYERS, WIDTH, INNER, TOKENS = 24, 1024, 2816, 32_000  # 374 million parameters
REPEATS = 3  # of each, in turns; the least counts
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "vocab_size": TOKENS,
    "dtype": "bfloat16",
}


def slow_results() -> Iterator[Result]:
    """Yield time and peak memory of averages of two models in half precision."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed in range(CLIENTS):
            in_child(write, threads=None, folder=str(folder / f"m{seed}"), seed=seed)
        size = (folder / "m0" / "model.safetensors").stat().st_size
        title = f"average of {CLIENTS} Llama-like models of {size / MEGABYTE:.0f} MB (bfloat16)"
        costs = measured(ways(folder))
        for way, found in costs.items():
            beyond = f"CPU {found.cost.cpu:.3g} s, peak {found.peak / MEGABYTE:.0f} MB"
            yield Result(f"{title}: {way}", found.cost.wall, "s", note=beyond)
        own = costs["fedmerge"]
        for way, other in costs.items():
            if way != "fedmerge":
                ratio = own.cost.cpu / other.cost.cpu
                bar = 1.0 if way == "mergekit" else None
                yield Result(f"{title}: CPU time ÷ {way}", ratio, "×", bar=bar)
                memory = own.peak / other.peak
                yield Result(f"{title}: peak memory ÷ {way}", memory, "×", bar=bar)


def measured(ways: dict[str, Callable[[], ProcessCost]]) -> dict[str, ProcessCost]:
    """Return the least of some runs of every way, in turns."""
    found: dict[str, ProcessCost] = {}
    for _ in range(REPEATS):
        for way, run in ways.items():
            cost = run()
            least = found.get(way, cost)
            found[way] = ProcessCost(least.cost.least(cost.cost), min(least.peak, cost.peak))
    return found


def ways(folder: Path) -> dict[str, Callable[[], ProcessCost]]:
    """Return what there is to compare, each as a whole process."""
    files = [str(folder / f"m{seed}" / "model.safetensors") for seed in range(CLIENTS)]
    out = str(folder / "out.safetensors")
    match = ["-m", "fedmerge", "match", *files, "--method", "average", "-o", out, "--force", "-q"]
    plain = ["-m", "benchmarks.plain_average", *files, str(folder / "plain.safetensors")]
    found: dict[str, Callable[[], ProcessCost]] = {
        "fedmerge": lambda: run_python(match),
        "a plain loop with safetensors": lambda: run_python(plain),
    }
    if (program := os.environ.get("MERGEKIT")) is not None:
        recipe = folder / "linear.yml"
        recipe.write_text(json.dumps(linear(folder)))  # which is YAML, too
        merge = [program, str(recipe), str(folder / "mergekit"), "--no-copy-tokenizer"]
        found["mergekit"] = lambda: run_program(merge)
    return found


def linear(folder: Path) -> dict[str, object]:
    """Return mergekit's recipe of the same average."""
    models = [
        {"model": str(folder / f"m{seed}"), "parameters": {"weight": 1 / CLIENTS}}
        for seed in range(CLIENTS)
    ]
    return {"merge_method": "linear", "dtype": "bfloat16", "models": models}


def write(folder: str, seed: int) -> dict[str, int]:
    """Write a model of random numbers as a Hugging Face folder, in a process of its own."""
    Path(folder).mkdir()
    rng = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (TOKENS, WIDTH), "lm_head.weight": (TOKENS, WIDTH)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        own = f"model.layers.{layer}."
        shapes |= {f"{own}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"}
        shapes |= {f"{own}mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
        shapes[f"{own}mlp.down_proj.weight"] = (WIDTH, INNER)
        norms += [f"{own}{name}_layernorm" for name in ("input", "post_attention")]
    state = {
        name: (0.02 * torch.randn(shape, generator=rng)).bfloat16()
        for name, shape in shapes.items()
    }
    state |= {f"{name}.weight": torch.ones(WIDTH).bfloat16() for name in norms}
    save_file(state, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
    return {"numbers": sum(tensor.numel() for tensor in state.values())}
