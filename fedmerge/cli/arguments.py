"""From the command line's values to those of the library."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from fedmerge.checkpoint import merged_files
from fedmerge.cli.command_line import CONFIGURED, SET
from fedmerge.cli.config import RECORDED
from fedmerge.cli.output import Terminal
from fedmerge.decoding import decode_json, read_text
from fedmerge.errors import UsageError
from fedmerge.merging.options import MatchOptions
from fedmerge.merging.session import parse_plan, read_plan
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.plans import Plan

if TYPE_CHECKING:
    from fedmerge.architecture.model_code import ModelCode
    from fedmerge.report.unit_features import ImageOptions


def client_names(given: Mapping[str, Any]) -> list[str] | None:
    """Return the names of --client-names."""
    if given["client_names"] is None:
        return None
    return [name.strip() for name in given["client_names"].split(",") if name.strip()]


def note_merged(sources: Sequence[Path], terminal: Terminal) -> None:
    """Say which files of the given folders are no clients."""
    for path in merged_files(sources):
        terminal.note(f"note: {path} is no client: it was merged here and has a record")


def match_options(given: Mapping[str, Any]) -> MatchOptions:
    """Return the options of a merge from the values of a command line."""
    values = {
        field.name: _PARSERS.get(field.name, _same)(given[field.name])
        for field in fields(MatchOptions)
        if given.get(field.name) is not None
    }
    return MatchOptions(**values)


def probe_options(given: Mapping[str, Any]) -> ProbeOptions:
    """Return what a command line says about probes."""
    options = ProbeOptions(
        source=given["probe"],
        count=given["probe_count"],
        mean=_numbers("probe_mean", given["probe_mean"]) or (0.0,),
        std=_numbers("probe_std", given["probe_std"]) or (1.0,),
        augment=tuple(given["augment"] or ()),
    )
    if given["probe_data"] is None:
        return options
    from fedmerge.merging.evaluations import given_preparation  # files alone do without

    preparation = given_preparation(given["normalize"], given["channels_last"])
    return replace(options, data=Path(given["probe_data"]), preparation=preparation)


def image_options(given: Mapping[str, Any]) -> ImageOptions | None:
    """Return the image of --image, if there is one."""
    if given["image"] is None:
        for name in ("image_index", "image_group"):
            if given[name] is not None:
                raise UsageError(f"`{name}` is for `image`")
        return None
    from fedmerge.merging.evaluations import given_preparation  # files alone do without
    from fedmerge.report.unit_features import ImageOptions

    return ImageOptions(
        file=given["image"],
        index=given["image_index"] or 0,
        preparation=given_preparation(given["normalize"], given["channels_last"]),
        groups=tuple(given["image_group"] or ()),
    )


def _numbers(name: str, text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in (text or "").split(",") if part)
    except ValueError:
        raise UsageError(
            f"`{name}` is {text!r}, expected numbers, e.g. 0.5 or 0.5,0.4,0.4"
        ) from None


def given_plan(given: Mapping[str, Any]) -> Plan | None:
    """Return the plan of --plan: a file's, or JSON itself, which a merge record gives.

    A recorded plan makes way for --model.
    """
    value: str | None = given["plan"]
    if value is None or (value.startswith("{") and given["model"] is not None):
        return None
    if not value.startswith("{"):
        return read_plan(Path(value))
    return parse_plan(value, fail=lambda reason: UsageError(f"--plan is no JSON: {reason}"))


def model_code(given: Mapping[str, Any]) -> ModelCode | None:
    """Return the user's model code of --model, if given."""
    if given["model"] is None:
        for name in ("model_arg", "input_shape", "input_dtype", "numbers", "state"):
            if given[name]:
                raise UsageError(
                    f"`{name}` says nothing without --model",
                    "a folder with a config.json is one: --model transformers:FOLDER",
                )
        return None
    from fedmerge.architecture.model_code import ModelCode

    return ModelCode(
        factory=given["model"],
        arguments=dict(_named_value(value) for value in given["model_arg"] or ()),
        input_shapes=tuple(_input_shape(value) for value in given["input_shape"] or ()),
        input_dtypes=tuple(given["input_dtype"] or ()),
        numbers=given["numbers"] or "followed",
        state=tuple(_state_pair(value) for value in given["state"] or ()),
    )


def _named_value(text: str) -> tuple[str, Any]:
    """Return NAME=VALUE as the name and a Python literal, or a string where it is none."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise UsageError(f"--model-arg is {text!r}, expected NAME=VALUE, e.g. width=64")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _input_shape(text: str) -> tuple[int, ...]:
    parts = text.replace("x", ",").replace("×", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            f"--input-shape is {text!r}, expected sizes with the batch, e.g. 1,3,32,32"
        )
    return tuple(int(part) for part in parts)


def _state_pair(text: str) -> tuple[int, int]:
    argument, colon, output = text.partition(":")
    if not (colon and argument.isdecimal() and output.isdecimal()):
        raise UsageError(f"`state` is {text!r}, expected ARGUMENT:OUTPUT counted from 0, e.g. 1:1")
    return int(argument), int(output)


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
            raise UsageError(f"`client_weight` is {value!r}, expected NAME=WEIGHT, e.g. a=2")
    return weights


_COUNTS_HINT = 'the file holds {"name": [count per class, …]} with the names that `match` prints'


def _class_counts(value: str) -> dict[str, list[int | float]]:
    """Return the counts of a JSON file, or of JSON itself (from a configuration)."""

    def fail(reason: str) -> UsageError:
        return UsageError(f"--class-counts can't be read: {reason}", _COUNTS_HINT)

    text = value.encode() if value.startswith("{") else read_text(Path(value), fail=fail)
    return decode_json(text, dict[str, list[int | float]], fail=fail)


_PARSERS: Mapping[str, Any] = {
    "max_growth": _growth,
    "client_weight": _client_weights,
    "class_counts": _class_counts,
    "keep": tuple,
    "allow_global": tuple,
}


Given: TypeAlias = Mapping[str, Any]
_Case: TypeAlias = tuple[str, Callable[[Given], bool]]  # in words, and whether it is the case


def _method(given: Given) -> str:
    return given["method"] or "fedma"


_MATCHED: _Case = ("--method fedma", lambda given: _method(given) == "fedma")
_AVERAGED: _Case = ("--method fedavg, fedprox and afl", lambda given: _method(given) != "fedma")
_PROXIMAL: _Case = ("--method fedprox", lambda given: _method(given) == "fedprox")
_AGNOSTIC: _Case = ("--method afl", lambda given: _method(given) == "afl")
_STARTED: _Case = ("checkpoints", lambda given: bool(given["clients"]))
_FRESH: _Case = ("clients that start without checkpoints", lambda given: not given["clients"])
_MATCHED_ONCE: _Case = ("--set init=matched", lambda given: given["init"] == "matched")
_BEGUN: _Case = (_FRESH[0], lambda given: _FRESH[1](given) or _MATCHED_ONCE[1](given))
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
    _AGNOSTIC: ("weight_rate",),
    _FRESH: ("init_epochs", "client_names"),
    _BEGUN: ("init",),
    _MATCHED_ONCE: ("probe_data",),
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
                raise UsageError(f"`{name}` is for {words} only", "leave it out")


def asked_by_user(context: typer.Context) -> set[str]:
    """Return the parameters that the command line or a configuration gives.

    Not those of a merge record: it names all options, whatever its method.
    """
    sources = {"COMMANDLINE"} if RECORDED in context.meta else {"COMMANDLINE", "DEFAULT_MAP"}
    names = (str(parameter.name) for parameter in context.command.params)
    found = {name: context.get_parameter_source(name) for name in names}
    named = {n for n, source in found.items() if source is not None and source.name in sources}
    configured = () if RECORDED in context.meta else context.meta.get(CONFIGURED, ())
    return {*named, *context.meta[SET], *configured}
