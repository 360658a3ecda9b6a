"""The report: one HTML page about a merge, drawn from plain values."""

from fedmerge.report.drawing import check_drawing
from fedmerge.report.page import render, render_frontier, render_plan
from fedmerge.report.values import (
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
    Reference,
    Report,
    RoundsView,
    Score,
    Scores,
    SourceView,
    Stage,
    UnitRow,
)

__all__ = [
    "CellPicture",
    "Curve",
    "Edge",
    "Fact",
    "FeatureMaps",
    "FrontierPoint",
    "GroupView",
    "Match",
    "Missing",
    "PlanPicture",
    "Reference",
    "Report",
    "RoundsView",
    "Score",
    "Scores",
    "SourceView",
    "Stage",
    "UnitRow",
    "check_drawing",
    "render",
    "render_frontier",
    "render_plan",
]
