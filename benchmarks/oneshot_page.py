"""The tables of the page of one-shot merges, made from results alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Result
from benchmarks.oneshot_bars import WITH, Runs, bars, foresight, forewarned, not_run, outcomes
from benchmarks.oneshot_runs import Outcome
from benchmarks.oneshot_suites import (
    ALONE,
    CHOICES,
    DEVELOPMENT,
    FAST,
    FILES,
    METHODS,
    OURS,
    PAPER,
    PARTS,
    PLAIN,
    SHARED,
    UNREFINED,
    Source,
    measure_of,
)
from benchmarks.page_block import replace_blocks, table, told_machine
from benchmarks.report import machine

COMPARED = (
    *("mean client", "best client", "label-free pick"),
    *("element-wise average", "ensemble"),
)
MATCHED: Sequence[tuple[str, str, Source | None]] = (  # head, method, probes; None: all
    ("paper's preset", PAPER, None),
    ("files alone, --refine 0", UNREFINED, None),
    ("files alone", FILES, None),
    ("plain distillation, 1,000 inputs", PLAIN, "data"),
    ("ours, 1,000 inputs, --effort fast", FAST, "data"),
    ("ours, no data", OURS, "default"),
    ("ours, 1,000 inputs", OURS, "data"),
)
PROBED: tuple[Source, ...] = ("default", "data")


def write_page(results: Runs, docs: Path) -> None:
    """Renew the tables of `oneshot.md`."""
    replace_blocks(docs / "oneshot.md", tables(results))


def tables(results: Runs) -> dict[str, str]:
    """Return the page's blocks; the same results give the same ones on one machine."""
    blocks = {"machine": told_machine(machine()), "bars": "\n".join(_bars(results))}
    for part, cases in PARTS.items():
        shown = [case for case in cases if outcomes(results, case, ALONE)]
        makers = (_choices,) if part == "choices" else (_scores, _details)
        made = [make(results, shown) for make in makers] if shown else []
        missing = [case for case in cases if case not in shown]
        made += [f"Not run here: {'; '.join(missing)}.\n"] if missing else []
        blocks[part] = "\n".join(text for text in made if text)
    return {**blocks, "foresight": _foresight(results), "forewarned": _forewarned(results)}


def _bars(results: Runs) -> Iterator[str]:
    found = list(bars(results))
    met = sum(result.is_met for result in found)
    yield f"{met} are met, {len(found) - met} missed.\n"
    yield table(("what", "mean over seeds", "bar", ""), map(_bar_row, found))
    missing = not_run(results)
    if missing:
        yield f"Not run here: {'; '.join(missing)}.\n"


def _bar_row(result: Result) -> tuple[str, str, str, str]:
    return result.what, result.shown, result.verdict, result.note


def _scores(results: Runs, cases: Sequence[str]) -> str:
    """Return a table of what every method that was run reaches in every case."""
    columns = [
        (head, method, probes)
        for head, method, probes in MATCHED
        if any(outcomes(results, case, method, probes) for case in cases)
    ]
    rows = []
    for case in cases:
        alone = outcomes(results, case, ALONE)
        each = "; ".join(_each(outcome, case) for outcome in alone)
        found = [[o.scores[name] for o in alone] for name in COMPARED]
        found += [
            [o.scores["merge"] for o in outcomes(results, case, method, probes)]
            for _, method, probes in columns
        ]
        rows.append((_named(case), each, *(_cell(values, case) for values in found)))
    heads = (*COMPARED, *(head for head, _, _ in columns))
    return table(("case", "each client", *heads), rows)


def _choices(results: Runs, cases: Sequence[str]) -> str:
    """Return a table of what every choice gives in every case."""
    names = {UNREFINED: "files alone, --refine 0", FILES: "files alone", OURS: "the defaults"}
    compared = ("mean client", "best client", "ensemble")
    rows = [
        (name, [[o.scores[name] for o in outcomes(results, case, ALONE)] for case in cases])
        for name in compared
    ]
    rows += [
        (
            names.get(method, method),
            [[o.scores["merge"] for o in outcomes(results, case, method)] for case in cases],
        )
        for method in (UNREFINED, FILES, OURS, *CHOICES)
    ]
    shown = ((f"`{n}`" if n[0] == "-" else n, *(_spread(v, 1) if v else "–" for v in each))
             for n, each in rows)  # fmt: skip
    return table(("", *cases), shown)


def _each(alone: Outcome, case: str) -> str:
    """Return the score of every client."""
    clients = (value for name, value in alone.scores.items() if name not in COMPARED)
    return ", ".join(_cell([value], case) for value in clients)


def _details(results: Runs, cases: Sequence[str]) -> str:
    """Return a table of what was predicted and chosen, and what it took."""
    rows = []
    for case in cases:
        for method in (FILES, PLAIN, FAST, OURS):
            for probes, given in WITH.items():
                found = outcomes(results, case, method, probes)
                if found:
                    rows.append((f"{case}, {method}", given, *_told(found)))
    heads = ("merge", "probes", "seeds", "pull", "gain", "predicted pull", "chosen")
    return table((*heads, "growth", "CPU seconds"), rows) if rows else ""


def _told(found: Sequence[Outcome]) -> Iterator[str]:
    yield str(len(found))
    for name in ("pull", "gain", "predicted"):
        values = [value for o in found if (value := getattr(o, name)) is not None]
        yield _spread(values, 2) if values else "–"
    yield "; ".join(dict.fromkeys(o.chosen for o in found))
    yield f"{statistics.mean(o.growth for o in found):.2f}×"
    yield f"{statistics.mean(o.seconds for o in found):.0f}"


def _foresight(results: Runs) -> str:
    """Return how well distance chose and ordered candidates, by the probes it was measured on."""
    rows = []
    for probes in PROBED:
        found = foresight(
            [
                outcome
                for merging, outcome in results.items()
                if merging.probes == probes
                and merging.method in METHODS
                and merging.case not in (*DEVELOPMENT, *SHARED)
                and measure_of(merging.case) == "accuracy"
            ]
        )
        if found.merges:
            lost = f"{statistics.mean(found.lost):.2f} (at most {max(found.lost):.2f})"
            ordered = f"{found.ordered} of {found.pairs}"
            best = f"{found.right} of {found.merges}"
            rows.append((WITH[probes], best, lost, ordered))
    heads = ("probes", "the best was chosen", "points lost to the best", "pairs in the right order")
    return table(heads, rows)


def _forewarned(results: Runs) -> str:
    """Return how often a warning came true."""
    return table(
        ("probes", "told and true", "told but untrue", "not told but true", "neither"),
        ((WITH[probes], *_warnings(results, probes)) for probes in PROBED),
    )


def _warnings(results: Runs, probes: Source) -> Iterator[str]:
    found = forewarned(results, probes)
    for told, is_true in ((True, True), (True, False), (False, True), (False, False)):
        yield str(found[told, is_true])


def _named(case: str) -> str:
    return f"{case} (bits per character)" if measure_of(case) == "bits" else case


def _cell(values: Sequence[float], case: str) -> str:
    return _spread(values, 2 if measure_of(case) == "bits" else 1) if values else "–"


def _spread(values: Sequence[float], decimals: int) -> str:
    """Return the mean, with the least and the greatest where they differ."""
    mean, least, most = (
        f"{value:.{decimals}f}" for value in (statistics.mean(values), min(values), max(values))
    )
    return mean if least == most else f"{mean} ({least} to {most})"
