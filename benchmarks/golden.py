"""What merges and rounds give to the byte, over the zoo: the net under every change of the layout.

    python -m benchmarks.golden --write before.json     # with the code as it was
    python -m benchmarks.golden --compare before.json   # with the code as it is

Bytes depend on the machine's arithmetic, so they are compared on one machine and not kept in git.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from fedmerge.cli import run
from tests.end_to_end.retraining import make_scene
from tests.model_zoo import ZOO as CODE_ZOO
from tests.zoo import ZOO as FILE_ZOO

CLIENTS = ("a.pt", "b.pt")
PROBED = ("mlp", "lenet", "resnet B", "vit", "lstm, 2 layers", "language model")
PROBES: dict[str, Sequence[str]] = {
    "default": (),
    "noise": ("--set", "probe=noise"),
    "data": ("--probe-data", "probes.npz"),
    "none": ("--set", "probe=none"),
    "growth 1": ("--max-growth", "1"),
}
ROUNDS: dict[str, Sequence[str]] = {
    "fedma": ("--passes", "2"),
    "fedavg": ("--method", "fedavg", "--rounds", "3"),
    "fedprox": ("--method", "fedprox", "--rounds", "3", "--set", "mu=0.1"),
}
_NET = "from tests.model_zoo import ZOO\nbuild = ZOO[{name!r}].build\n"


def main() -> None:
    """Write the digests, or compare them with those of another version."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.golden", description=__doc__)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--write", type=Path, metavar="FILE")
    place.add_argument("--compare", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = dict(digests())
    if arguments.write:
        arguments.write.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} cases written")
        return
    expected = json.loads(arguments.compare.read_text())
    odd = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    for name in odd:
        print(f"differs: {name}: {found.get(name)}, expected {expected.get(name)}")
    print(f"{len(found) - len(odd)} of {len(expected)} cases are the same")
    sys.exit(bool(odd))


def digests() -> Iterator[tuple[str, list[str]]]:
    """Yield every case with the digests of what it writes, or with how it is refused."""
    for name in FILE_ZOO:
        with _folder() as folder:
            _save(folder, [FILE_ZOO[name].fresh(seed) for seed in (1, 2)])
            yield f"files, {name}", _match(folder)
    for name in PROBED:
        with _folder() as folder:
            model = _with_code(folder, name)
            for kind, options in PROBES.items():
                yield f"code, {name}, {kind}", _match(folder, *model, *options, "--force")
            _run(folder, "plan", *CLIENTS, *model, "-o", "plan.json")
            yield f"plan, {name}", _match(folder, "--plan", "plan.json", "--force")
    for name, options in ROUNDS.items():
        with _folder() as folder:
            command = make_scene(folder).command("g.pt", *options)
            yield f"rounds, {name}", _outcome(folder, run_quietly(command))


def _with_code(folder: Path, name: str) -> list[str]:
    """Write two clients of a model, its code and inputs to probe it with; return how to name it."""
    model = CODE_ZOO[name]
    built = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        built.append(model.build())
    _save(folder, built)
    (folder / "net.py").write_text(_NET.format(name=name))
    first = model.inputs()[0].numpy()
    rng = np.random.default_rng(0)
    shape = (64, *first.shape[1:])
    is_token = first.dtype.kind == "i"
    x = rng.integers(0, model.tokens, shape) if is_token else rng.standard_normal(shape)
    np.savez(folder / "probes.npz", x=x if is_token else x.astype(np.float32))
    shapes = [",".join(map(str, tensor.shape)) for tensor in model.inputs()]
    dtypes = ["long" if is_token else "float32"]
    return [
        *("--model", "net.py:build"),
        *(word for shape in shapes for word in ("--input-shape", shape)),
        *(word for dtype in dtypes for word in ("--set", f"input_dtype={dtype}")),
    ]


def _save(folder: Path, models: Sequence[torch.nn.Module]) -> None:
    for name, model in zip(CLIENTS, models, strict=True):
        torch.save(model.state_dict(), folder / name)


def _match(folder: Path, *options: str) -> list[str]:
    return _outcome(folder, _run(folder, "match", *CLIENTS, "-o", "g.pt", *options))


def _run(folder: Path, *arguments: str) -> int:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return run_quietly(arguments)
    finally:
        os.chdir(before)


def run_quietly(arguments: Sequence[str]) -> int:
    """Run a command without a word, and return its exit code."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run(list(arguments))


def _outcome(folder: Path, code: int) -> list[str]:
    """Return the exit code, and the digests of model and record where there are any."""
    if code not in (0, 5):
        return [str(code)]
    record = json.loads((folder / "g.pt.json").read_bytes())
    del record["options"]  # their names may change where results don't
    written = (folder / "g.pt").read_bytes(), json.dumps(record, sort_keys=True).encode()
    return [str(code), *(hashlib.sha256(content).hexdigest() for content in written)]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


if __name__ == "__main__":
    main()
