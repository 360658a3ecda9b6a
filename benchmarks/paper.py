"""The paper's comparison at the size of two CPU cores: FedMA against FedAvg, FedProx, ensembles.

`python benchmarks/paper.py mnist mnist.npz --results r.json` runs what the results file lacks,
`python benchmarks/paper.py page --results r.json --docs docs` writes the page; nothing is run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, only its folder is

from benchmarks.paper_data import ON
from benchmarks.paper_page import write_page
from benchmarks.paper_runs import Outcome, carry_out, from_json, to_json
from benchmarks.paper_suites import METHODS, SUITES, Experiment, digest, experiments
from benchmarks.results import read_runs, write_runs

Results = dict[Experiment, Outcome]
RESULTS = Path("paper-results.json")  # in the current folder: those of the page stay as they are


def main(words: Sequence[str] | None = None) -> None:
    """Run experiments, or write the page of those that were run."""
    arguments = _arguments(words)
    results = read_results(arguments.results)
    if arguments.what == "page":
        write_page(results, arguments.docs)
        return
    torch.set_num_threads(1)  # the nets are too small to gain from more
    source = arguments.data
    asked = experiments(
        arguments.what,
        digest(source),
        arguments.seeds,
        parts=arguments.parts,
        methods=arguments.methods,
        changes=_changes(arguments),
        quick=arguments.quick,
    )
    for experiment in asked:
        if experiment not in results:
            results[experiment] = carry_out(experiment, source)
            write_runs(arguments.results, starmap(to_json, results.items()))
        print(_line(experiment, results[experiment]), file=sys.stderr, flush=True)


def read_results(path: Path) -> Results:
    """Return the runs of a results file."""
    return dict(map(from_json, read_runs(path)))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/paper.py", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in SUITES:
        command = commands.add_parser(name)
        command.add_argument("data", type=Path, help="the data file")
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        command.add_argument("--parts", nargs="+", default=[], choices=list(SUITES[name].parts))
        command.add_argument("--methods", nargs="+", default=[], choices=METHODS)
        command.add_argument("--on", choices=ON, default="test", help="for choosing: validation")
        command.add_argument("--quick", action="store_true", help="a trial of a minute")
        command.add_argument(
            "--set", nargs="+", default=[], metavar="NAME=VALUE", help="other settings, as JSON"
        )
    commands.add_parser("page").add_argument("--docs", type=Path, required=True)
    for command in commands.choices.values():
        command.add_argument(
            "--results", type=Path, default=RESULTS, help=f"kept and added to (default: {RESULTS})"
        )
    return parser.parse_args(words)


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    pairs = (text.partition("=") for text in arguments.set)
    given = {name: json.loads(value) for name, _, value in pairs}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return {"on": arguments.on, **given, **lists}


def _line(experiment: Experiment, outcome: Outcome) -> str:
    e = experiment
    points = ", ".join(f"{p.round}: {p.accuracy:.1f}" for p in outcome.points)
    what = f"{e.dataset} {e.part} {e.method} {e.init} {e.start} seed {e.seed} E={e.epochs}"
    return f"{what} on {e.on}: {points} (growth {outcome.growth:.2f}, {outcome.seconds:.0f} s CPU)"


if __name__ == "__main__":
    main()
