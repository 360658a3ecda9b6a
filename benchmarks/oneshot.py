"""One-shot merges with default options against clients, averages, ensembles and the paper's.

`python benchmarks/oneshot.py --data DIR --checkpoints DIR --results r.json` runs what the results
file lacks, `python benchmarks/oneshot.py page --results r.json --docs docs` writes the page;
nothing is run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import starmap
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, only its folder is

from benchmarks.oneshot_clients import Folders
from benchmarks.oneshot_page import write_page
from benchmarks.oneshot_runs import Outcome, carry_out, from_json, to_json
from benchmarks.oneshot_suites import (
    ALONE,
    CHOICES,
    FAMILIES,
    METHODS,
    PARTS,
    RECIPES,
    Merging,
    mergings,
)
from benchmarks.results import read_runs, write_runs

Results = dict[Merging, Outcome]
RESULTS = Path("oneshot-results.json")  # in the current folder: those of the page stay as they are


def main(words: Sequence[str] | None = None) -> None:
    """Run merges, or write the page of those that were run."""
    arguments = _arguments(words)
    results = read_results(arguments.results)
    if arguments.what == "page":
        write_page(results, arguments.docs)
        return
    torch.set_num_threads(1)  # the nets are too small to gain from more
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folders = Folders(arguments.data, arguments.checkpoints, work)
        chosen = (arguments.parts, arguments.cases, arguments.methods)
        for merging in mergings(*chosen, seeds=arguments.seeds):
            asked = replace(merging, sha256=folders.digest(merging.case))
            if asked not in results:
                results[asked] = carry_out(asked, folders)
                write_runs(arguments.results, starmap(to_json, results.items()))
            print(_line(asked, results[asked]), file=sys.stderr, flush=True)


def read_results(path: Path) -> Results:
    """Return the runs of a results file."""
    return dict(map(from_json, read_runs(path)))


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/oneshot.py", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("run", "page"), default="run")
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--checkpoints", type=Path, help="folder of the real checkpoints")
    parser.add_argument("--work", type=Path, help="folder that trained clients are kept in")
    parser.add_argument("--parts", nargs="+", default=[], choices=list(PARTS))
    parser.add_argument("--cases", nargs="+", default=[], choices=[*FAMILIES, *RECIPES])
    parser.add_argument("--methods", nargs="+", default=[], choices=[ALONE, *METHODS, *CHOICES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--docs", type=Path, help="folder that the page is written to")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help=f"kept and added to (default: {RESULTS})"
    )
    given = parser.parse_args(words)
    needed = {"page": ("docs",), "run": ("data", "checkpoints")}[given.what]
    missing = [f"--{name}" for name in needed if getattr(given, name) is None]
    if missing:
        parser.error(f"{given.what} needs {' and '.join(missing)}")
    return given


def _line(merging: Merging, outcome: Outcome) -> str:
    what = f"{merging.case}, {merging.method}, probes {merging.probes}, seed {merging.seed}"
    scores = ", ".join(f"{name} {value:.2f}" for name, value in outcome.scores.items())
    rows = (f"{c.name} {c.distance} → {c.score:.2f}" for c in outcome.considered)
    more = f" (growth {outcome.growth:.2f}, {outcome.seconds:.0f} s; {'; '.join(rows)})"
    return f"{what}: {scores}{more}"


if __name__ == "__main__":
    main()
