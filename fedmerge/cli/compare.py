"""`fedmerge compare`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fedmerge.cli.arguments import given_plan, match_options, model_code, note_merged, probe_options
from fedmerge.cli.output import (
    Terminal,
    cells,
    evaluating,
    evaluation_options,
    headings,
    metric_names,
)
from fedmerge.measuring import compare
from fedmerge.merging.comparison import Comparison
from fedmerge.values import wording


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
            "" if row.pull is None else f"{row.pull:.2f}",
            "" if row.gain is None else f"{row.gain:.2f}",
            "" if row.parameters is None else wording.count(row.parameters),
            "" if row.growth is None else f"{row.growth:.2f}",
            "" if row.cost is None else f"{row.cost.seconds:.4f} s",
            "" if row.cost is None else wording.memory(row.cost.bytes),
        ]
        for row in found.rows
    ]
    columns = ["model", *headings(metrics), "pull", "gain", "parameters", "growth"]
    columns += ["per 1,000", "memory"]
    terminal.table(
        f"{title}, {wording.count(found.samples)} samples", columns, wording.shortened(rows)
    )
    if any(row.pull is not None for row in found.rows):
        terminal.line("pull: 0 is as far from the ensemble as the nearest client, 1 the ensemble")
        terminal.line("gain: 0 is as good as the best client, 1 as good as the ensemble")
    terminal.line("per 1,000: seconds to run 1,000 samples; memory: parameters and activations")
    for row in found.rows:
        if row.reason:
            terminal.line(f"no {row.model}: {row.reason}")
