"""Options by keyword: which option value each keyword of `fedmerge.api` changes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fedmerge.errors import UsageError
from fedmerge.merging.options import MatchOptions
from fedmerge.probes.options import ProbeOptions

if TYPE_CHECKING:
    from fedmerge.federated.options import PartitionOptions, RetrainOptions, Running

Options = TypeVar("Options")

_PROBE_FIELDS = {  # keyword of `match` → field of `ProbeOptions`
    "probe": "source",
    "probe_data": "data",
    "probe_count": "count",
    "probe_mean": "mean",
    "probe_std": "std",
}
_LEAST_LIKENESS = 0.6  # of a wrong name and the option that it may stand for


def changed(options: Options, changes: Mapping[str, Any], also: Iterable[str] = ()) -> Options:
    """Return options with some fields changed; a name that is no field is refused."""
    _check_names(type(options), changes, also=also)
    return replace(options, **changes)  # type: ignore[type-var]


def changed_match_options(
    options: MatchOptions | None, probes: ProbeOptions | None, changes: Mapping[str, Any]
) -> tuple[MatchOptions, ProbeOptions]:
    """Return the options of a merge and those of its probes with changes by keyword."""
    of_probes = {_PROBE_FIELDS[name]: v for name, v in changes.items() if name in _PROBE_FIELDS}
    others = {name: value for name, value in changes.items() if name not in _PROBE_FIELDS}
    return (
        changed(options or MatchOptions(), others, also=_PROBE_FIELDS),
        changed(probes or ProbeOptions(), of_probes),
    )


def changed_retrain_options(
    options: RetrainOptions | None, running: Running | None, changes: Mapping[str, Any]
) -> tuple[RetrainOptions, Running]:
    """Return options with changes by keyword: of rounds, of training, of matching, of running."""
    from fedmerge.federated.options import RetrainOptions, Running
    from fedmerge.training import TrainSettings

    options, running = options or RetrainOptions(), running or Running()
    kinds = (RetrainOptions, TrainSettings, Running, MatchOptions)
    names_by_kind = [{field.name for field in fields(kind)} for kind in kinds]
    _check_names(RetrainOptions, changes, also=set().union(*names_by_kind))
    taken: set[str] = set()
    parts: list[dict[str, Any]] = []
    for names in names_by_kind:  # a name that two kinds have is the first one's
        parts.append({name: v for name, v in changes.items() if name in names - taken})
        taken |= names
    of_rounds, of_training, of_running, of_matching = parts
    options = replace(options, **of_rounds)
    if of_training:
        options = replace(options, training=replace(options.settings, **of_training))
    if of_matching:
        options = replace(options, matching=replace(options.matching, **of_matching))
    return options, replace(running, **of_running)


def changed_partition_options(
    options: PartitionOptions | None, changes: Mapping[str, Any]
) -> PartitionOptions:
    """Return how data are split; without options, all of it is said by keyword."""
    from fedmerge.federated.options import PartitionOptions

    if options is not None:
        return changed(options, changes)
    _check_names(PartitionOptions, changes)
    if "clients" not in changes and "by" not in changes:
        raise UsageError("`clients` is missing: how many shards there are to be")
    return PartitionOptions(**changes)


def _check_names(kind: Any, names: Iterable[str], also: Iterable[str] = ()) -> None:
    known = [*(field.name for field in fields(kind)), *also]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_LIKENESS)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no option `{name}`", hint)
