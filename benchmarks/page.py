"""The page of results in the docs, written from a report alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.measure import Result
from benchmarks.report import Report
from benchmarks.suites import SUITES

INTRODUCTION = """\
# Benchmarks

Written by `python -m benchmarks --page`; do not edit. Every ratio is measured in one run on one
machine, its two sides in turns, and the least of several runs counts: noise only adds. A bar is
what the number is meant to reach.

- **Floor**: one float32 matrix product per step, of every unit of a client with every global unit,
  and one call of the assignment solver on the step's rewards. No matching that looks at every pair
  once and solves each step once can be faster.
- **What its own steps need**: only the products with global units that changed, and the steps
  solved as fedmerge solves them. The rest of its time is book-keeping.
- **Copies** are one net with its hidden units in random order and noise of a tenth of the weights'
  standard deviation; **independent** nets have random weights, matched at a threshold of 0.03;
  at 0.9 **nothing matches**. A matching is one pass over all groups, at most 5 sweeps each.
- **Gain** of a saving: the time without it ÷ the time with all of them; alone: the time without
  any ÷ the time with only this one. The assignments are compared in every setting.
- **Overhead** of retraining: CPU time outside the clients' training loops (shards opened, models
  built, planning, matching, averaging, states saved) ÷ that inside them; no evaluation.
"""

COMMANDS = """\
```sh
make bench                                                  # the quick suites
.venv/bin/python -m benchmarks --all                        # slow ones too
.venv/bin/python -m benchmarks --list                       # their names
.venv/bin/python -m benchmarks matching wide --json r.json  # some of them, as JSON
.venv/bin/python -m benchmarks --read r.json --page docs/benchmarks.md  # nothing is run
```
"""


def page(report: Report) -> str:
    """Return the page as Markdown; the same report gives the same page."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    parts = [INTRODUCTION, f"Measured on {' and '.join(report.dates)}: {machine}.\n", COMMANDS]
    parts += [_bars(report), *_sections(report)]
    return "\n".join(parts)


def _bars(report: Report) -> str:
    """Return how many bars are met, and those that are not."""
    barred = [r for results in report.suites.values() for r in results if r.bar is not None]
    missed = [result for result in barred if not result.is_met]
    text = f"{len(barred) - len(missed)} of {len(barred)} bars are met.\n"
    if missed:
        text += "Missed:\n\n" + _table(missed)
    return text


def _sections(report: Report) -> Iterator[str]:
    for name, results in report.suites.items():
        yield f"## {SUITES[name].title}\n\n{_table(results)}"


def _table(results: Iterable[Result]) -> str:
    rows = ["| what | measured | bar | |", "|---|---:|---|---|"]
    rows += [f"| {r.what} | {r.shown} | {r.verdict} | {r.note} |" for r in results]
    return "\n".join(rows) + "\n"
