"""`fedmerge report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedmerge.api import write_report
from fedmerge.cli.arguments import image_options, model_code
from fedmerge.cli.output import Terminal, evaluating, evaluation_options


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Write a page about a merged file, and say where it is."""
    with evaluating(terminal) as progress:
        written = write_report(
            given["merged"],
            given["output"],
            given["clients"] or (),
            model=model_code(given),
            image=image_options(given),
            data=given["data"],
            evaluation=evaluation_options(given) if given["data"] is not None else None,
            baselines=given["baseline"] or (),
            work_dir=given["work_dir"],
            allow_global=given["allow_global"] or (),
            force=given["force"],
            progress=progress,
        )
    terminal.result(written.to_json())
    terminal.line(written.verdict)
    terminal.line(f"wrote {written.output}; open it with a browser")
