"""The tables of the page of benchmarks, made from a report alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.measure import Result
from benchmarks.page_block import replace_blocks
from benchmarks.report import Report
from benchmarks.suites import SUITES


def write_page(report: Report, path: Path) -> None:
    """Renew the tables of a page."""
    replace_blocks(path, tables(report))


def tables(report: Report) -> dict[str, str]:
    """Return the page's blocks; the same report gives the same ones."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    when = f"Measured on {' and '.join(report.dates)}: {machine}.\n"
    return {"machine": when, "results": "\n".join([_bars(report), *_sections(report)])}


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
