"""What a report tells, as plain values: no files, no tensors but small pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedmerge.values.arrays import Array

ScoreKind: TypeAlias = Literal["client", "average", "ensemble", "merge", "other"]


@dataclass(frozen=True)
class Fact:
    """A name and what is to be said of it."""

    name: str
    value: str


@dataclass(frozen=True)
class SourceView:
    """One client: its file without folders, and what identifies it."""

    name: str
    file: str
    size: int  # bytes
    sha256: str
    samples: int | None = None  # of its shard, where it was trained in rounds


@dataclass(frozen=True)
class Stage:
    """A group along the forward path, before and, if it is known, after the merge."""

    name: str
    client_widths: tuple[int, ...]
    width: int | None = None  # global
    why_fixed: str = ""  # why it can't grow


@dataclass(frozen=True)
class Edge:
    """Tensors that make one stage from another; -1 is the input, `len(stages)` the output."""

    start: int
    end: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class PlanPicture:
    """The groups in forward order and what leads from which to which."""

    title: str
    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class Match:
    """A global unit that several clients own, and how alike their units are."""

    unit: int
    owners: tuple[tuple[str, int], ...]  # client and its unit
    similarity: float  # mean over the owners of the cosine with the others' mean


@dataclass(frozen=True)
class GroupView:
    """What became of one group."""

    name: str
    client_widths: tuple[int, ...]
    width: int
    padding: int
    match_rate: float
    scatter: float | None
    owners: tuple[int, ...]  # how many global units have 1, 2, … owners
    threshold: float | None
    similarities: tuple[float, ...] = ()  # of all units that share their global unit
    matches: tuple[Match, ...] = ()  # from the best to the worst
    unknown: str = ""  # why the similarities are not known
    inside: str = ""  # the group in whose every unit it has so many; units are counted over all


@dataclass(frozen=True)
class Score:
    """How good one model is."""

    kind: ScoreKind
    model: str
    value: float | None  # None: could not be told, see the note
    details: tuple[str, ...] = ()  # one per column of details
    note: str = ""


@dataclass(frozen=True)
class Reference:
    """A number that is known without a measurement, drawn as a line."""

    name: str
    value: float


@dataclass(frozen=True)
class Scores:
    """Models next to each other by one number."""

    title: str
    metric: str
    is_share: bool  # of 1, read as per cent
    columns: tuple[str, ...]  # names of the details
    rows: tuple[Score, ...]
    how: str  # where the numbers come from
    reference: Reference | None = None  # what the numbers are relative to


@dataclass(frozen=True)
class FrontierPoint:
    """A size and the agreement with the ensemble that it buys."""

    kind: Literal["client", "merge", "ensemble"]
    name: str
    growth: float
    parameters: int
    agreement: float
    is_own: bool = False  # the size of the file that the page is about


@dataclass(frozen=True)
class Curve:
    """One run round by round; None where a number is not known."""

    name: str
    is_own: bool  # the run that the report is about, not a baseline
    rounds: tuple[int, ...]
    megabytes: tuple[float, ...]  # exchanged since the start
    losses: tuple[float | None, ...]  # of the clients' training
    metrics: Mapping[str, tuple[float | None, ...]]  # of the global model


@dataclass(frozen=True)
class Missing:
    """A client that was left out of a round."""

    round: int
    client: str
    why: str


@dataclass(frozen=True)
class RoundsView:
    """How a run in rounds went, next to its baselines."""

    curves: tuple[Curve, ...]  # the run itself first
    labels: tuple[str, ...]  # what each of its rounds was about
    widths: Mapping[str, tuple[int | None, ...]]  # group → global width after each round
    missing: tuple[Missing, ...]
    clients: int


@dataclass(frozen=True)
class CellPicture:
    """A small picture (height, width) or (height, width, 3) in [0, 1], None where there is none."""

    pixels: Array | None
    label: str


@dataclass(frozen=True)
class UnitRow:
    """One global unit in every model."""

    unit: int
    maps: tuple[CellPicture, ...]
    filters: tuple[CellPicture, ...] = ()  # of first layers


@dataclass(frozen=True)
class FeatureMaps:
    """What units of a group see in an image: global, every client's, the average's."""

    group: str
    tensor: str
    image: CellPicture
    columns: tuple[str, ...]  # models
    rows: tuple[UnitRow, ...]
    how: str = ""  # what is to be known of the columns


@dataclass(frozen=True)
class Report:
    """All that one page tells."""

    title: str
    verdict: str
    version: str
    facts: tuple[Fact, ...]
    sources: tuple[SourceView, ...]
    options: tuple[Fact, ...]
    plan: PlanPicture
    groups: tuple[GroupView, ...]
    clients: int
    scores: tuple[Scores, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    rounds: RoundsView | None = None
    features: tuple[FeatureMaps, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what the page does not tell, and why
