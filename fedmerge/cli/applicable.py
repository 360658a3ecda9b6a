"""Options of `retrain` that would say nothing beside the others are refused, not ignored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import typer

from fedmerge.cli.config import RECORDED
from fedmerge.errors import UsageError
from fedmerge.workflow.options import option_name

Given: TypeAlias = Mapping[str, Any]
_Case: TypeAlias = tuple[str, Callable[[Given], bool]]  # in words, and whether it is the case


def _method(given: Given) -> str:
    return given["method"] or "fedma"


_MATCHED: _Case = ("--method fedma", lambda given: _method(given) == "fedma")
_AVERAGED: _Case = ("--method fedavg and fedprox", lambda given: _method(given) != "fedma")
_PROXIMAL: _Case = ("--method fedprox", lambda given: _method(given) == "fedprox")
_STARTED: _Case = ("checkpoints", lambda given: bool(given["clients"]))
_FRESH: _Case = ("clients that start without checkpoints", lambda given: not given["clients"])
_PARALLEL: _Case = ("--engine processes", lambda given: given["engine"] == "processes")
_CLUSTERED: _Case = ("--engine ray", lambda given: given["engine"] == "ray")
_MOVING: _Case = ("--optimizer sgd", lambda given: given["optimizer"] in (None, "sgd"))

_CASES: Mapping[_Case, tuple[str, ...]] = {
    _MATCHED: (
        *("passes", "partial_weight_decay", "last_rate_factor", "last_epochs_factor"),
        *("last_weight_decay", "preset", "match_threshold", "max_growth", "gamma", "sigma"),
        *("sigma0", "sweeps", "refine", "solver", "tie_breaker", "class_counts"),
    ),
    _AVERAGED: ("rounds",),
    _PROXIMAL: ("mu",),
    _FRESH: ("init", "init_epochs"),
    _STARTED: ("key", "weights", "allow_global", "match_by_order"),
    _PARALLEL: ("workers",),
    _CLUSTERED: ("address", "cpus_per_client", "gpus_per_client"),
    _MOVING: ("momentum",),
}


def check_applicable(given: Given, asked: Collection[str]) -> None:
    """Refuse the first option that was asked for and that the others leave no meaning."""
    for (words, is_case), names in _CASES.items():
        for name in names:
            if name in asked and not is_case(given):
                raise UsageError(f"{option_name(name)} is for {words} only", "leave it out")


def asked_by_user(context: typer.Context) -> set[str]:
    """Return the parameters that the command line or a configuration gives.

    Not those of a merge record: it names all options, whatever its method.
    """
    sources = {"COMMANDLINE"} if RECORDED in context.meta else {"COMMANDLINE", "DEFAULT_MAP"}
    names = (str(parameter.name) for parameter in context.command.params)
    found = {name: context.get_parameter_source(name) for name in names}
    return {name for name, source in found.items() if source is not None and source.name in sources}
