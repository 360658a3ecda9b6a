"""`fedmerge export`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedmerge.api import export
from fedmerge.cli.arguments import model_code
from fedmerge.cli.output import Terminal


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Export the merged model and say how well the file agrees with it."""
    code = model_code(given)
    assert code is not None, "--model is required"
    with terminal.busy("exporting, and running what was exported"):
        done = export(
            given["merged"],
            given["output"],
            model=code,
            format=given["format"],
            force=given["force"],
        )
    terminal.result({**vars(done), "output": str(done.output)})
    terminal.line(
        f"wrote {done.output} ({done.format}); its outputs differ by {done.difference:.1g} "
        "from the merged model's, relative to the largest"
    )
    batch = "batches of any size" if done.any_batch else "inputs of the exported shape only"
    terminal.line(f"it takes {batch}")
