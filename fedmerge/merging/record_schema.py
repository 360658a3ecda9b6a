"""The merge record's format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from fedmerge.architecture.plan_json import JsonPlan
from fedmerge.decoding import Cosine, Count, Digest, Name, Number, Place, Share
from fedmerge.merging.options import Init, RecordedOptions, RetrainMethod
from fedmerge.probes.options import Source
from fedmerge.values.arrays import Float64Array

WHY_MISSING = {  # as records say it → as people do
    "app": "its data or its training failed",
    "lost": "its worker was lost",
    "timeout": "it took too long",
}
Metrics: TypeAlias = Mapping[str, Number | None]  # None: not finite


@dataclass(frozen=True)
class RoundEntry:
    """One round that is over."""

    number: Count
    pass_number: Count
    layer: str
    stage: str
    epochs: Count
    losses: Mapping[str, Number]  # client → mean of its last epoch
    metrics: Metrics | None  # of the global model, where there is one and data
    widths: Mapping[str, Count]  # global, of the groups that are matched
    bytes_up: Count  # that clients must exchange
    bytes_down: Count
    missing: Mapping[str, str]  # client → app, lost or timeout
    # What each counts from then on, where rounds change it.
    client_weights: Mapping[str, Number] = field(default_factory=dict)
    moved_up: int = 0  # that the engine moved; depends on retries, so it is not in the record
    moved_down: int = 0
    seconds: float = 0.0

    @property
    def loss(self) -> float | None:
        """The mean loss of the clients that trained."""
        return sum(self.losses.values()) / len(self.losses) if self.losses else None

    def to_record(self) -> dict[str, Any]:
        """Return what depends on inputs and options alone."""
        values = asdict(self)
        for name in ("moved_up", "moved_down", "seconds"):
            del values[name]
        if not self.client_weights:
            del values["client_weights"]
        return values


FORMAT: Final = 1
SCHEMA: Final = 1

Similarities: TypeAlias = tuple[tuple[Cosine | None, ...], ...]  # None: a unit without fellows
DIGITS = 4  # of cosines: more would only say how products were rounded


def rounded(similarities: Sequence[Float64Array]) -> Similarities:
    """Return cosines per client (units,) as the record keeps them."""
    return tuple(
        tuple(None if math.isnan(cosine) else round(cosine, DIGITS) for cosine in own.tolist())
        for own in similarities
    )


@dataclass(frozen=True)
class SourceEntry:
    """What the record says of one client: its file's name without folders, and its hash."""

    name: Name
    file: str  # empty: it was in memory
    sha256: Digest
    size: Count


@dataclass(frozen=True)
class GroupEntry:
    """What the record says of one group."""

    name: Name
    client_widths: tuple[Count, ...]
    width: Count  # global units
    padding: Count  # of these, units of no client that keep recurrent layers equally wide
    match_rate: Share  # share of the clients' units whose global unit has another owner
    scatter: Number | None  # squared distance of units to their mean ÷ squared norm, 0 for copies
    threshold: Number | None = None  # cosine above which units paired up, where one was set
    similarities: Similarities = ()  # per client (units,); none: not known
    leaders: tuple[Count, ...] = ()  # number of the client whose unit each global one stands for

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        told = {name: value for name, value in vars(self).items() if name != "leaders"}
        return {
            **told,
            "client_widths": list(self.client_widths),
            "similarities": [list(own) for own in self.similarities],
            **({"leaders": list(self.leaders)} if self.leaders else {}),
        }

    def summary(self) -> dict[str, Any]:
        """Return the entry without what there is of every unit."""
        lasting = self.to_json()
        of_units = ("similarities", "threshold", "leaders")
        return {name: value for name, value in lasting.items() if name not in of_units}


@dataclass(frozen=True)
class AgreementEntry:
    """How alike a model and the ensemble answer; None: not finite."""

    decisions: Share | None
    explained: float | None
    distance: float | None = None  # of probabilities, or of outputs that are none


@dataclass(frozen=True)
class QualityEntry:
    """The quality that probes predict."""

    probes: str
    samples: Count
    agreement: AgreementEntry
    clients: Mapping[str, AgreementEntry]
    candidates: Mapping[str, AgreementEntry]
    chosen: str
    outliers: tuple[str, ...]
    dropped: tuple[str, ...]
    clients_alike: Share | None
    pull: float | None = None  # 0: as far from the ensemble as the nearest client; 1: there
    likeness: Mapping[str, Share] = field(default_factory=dict)  # with each client
    position: str = ""  # the pull in words


@dataclass(frozen=True)
class PointEntry:
    """One size that was tried."""

    name: str
    budget: Number | None  # the growth that was allowed, of merges
    growth: Number
    parameters: Count
    agreement: AgreementEntry


@dataclass(frozen=True)
class FrontierEntry:
    """The sizes that were tried: merges within budgets, and at last the ensemble."""

    clients: tuple[PointEntry, ...]
    points: Annotated[tuple[PointEntry, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        if any(point.budget is None for point in self.points[:-1]):
            raise ValueError("a merge of the frontier has no budget")


@dataclass(frozen=True)
class PreparationEntry:
    """How stored samples became a model's inputs."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels_last: bool


@dataclass(frozen=True)
class ProbesEntry:
    """What was said of probes; a file of real inputs by its name without folders."""

    source: Source | None
    data: str | None
    count: Count | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    preparation: PreparationEntry | None
    augment: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordedRounds:
    """The options of a run in rounds that its record holds, by the names of the command line."""

    method: RetrainMethod | None = None
    passes: int | None = None
    rounds: int | None = None
    mu: float | None = None
    weight_rate: float | None = None
    init: Init | None = None
    init_epochs: int | None = None
    task: str | None = None
    optimizer: str | None = None
    optimizer_args: str | None = None
    scheduler: str | None = None
    scheduler_args: str | None = None
    accumulate: int = 1
    patience: int | None = None
    learning_rate: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    clip_norm: float | None = None
    mixed_precision: bool = False
    partial_weight_decay: float | None = None
    last_rate_factor: float | None = None
    last_epochs_factor: int | None = None
    last_weight_decay: float | None = None
    normalize: str | None = None
    channels_last: bool = False
    no_class_counts: bool = False
    held_out: float = 0.0
    x_key: str | None = None
    y_key: str | None = None
    classes: str | None = None


@dataclass(frozen=True)
class ShardEntry:
    """What a client said of its data; nothing but its name where it did not answer."""

    client: str
    sha256: Digest | None = None  # of the file; of a function's reference
    samples: Count | None = None
    class_counts: tuple[Count, ...] | None = None  # None: no classes, or the client's own affair


@dataclass(frozen=True)
class RetrainEntry:
    """What was trained on what in which rounds."""

    options: RecordedRounds
    continued_from: Digest | None
    shards: tuple[ShardEntry, ...]
    rounds: tuple[RoundEntry, ...]


@dataclass(frozen=True)
class RecordFile:
    """A whole record."""

    fedmerge: str  # the version that wrote it
    format: Literal[1]
    options: RecordedOptions
    sources: Annotated[tuple[SourceEntry, ...], Meta(min_length=1)]
    plan: JsonPlan
    parameters: Count
    growth: Annotated[float, Meta(gt=0, le=1e100)]
    groups: tuple[GroupEntry, ...]
    # client → group → global units; of a group inside another one, a list for each outer unit
    assignments: Mapping[str, Mapping[str, Sequence[Place | Sequence[Place]]]]
    tensors: Mapping[str, Digest]  # by the written names
    warnings: tuple[str, ...]
    width_limit: Number | None = None
    probes: ProbesEntry | None = None
    quality: QualityEntry | None = None
    frontier: FrontierEntry | None = None
    fitted: tuple[str, ...] = ()
    is_program: bool = False  # an ensemble: its tensors are the clients' own
    retrain: RetrainEntry | UnsetType = UNSET
    base_model: SourceEntry | None = None  # the model that the sources are fine-tunes of
    schema: Literal[1] = SCHEMA
