"""From the command line's values to the workflow's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedmerge.errors import UsageError
from fedmerge.graph import plan_from_json
from fedmerge.types.plans import Plan
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.plans import read_plan


def match_options(given: Mapping[str, Any]) -> MatchOptions:
    """Return the options of a merge from the values of a command line."""
    values = {
        field.name: _PARSERS.get(field.name, _same)(given[field.name])
        for field in fields(MatchOptions)
        if given.get(field.name) is not None
    }
    return MatchOptions(**values)


def given_plan(value: str | None) -> Plan | None:
    """Return the plan of --plan: a file's, or JSON itself (from a merge record)."""
    if value is None:
        return None
    if not value.startswith("{"):
        return read_plan(Path(value))
    try:
        return plan_from_json(json.loads(value))
    except ValueError as error:
        raise UsageError(f"--plan is no JSON: {error}") from None


def _same(value: Any) -> Any:
    return value


def _growth(value: str) -> Any:
    if value == "none":
        return value
    try:
        return float(value)
    except ValueError:
        return value  # MatchOptions says what is expected


def _client_weights(values: Sequence[str]) -> dict[str, float]:
    weights = {}
    for value in values:
        name, equals, weight = value.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            equals = ""
        if not (equals and name):
            raise UsageError(f"--client-weight is {value!r}, expected NAME=WEIGHT, e.g. a=2")
    return weights


def _class_counts(value: str) -> Any:
    """Return the counts of a JSON file, or of JSON itself (from a configuration)."""
    try:
        text = value if value.startswith("{") else Path(value).read_text(encoding="utf-8")
        counts = json.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--class-counts can't be read: {error}") from None
    return counts  # MatchOptions says what is expected


_PARSERS: Mapping[str, Any] = {
    "max_growth": _growth,
    "client_weight": _client_weights,
    "class_counts": _class_counts,
    "keep": tuple,
    "allow_global": tuple,
}
