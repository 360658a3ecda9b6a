"""`fedmerge report`, and `--report` of other commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.cli.arguments import model_code
from fedmerge.cli.scores import evaluating, evaluation_options
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import UsageError
from fedmerge.workflow.reporting.report import check_report_output, write_report

if TYPE_CHECKING:
    from fedmerge.workflow.reporting.images import ImageOptions


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Write a page about a merged file, and say where it is."""
    with evaluating(terminal) as progress:
        written = write_report(
            given["merged"],
            given["output"],
            given["clients"] or (),
            model=model_code(given),
            image=_image_options(given),
            data=given["data"],
            evaluation=evaluation_options(given) if given["data"] is not None else None,
            baselines=given["baseline"] or (),
            force=given["force"],
            progress=progress,
        )
    terminal.result(written.to_json())
    terminal.line(written.verdict)
    terminal.line(f"wrote {written.output}; open it with a browser")


def _image_options(given: Mapping[str, Any]) -> ImageOptions | None:
    if given["image"] is None:
        for name in ("image_index", "image_group"):
            if given[name] is not None:
                raise UsageError(f"--{name.replace('_', '-')} is for --image")
        return None
    from fedmerge.workflow.evaluate import given_preparation  # records alone do without
    from fedmerge.workflow.reporting.images import ImageOptions

    return ImageOptions(
        file=given["image"],
        index=given["image_index"] or 0,
        preparation=given_preparation(given["normalize"], given["channels_last"]),
        groups=tuple(given["image_group"] or ()),
    )


def check_also(given: Mapping[str, Any], inputs: Sequence[Path]) -> None:
    """Refuse a --report that can't be written, before any work."""
    if given["report"] is not None:
        force = given["force"] or given.get("resume", False)
        check_report_output(given["report"], inputs=inputs, force=force)


def also_report(given: Mapping[str, Any], output: Path) -> dict[str, str]:
    """Write the page of --report about what was just written; return it as `--json` prints it."""
    if given["report"] is None:
        return {}
    write_report(output, given["report"], force=True)  # what it may overwrite was decided before
    return {"report": str(given["report"])}


def say_report(written: Mapping[str, str], terminal: Terminal) -> None:
    """Say where the page is, if there is one."""
    for page in written.values():
        terminal.line(f"wrote {page}, a page about it")
