"""`make fuzz`: damaged files of every kind; none may run code, cost too much or end in a traceback.

make fuzz FUZZ="--files 20000 --others 2000 --processes 300 --page docs/reliability.md"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.fuzz.coverage import fuzz_by_coverage
from benchmarks.page_block import replace_blocks

if TYPE_CHECKING:
    from benchmarks.fuzz.campaign import Counts

BLOCK = "fuzz"  # of the page


def main() -> None:
    """Run the campaign; exit with 1 if a promise was broken."""
    arguments = _arguments()
    if arguments.coverage:  # before the readers are imported, which are to be watched
        fuzz_by_coverage(arguments.coverage, keep=arguments.keep)
        return
    import torch

    from benchmarks.fuzz.campaign import fuzz, fuzz_processes
    from benchmarks.fuzz.forked import warm
    from benchmarks.fuzz.outcomes import Outcomes
    from benchmarks.fuzz.seeds import make_seeds

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warm():
        seeds = make_seeds(Path(folder))
        checkpoints = [seed for seed in seeds if seed.is_checkpoint]
        others = [seed for seed in seeds if not seed.is_checkpoint]
        outcomes = Outcomes(arguments.log)
        options = {"seed": arguments.seed, "keep": arguments.keep, "outcomes": outcomes}
        found = {
            "checkpoints": fuzz(checkpoints, arguments.files, **options, folder=Path(folder)),
            "other files": fuzz(others, arguments.others, **options, folder=Path(folder)),
            "as processes": fuzz_processes(seeds, arguments.processes, **options),
        }
    table = page_table(found)
    print(table)
    broken = [line for kind in found.values() for own in kind.values() for line in own.broken]
    for line in broken:
        print(f"broken: {line}", file=sys.stderr)
    if broken:
        sys.exit(f"{len(broken)} promises broken; the files are in {arguments.keep}")
    if arguments.page:
        command = (
            f"make fuzz FUZZ='--seed {arguments.seed} --files {arguments.files} "
            f"--others {arguments.others} --processes {arguments.processes}'"
        )
        replace_blocks(arguments.page, {BLOCK: f"`{command}`\n\n{table}"})


def page_table(found: dict[str, dict[str, Counts]]) -> str:
    """Return the counts as a Markdown table."""
    rows = [
        "| what | mutants | read | refused in one line | broken promises |",
        "|---|---|---|---|---|",
    ]
    for kind, by_seed in found.items():
        for name, own in by_seed.items():
            rows.append(
                f"| {kind}: {name} | {own.total:,} | {own.read:,} | {own.refused:,} "
                f"| {len(own.broken)} |"
            )
    return "\n".join(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--files", type=int, default=3000, help="mutants of checkpoints")
    parser.add_argument("--others", type=int, default=500, help="of npz, records, plans, …")
    parser.add_argument("--processes", type=int, default=20, help="as processes of their own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-broken"), metavar="FOLDER")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table into this page")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="keep outcomes here, and go on from those it has"
    )
    parser.add_argument(
        "--coverage", type=int, metavar="RUNS", help="only inputs that atheris finds, so many"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
