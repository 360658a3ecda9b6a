"""The options of reports, as typer types."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

from fedmerge.cli.options import option

_REPORT = "Report"
ReportOutput: TypeAlias = Annotated[
    Path,
    option(
        "Output",
        "Where to write the page (default: report.html).",
        "--output",
        "-o",
        metavar="FILE.html",
    ),
]
AlsoReport: TypeAlias = Annotated[
    Path | None,
    option("Output", "Also write a page about the result.", "--report", metavar="FILE.html"),
]
Graph: TypeAlias = Annotated[
    Path | None,
    option("Output", "Also draw it.", "--graph", metavar="FILE.svg|FILE.png"),
]
Image: TypeAlias = Annotated[
    Path | None,
    option(
        _REPORT,
        "Show what matched units see in this picture, .npy array or sample of a shard.",
        metavar="FILE",
    ),
]
ImageIndex: TypeAlias = Annotated[
    int | None, option(_REPORT, "Which sample of that shard (default: 0).", metavar="N")
]
ImageGroup: TypeAlias = Annotated[
    list[str] | None,
    option(
        _REPORT,
        "Which group looks (default: the first and the last convolution's); repeatable.",
        metavar="NAME",
    ),
]
RunFolder: TypeAlias = Annotated[
    Path | None,
    option(
        _REPORT,
        "Of a run in rounds, its --work-dir (default: the merged file's name + .work).",
        "--work-dir",
        metavar="FOLDER",
    ),
]
Baseline: TypeAlias = Annotated[
    list[Path] | None,
    option(
        _REPORT,
        "Another file that `retrain` wrote, to draw its rounds too; repeatable.",
        metavar="FILE",
    ),
]
ReportData: TypeAlias = Annotated[
    str | None,
    option(
        _REPORT,
        "Measure merge, clients, average and ensemble on this: x and y; or your function.",
        metavar="FILE|FILE.py:NAME",
    ),
]
