"""Peak memory of whole merges, beyond the interpreter with its libraries loaded."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import MEGABYTE, Result, in_child, run_python
from benchmarks.nets import NETS
from benchmarks.processes import match_arguments, save_safetensors
from fedmerge import MatchOptions, plan
from fedmerge.merging import open_clients

CLIENTS = 8
MEMORY_BAR = 1.5
FLOAT32 = 4  # bytes
SPARE_DISK = 1.5  # times the files
LOADED = "import torch, scipy.optimize, lap, safetensors, fedmerge.cli.match"


def results() -> Iterator[Result]:
    """Yield the peak of a merge of small files."""
    yield from _measured("VGG-9", CLIENTS)


def slow_results() -> Iterator[Result]:
    """Yield the peak of a merge of 400 MB files, if the disk holds them."""
    yield from _measured("large VGG", CLIENTS)


def _measured(net: str, clients: int) -> Iterator[Result]:
    size = FLOAT32 * NETS[net]().numbers
    title = f"fedmerge match, {clients} {net} copies of {size / MEGABYTE:.0f} MB"
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < SPARE_DISK * (clients + 1) * size:
        note = f"not run: {free / MEGABYTE:.0f} MB of disk are free"
        yield Result(f"{title}: files", (clients + 1) * size / MEGABYTE, "MB", note=note)
        return
    with tempfile.TemporaryDirectory() as folder:
        in_child(write, threads=None, folder=folder, net=net, clients=clients)
        files = [str(path) for path in sorted(Path(folder).glob("client-*.safetensors"))]
        base = run_python(["-c", LOADED])
        run = run_python(match_arguments(files, f"{folder}/global.safetensors"))
        group = in_child(largest_group, threads=None, file=files[0])["bytes"]
    beyond = run.peak - base.peak
    allowed = size + clients * group
    yield Result(title, run.cost.wall, "s", note=f"CPU {run.cost.cpu:.3g} s")
    yield Result(
        f"{title}: peak memory ÷ (a client + largest group of all)",
        beyond / allowed,
        "×",
        bar=MEMORY_BAR,
        note=f"{beyond / MEGABYTE:.0f} MB beyond the libraries' {base.peak / MEGABYTE:.0f} MB; "
        f"one client and the group: {allowed / MEGABYTE:.0f} MB",
    )


def write(folder: str, net: str, clients: int) -> dict[str, int]:
    """Write the clients' files, in a process of its own for its memory's sake."""
    return {"files": len(save_safetensors(Path(folder), net, clients))}


def largest_group(file: str) -> dict[str, int]:
    """Return the bytes of one client's tensors that the largest group is an axis of."""
    (client,) = open_clients([Path(file)], MatchOptions().reading)
    found = plan([file])
    groups = ({name for name, _ in found.axes_of(group.name)} for group in found.groups)
    sizes = (FLOAT32 * sum(client.tensors[name].size for name in names) for names in groups)
    return {"bytes": max(sizes)}
