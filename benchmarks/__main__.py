"""`make bench`: print every benchmark next to its bar, or as JSON with --json."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import matching, startup
from benchmarks.measure import Result


def main() -> None:
    """Run the benchmarks; a missed bar is shown, not an error: machines are noisy."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--clients", type=int, default=4, help="clients of the VGG-9 matching")
    arguments = parser.parse_args()
    measured = []
    for result in _results(arguments.clients):
        measured.append(result)
        if not arguments.json:
            print(result.line(), flush=True)
    if arguments.json:
        print(json.dumps({"results": [{**vars(r), "met": r.is_met} for r in measured]}))


def _results(clients: int) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as folder:
        yield from startup.results(Path(folder))
        yield from startup.memory_results(Path(folder))
    yield from matching.results(clients)


if __name__ == "__main__":
    main()
