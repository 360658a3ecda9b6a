"""The parameters of reports."""

from __future__ import annotations

from pathlib import Path

from fedmerge.cli.parameters import option

_REPORT = "Report"
REPORT_OUTPUT = option(
    "output",
    Path,
    "Output",
    "Where to write the page (default: report.html).",
    "--output",
    "-o",
    metavar="FILE.html",
    default=Path("report.html"),
)
ALSO_REPORT = option(
    "report",
    Path | None,
    "Output",
    "Also write a page about the result.",
    "--report",
    metavar="FILE.html",
)
GRAPH = option(
    "graph", Path | None, "Output", "Also draw it.", "--graph", metavar="FILE.svg|FILE.png"
)
IMAGE = option(
    "image",
    Path | None,
    _REPORT,
    "Show what matched units see in this picture, .npy array or sample of a shard.",
    metavar="FILE",
)
IMAGE_INDEX = option(
    "image_index", int | None, _REPORT, "Which sample of that shard (default: 0).", metavar="N"
)
IMAGE_GROUP = option(
    "image_group",
    list[str] | None,
    _REPORT,
    "Which group looks (default: the first and the last convolution's); repeatable.",
    metavar="NAME",
)
RUN_FOLDER = option(
    "work_dir",
    Path | None,
    _REPORT,
    "Of a run in rounds, its --work-dir (default: the merged file's name + .work).",
    "--work-dir",
    metavar="FOLDER",
)
BASELINE = option(
    "baseline",
    list[Path] | None,
    _REPORT,
    "Another file that `retrain` wrote, to draw its rounds too; repeatable.",
    metavar="FILE",
)
REPORT_DATA = option(
    "data",
    str | None,
    _REPORT,
    "Measure merge, clients, average and ensemble on this: x and y; or your function.",
    metavar="FILE|FILE.py:NAME",
)

IMAGES = (IMAGE, IMAGE_INDEX, IMAGE_GROUP)
