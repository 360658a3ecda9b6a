"""Many small clients: what a merge and a round take, and what two levels of merging lose.

`python benchmarks/many_clients.py scaling --results r.json` measures 10 to 1,000 clients,
`… sites mnist.npz --results r.json` merges within sites and between them,
`… page --results r.json --docs docs` writes the page; nothing is run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, only its folder is

from benchmarks.many_clients_page import Results, write_page
from benchmarks.many_clients_runs import COUNTS, Measured, measured
from benchmarks.many_clients_sites import SCENES, Scene, Scored, scored
from benchmarks.report import machine
from benchmarks.results import read_runs, write_runs

RESULTS = Path("many-clients-results.json")  # in the current folder: those of the page stay


@dataclass
class Kept:
    """The results of a file, written again with every one that is added."""

    path: Path
    results: Results = field(init=False)

    def __post_init__(self) -> None:
        self.results = read_results(self.path)

    def add(self, *, scaling: Sequence[Measured] = (), sites: Sequence[Scored] = ()) -> None:
        """Keep further results; those of the same command and clients are replaced."""
        fresh = {(run.command, run.clients) for run in scaling}
        others = [r for r in self.results.scaling if (r.command, r.clients) not in fresh]
        self.results = Results(machine(), (*others, *scaling), (*self.results.sites, *sites))
        write_runs(self.path, _to_json(self.results))


def main(words: Sequence[str] | None = None) -> None:
    """Measure, or write the page of what was measured."""
    given = _arguments(words)
    kept = Kept(given.results)
    if given.what == "page":
        write_page(kept.results, given.docs)
    elif given.what == "scaling":
        for clients in given.clients:
            for run in measured(clients, given.engine):
                kept.add(scaling=[run])
                print(run, file=sys.stderr, flush=True)
    else:
        torch.set_num_threads(1)  # the nets are too small to gain from more
        done = {run.scene for run in kept.results.sites}
        for scene in (scene for scene in SCENES if scene not in done):
            found = list(scored(scene, given.data))
            kept.add(sites=found)
            shown = ", ".join(f"{run.method} {run.accuracy:.1f}" for run in found)
            print(f"{scene}: {shown}", file=sys.stderr, flush=True)


def read_results(path: Path) -> Results:
    """Return what a results file holds, nothing if there is none."""
    runs = read_runs(path)
    return Results(
        next((run["values"] for run in runs if run["kind"] == "machine"), {}),
        tuple(Measured(**run["values"]) for run in runs if run["kind"] == "scaling"),
        tuple(_scored(run["values"]) for run in runs if run["kind"] == "sites"),
    )


def _scored(values: dict[str, Any]) -> Scored:
    return Scored(**{**values, "scene": Scene(**values["scene"])})


def _to_json(results: Results) -> Iterator[dict[str, Any]]:
    yield {"kind": "machine", "values": dict(results.machine)}
    for run in results.scaling:
        yield {"kind": "scaling", "values": asdict(run)}
    for score in results.sites:
        yield {"kind": "sites", "values": asdict(score)}


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/many_clients.py", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    scaling = commands.add_parser("scaling")
    scaling.add_argument("--clients", type=int, nargs="+", default=COUNTS)
    scaling.add_argument("--engine", default="local", help="of retrain (default: local)")
    commands.add_parser("sites").add_argument("data", type=Path, help="MNIST as .npz")
    commands.add_parser("page").add_argument("--docs", type=Path, required=True)
    for command in commands.choices.values():
        command.add_argument(
            "--results", type=Path, default=RESULTS, help=f"kept and added to (default: {RESULTS})"
        )
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
