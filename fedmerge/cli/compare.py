"""`fedmerge compare`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fedmerge.cli import show
from fedmerge.cli.arguments import (
    given_plan,
    match_options,
    model_code,
    note_merged,
    probe_options,
)
from fedmerge.cli.scores import cells, evaluating, evaluation_options, headings, metric_names
from fedmerge.cli.terminal import Terminal
from fedmerge.workflow.compare import Comparison, compare


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Show clients, average, ensemble, match and merged files in one table."""
    started = time.perf_counter()
    code = model_code(given)
    assert code is not None, "--model is required"
    options = evaluation_options(given)
    note_merged(given["clients"], terminal)
    with evaluating(terminal) as progress:
        found = compare(
            given["clients"],
            given["data"],
            model=code,
            options=match_options(given),
            merged=given["merged"] or (),
            plan=given_plan(given),
            evaluation=options,
            probes=probe_options(given),
            progress=progress,
        )
    for note in found.notes:
        terminal.note(f"note: {note}")
    for warning in found.warnings:
        terminal.warn(warning)
    seconds = round(time.perf_counter() - started, 3)
    described = {"data": given["data"], "task": options.task}
    terminal.result({**described, **found.to_json(), "seconds": seconds})
    _show(found, f"{options.task} on {given['data']}", terminal)


def _show(found: Comparison, title: str, terminal: Terminal) -> None:
    metrics = metric_names(row.evaluation for row in found.rows)
    rows = [
        [
            row.model,
            *cells(row.evaluation, metrics),
            "" if row.parameters is None else show.count(row.parameters),
            "" if row.growth is None else f"{row.growth:.2f}",
        ]
        for row in found.rows
    ]
    columns = ["model", *headings(metrics), "parameters", "growth"]
    terminal.table(f"{title}, {show.count(found.samples)} samples", columns, show.shortened(rows))
    for row in found.rows:
        if row.reason:
            terminal.line(f"no {row.model}: {row.reason}")
