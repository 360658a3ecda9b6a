"""The benchmarks by name: what `make bench` runs, and what takes longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from benchmarks import (
    deep,
    engines,
    file_averages,
    frameworks,
    library_folders,
    loops,
    matching,
    memory,
    processes,
    retraining,
    shortcuts,
    wide,
)
from benchmarks.measure import Result


@dataclass(frozen=True)
class Suite:
    """Some benchmarks that belong together."""

    title: str
    results: Callable[[], Iterator[Result]]
    is_slow: bool = False


SUITES: Mapping[str, Suite] = {
    "startup": Suite("Start-up", processes.startup_results),
    "matching": Suite("One matching against its floor", matching.results),
    "loops": Suite("Against plain loops", loops.results),
    "shortcuts": Suite("Savings, one by one", shortcuts.results),
    "runs": Suite("Whole merges as processes", processes.run_results),
    "deep": Suite("Whole merges of nets that are run", deep.results),
    "memory": Suite("Peak memory, small files", memory.results),
    "retraining": Suite("Retraining beyond the training itself", retraining.results),
    "frameworks": Suite("Inside Flower", frameworks.results, is_slow=True),
    "engines": Suite("A round in other processes", engines.results, is_slow=True),
    "matching-slow": Suite(
        "One matching against its floor, more clients", matching.slow_results, is_slow=True
    ),
    "loops-slow": Suite("Against plain loops, more work", loops.slow_results, is_slow=True),
    "memory-slow": Suite("Peak memory, 400 MB files", memory.slow_results, is_slow=True),
    "averages": Suite("Averages of large files", file_averages.slow_results, is_slow=True),
    "folders": Suite("Folders of GPT-2 and ViT-B", library_folders.slow_results, is_slow=True),
    "wide": Suite("One very wide layer", wide.slow_results, is_slow=True),
}
