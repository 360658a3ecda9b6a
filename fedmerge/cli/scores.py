"""Evaluations as cells of a table, and what the commands that evaluate have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from fedmerge.cli.terminal import Terminal
from fedmerge.types.progress import Progress
from fedmerge.types.words import percent

if TYPE_CHECKING:
    from fedmerge.workflow.evaluate import Evaluation, EvaluationOptions


def evaluation_options(given: Mapping[str, Any]) -> EvaluationOptions:
    """Return what the data mean, from the values of a command line."""
    from fedmerge.workflow.devices import choose_device
    from fedmerge.workflow.evaluate import EvaluationOptions, given_preparation

    asked = {name: given[name] for name in ("task", "batch_size") if given[name] is not None}
    return EvaluationOptions(
        **asked,
        preparation=given_preparation(given["normalize"], given["channels_last"]),
        device=choose_device(given["device"]),
    )


@contextmanager
def evaluating(terminal: Terminal) -> Iterator[Progress]:
    """Give a progress callback, and let the user's code print to stderr only."""
    with redirect_stdout(sys.stderr), terminal.progress() as progress:
        yield progress


def metric_names(found: Iterable[Evaluation | None]) -> list[str]:
    """Return the metrics of evaluations, each once."""
    return list(dict.fromkeys(name for own in found if own is not None for name in own.metrics))


def headings(metrics: Iterable[str]) -> list[str]:
    """Return the columns of an evaluation."""
    return ["loss", *map(metric_title, metrics)]


def metric_title(name: str) -> str:
    """Return a metric's name as people read it.

    >>> metric_title("bits_per_character")
    'bits per character'
    """
    return name.replace("_", " ")


def cells(found: Evaluation | None, metrics: Iterable[str]) -> list[str]:
    """Return an evaluation's loss and metrics, blank where there are none."""
    if found is None:
        return ["", *("" for _ in metrics)]
    shown = (metric(name, found.metrics[name]) if name in found.metrics else "" for name in metrics)
    return [metric("loss", found.loss), *shown]


def metric(name: str, value: float | None) -> str:
    """Return a number as its kind is read, None as what it is.

    >>> metric("accuracy", 0.8712), metric("loss", 0.45678), metric("loss", None)
    ('87.1 %', '0.4568', 'not finite')
    """
    if value is None:
        return "not finite"
    return percent(value) if name == "accuracy" else f"{value:.4f}"
