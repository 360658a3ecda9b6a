"""`fedmerge eval`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedmerge.cli.arguments import match_options, model_code, note_merged
from fedmerge.cli.output import (
    Terminal,
    cells,
    evaluating,
    evaluation_options,
    headings,
    metric_names,
)
from fedmerge.measuring import evaluate
from fedmerge.values import wording

_PLANNING = (
    "input_shape",
    "input_dtype",
    "numbers",
    "state",
)  # of a model's plan, which nothing needs here


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Evaluate every model and show them in one table."""
    code = model_code({**dict.fromkeys(_PLANNING), **given})
    assert code is not None, "--model is required"
    options = evaluation_options(given)
    note_merged(given["models"], terminal)
    with evaluating(terminal) as progress:
        scores = evaluate(
            given["models"],
            given["data"],
            model=code,
            options=options,
            reading=match_options(given).reading,
            progress=progress,
        )
    terminal.result(
        {
            "data": given["data"],
            "task": options.task,
            "models": [score.to_json() for score in scores],
        }
    )
    metrics = metric_names(score.evaluation for score in scores)
    rows = [
        [
            score.model,
            *cells(score.evaluation, metrics),
            wording.count(score.evaluation.samples),
            wording.count(score.parameters),
        ]
        for score in scores
    ]
    columns = ["model", *headings(metrics), "samples", "parameters"]
    terminal.table(f"{options.task} on {given['data']}", columns, wording.shortened(rows))
