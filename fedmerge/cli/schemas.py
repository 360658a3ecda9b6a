"""JSON schemas of results, records, plans and configs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Struct, UnsetType

from fedmerge.architecture.plan_json import JsonPlan
from fedmerge.cli.config import config_type, configurable
from fedmerge.decoding import Count
from fedmerge.merging.adapters import AdapterRecord
from fedmerge.merging.record_schema import FrontierEntry, QualityEntry, RecordFile, RoundEntry

Numbers: TypeAlias = dict[str, float | None]  # None: not finite


class Result(Struct, forbid_unknown_fields=True, kw_only=True):
    """Every document has the version of its schema."""

    schema: Literal[1]


class Problem(Struct, forbid_unknown_fields=True):
    """An error."""

    kind: str  # the class of the error
    problem: str
    hint: str
    exit_code: int


class Failed(Result):
    """What any command prints instead, if it fails."""

    error: Problem


class MergedGroup(Struct, forbid_unknown_fields=True):
    """What became of one group."""

    name: str
    client_widths: list[Count]
    width: Count
    padding: Count
    match_rate: float | None
    scatter: float | None


class PredictedGroup(Struct, forbid_unknown_fields=True):
    """The range of one group's global width."""

    name: str
    client_widths: list[Count]
    narrowest: Count
    widest: Count


class Changes(Struct, forbid_unknown_fields=True):
    """What clients changed of the base model that they were fine-tuned from."""

    name: str
    changes: dict[str, float]  # length of a client's change ÷ the base's
    cosine: float | None  # of two clients' changes, in the mean
    partial: float  # share of the changed numbers that some clients left as they were
    missing: list[str]  # tensors that the base does not have: their mean is taken
    scale: float | None  # of the mean change in the merge; none: an average that is fitted


class Merged(Result):
    """`match`: a merge that was written."""

    clients: list[str]
    architecture: str
    groups: list[MergedGroup]
    parameters: Count
    ensemble_parameters: Count
    growth: float
    width_limit: float | None
    in_place: float | None
    alike_share: float | None  # of units whose weights are alike those they are matched with
    quality: QualityEntry | None
    warnings: list[str]
    output: str
    seconds: float
    frontier: FrontierEntry | UnsetType = UNSET  # with --frontier
    report: str | UnsetType = UNSET  # with --report
    base: Changes | UnsetType = UNSET  # with --base


class MergedAdapters(Result):
    """`match` of LoRA adapters, with `--dry-run` too."""

    adapter: Literal[True]
    clients: list[str]
    rank: Count  # the largest of any module
    client_ranks: dict[str, Count]
    kept: float  # share of the mean update's squared Frobenius norm
    modules: Count
    averaged: Count  # tensors that were trained whole
    parameters: Count
    warnings: list[str]
    dry_run: bool
    output: str | None
    seconds: float


class Predicted(Result):
    """`match --dry-run`."""

    dry_run: Literal[True]
    groups: list[PredictedGroup]
    fewest_parameters: Count
    most_parameters: Count
    memory: Count
    read: Count
    rounds: Count


class Retrained(Merged, kw_only=True):
    """`retrain`: a run that ended."""

    method: Literal["fedma", "fedavg", "fedprox", "afl"]
    rounds: list[RoundEntry]
    bytes_up: Count
    bytes_down: Count
    missing: dict[str, dict[str, str]]  # round → client → why


class PredictedRun(Result):
    """`retrain --dry-run`."""

    dry_run: Literal[True]
    groups: list[PredictedGroup]
    fewest_parameters: Count
    most_parameters: Count
    memory: Count
    read: Count
    rounds: list[str]
    epochs: Count
    bytes_up: Count
    bytes_down: Count


class DemoRow(Struct, forbid_unknown_fields=True):
    """One model of the demo."""

    model: str
    accuracy: float
    parameters: Count
    growth: float


class Demonstrated(Result):
    """`demo`."""

    commands: list[str]
    rows: list[DemoRow]
    report: str


class Measured(Struct, forbid_unknown_fields=True):
    """One model that was evaluated."""

    model: str
    loss: float | None
    metrics: Numbers
    samples: Count
    parameters: Count


class Evaluated(Result):
    """`eval`."""

    data: str
    task: str
    models: list[Measured]


class ComparedRow(Struct, forbid_unknown_fields=True):
    """One model of a comparison, or why there is none."""

    kind: Literal["client", "mean", "best", "average", "ensemble", "match", "global"]
    model: str
    loss: float | None
    metrics: Numbers | None
    parameters: Count | None
    growth: float | None
    pull: float | None  # 0: as far from the ensemble as the nearest client; 1: there
    gain: float | None  # 0: as good as the best client; 1: as the ensemble
    copied_client: str | None  # the client that a merge is
    seconds_per_1000: float | None  # samples, to run the model
    parameter_bytes: Count | None
    activation_bytes: Count | None  # most at once, for one batch
    reason: str | None


class Compared(Result):
    """`compare`."""

    data: str
    task: str
    samples: Count
    best_client: str
    rows: list[ComparedRow]
    warnings: list[str]
    seconds: float


class Verified(Result):
    """`verify`."""

    ok: bool
    tensors: Count
    recomputed: Count
    fitted: Count
    differences: list[str]


class Reported(Result):
    """`report`."""

    output: str
    bytes: Count
    verdict: str
    sections: list[str]


class Shape(Struct, forbid_unknown_fields=True):
    """Shape and dtype of a tensor."""

    shape: list[Count]
    dtype: str


class Inspected(Struct, forbid_unknown_fields=True):
    """One file: all but `refused` if it was opened, else `file` and `refused` alone."""

    file: str
    refused: Problem | UnsetType = UNSET
    name: str | UnsetType = UNSET
    container: str | UnsetType = UNSET
    location: str | UnsetType = UNSET
    weights: Literal["raw", "ema"] | UnsetType = UNSET
    prefix: str | UnsetType = UNSET
    notes: list[str] | UnsetType = UNSET
    aliases: dict[str, str] | UnsetType = UNSET
    tensors: dict[str, Shape] | UnsetType = UNSET
    layers: dict[str, str] | UnsetType = UNSET
    architecture: str | UnsetType | None = UNSET
    not_mergeable: Problem | UnsetType | None = UNSET
    difference: str | UnsetType | None = UNSET
    members: Count | UnsetType = UNSET  # of an ensemble's program, else 0


class Looked(Result):
    """`inspect`."""

    files: list[Inspected]


class WrittenShard(Struct, forbid_unknown_fields=True):
    """One client's shard."""

    client: str
    file: str
    samples: Count


class Partitioned(Result):
    """`partition`."""

    output: str
    shards: list[WrittenShard]
    class_counts: dict[str, list[Count]] | None
    left_out: list[str]
    kept_apart: list[str]


class Converted(Result):
    """`convert`."""

    output: str
    container: str
    location: str
    tensors: Count
    notes: list[str]


class Exported(Result):
    """`export`."""

    output: str
    format: Literal["pt2", "onnx"]
    difference: float
    any_batch: bool


RESULTS: Mapping[str, tuple[type, ...]] = {  # command → what it prints, beside `Failed`
    "match": (Merged, MergedAdapters, Predicted),
    "retrain": (Retrained, PredictedRun),
    "demo": (Demonstrated,),
    "eval": (Evaluated,),
    "compare": (Compared,),
    "verify": (Verified,),
    "report": (Reported,),
    "plan": (JsonPlan,),
    "inspect": (Looked,),
    "partition": (Partitioned,),
    "convert": (Converted,),
    "export": (Exported,),
}


DIALECT = "https://json-schema.org/draft/2020-12/schema"
CLASS_COUNTS = dict[str, list[int | float]]


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by the name of its file."""
    found = {
        "record": _schema("A merge record", RecordFile),
        "adapter-record": _schema("A merge record of LoRA adapters", AdapterRecord),
        "plan": _schema("A plan", JsonPlan),
        "class-counts": _schema("Samples per client and class", CLASS_COUNTS),
    }
    for command in configurable():
        config = _schema(f"A configuration of `fedmerge {command.name}`", config_type(command))
        found[f"config-{command.name}"] = _with_underscores(config)
    for name, kinds in RESULTS.items():
        found[f"json-{name}"] = _schema(f"What `fedmerge {name} --json` prints", *kinds, Failed)
    return found


def _schema(title: str, *kinds: Any) -> dict[str, Any]:
    """Return the schema of a document of one of some types."""
    each, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    document = each[0] if len(each) == 1 else {"anyOf": list(each)}
    definitions = {"$defs": components} if components else {}
    return {"$schema": DIALECT, "title": title, **document, **definitions}


def _with_underscores(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a configuration with names in both of their spellings."""
    for definition in schema["$defs"].values():
        names = definition["properties"]
        names |= {name.replace("-", "_"): value for name, value in names.items()}
    return schema


def text_of(schema: dict[str, Any]) -> str:
    """Return a schema as it stands in its file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def main(folder: Path) -> None:
    """Write all schemas into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in schemas().items():
        (folder / f"{name}.json").write_text(text_of(schema), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
