"""What `--json` prints, per command: the types from which the published schemas are made.

Commands print plain values; tests compare all that they print with these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from fedmerge.graph.plan_json import JsonPlan
from fedmerge.types.limits import Count
from fedmerge.workflow.record_file import FrontierEntry, QualityEntry
from fedmerge.workflow.retrain.history import RoundEntry

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
    quality: QualityEntry | None
    warnings: list[str]
    output: str
    seconds: float
    frontier: FrontierEntry | UnsetType = UNSET  # with --frontier
    report: str | UnsetType = UNSET  # with --report


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

    method: Literal["fedma", "fedavg", "fedprox"]
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
    "match": (Merged, Predicted),
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
