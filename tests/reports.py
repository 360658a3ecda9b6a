"""A report with a bit of everything, and with names that nobody should trust."""

from __future__ import annotations

import numpy as np

from fedmerge.report import (
    CellPicture,
    Curve,
    Edge,
    Fact,
    FeatureMaps,
    FrontierPoint,
    GroupView,
    Match,
    Missing,
    PlanPicture,
    Report,
    RoundsView,
    Score,
    Scores,
    SourceView,
    Stage,
    UnitRow,
)

HOSTILE = "<script>document.title='owned'</script>$x_1$&amp;\x00é"

PLAN = PlanPicture(
    "Sequential",
    (Stage("conv1", (4, 4), 6), Stage(f"fc1 {HOSTILE}", (8, 7), 9, why_fixed="a norm")),
    (Edge(-1, 0, ("conv1.weight",)), Edge(0, 1, ("fc1.weight",)), Edge(1, 2, ("fc2.weight",))),
)
CONV1 = GroupView(
    name="conv1",
    client_widths=(4, 4),
    width=6,
    padding=0,
    match_rate=0.5,
    scatter=0.25,
    owners=(4, 2),
    threshold=0.5,
    similarities=(0.9, 0.9, 0.4, 0.4),
    matches=(Match(0, (("a", 0), (HOSTILE, 3)), 0.9), Match(5, (("a", 2), ("b", 1)), 0.4)),
)
FC1 = GroupView(
    name=f"fc1 {HOSTILE}",
    client_widths=(8, 7),
    width=9,
    padding=0,
    match_rate=0.0,
    scatter=None,
    owners=(9, 0),
    threshold=None,
    unknown="Not compared.",
)
SCORES = Scores(
    title="Measured: accuracy",
    metric="accuracy",
    is_share=True,
    columns=("loss",),
    rows=(
        Score("client", HOSTILE, 0.25, ("1.0000",)),
        Score("average", "element-wise average", None, (), "different widths"),
        Score("ensemble", "ensemble", 0.5, ("0.5000",)),
        Score("merge", "the merge", 0.75, ("0.2500",)),
    ),
    how="On 8 samples.",
)
ROUNDS = RoundsView(
    curves=(
        Curve(HOSTILE, True, (1, 2), (0.5, 1.0), (1.0, None), {"accuracy": (None, 0.75)}),
        Curve("fedavg", False, (1, 2, 3), (1.0, 2.0, 3.0), (1.0, 0.5, 0.25), {}),
    ),
    labels=("conv1", "last layer"),
    widths={"conv1": (6, 6), "fc1": (None, 9)},
    missing=(Missing(2, HOSTILE, "timeout"),),
    clients=2,
)
FEATURES = FeatureMaps(
    group="conv1",
    tensor="conv1.weight",
    image=CellPicture(np.linspace(0, 1, 16).reshape(4, 4), "digit"),
    columns=("merged", HOSTILE),
    rows=(
        UnitRow(
            0,
            (CellPicture(np.eye(4), "map 1"), CellPicture(None, "not its unit")),
            (CellPicture(np.ones((3, 3, 3)), "filter 1"), CellPicture(None, "not its unit")),
        ),
    ),
)
FRONTIER = (
    FrontierPoint("client", "client a", 1.0, 100, 0.5),
    FrontierPoint("merge", "merge within 1 ×", 1.0, 100, 0.7),
    FrontierPoint("merge", "merge within 2 ×", 2.0, 200, 0.9),
    FrontierPoint("ensemble", "ensemble", 2.0, 200, 1.0),
)
REPORT = Report(
    title=f"global.pt of {HOSTILE}",
    verdict=f"Good, but {HOSTILE}.",
    version="0.1.0",
    facts=(Fact("clients", "2"),),
    sources=(
        SourceView("a", "a.pt", 1234, "0" * 64, 10),
        SourceView(HOSTILE, "b.pt", 999, "1" * 64, None),
    ),
    options=(Fact("seed", "0"), Fact("keep", HOSTILE)),
    plan=PLAN,
    groups=(CONV1, FC1),
    clients=2,
    scores=(SCORES,),
    frontier=FRONTIER,
    rounds=ROUNDS,
    features=(FEATURES,),
    warnings=(f"beware of {HOSTILE}",),
    notes=(f"nothing of {HOSTILE}",),
)
