"""`fedmerge convert`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedmerge.api import convert
from fedmerge.checkpoint import written_path
from fedmerge.cli.arguments import match_options
from fedmerge.cli.output import Terminal


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Write what was understood of a file as a plain state dict."""
    options = match_options(given)
    with terminal.busy("converting"):
        checkpoint = convert(
            given["file"],
            given["output"],
            options.reading,
            dtype=options.dtype,
            force=given["force"],
            shard_size=given["shard_size"],
        )
    output = written_path(given["output"], sharded=given["shard_size"] is not None)
    terminal.result(
        {
            "output": str(output),
            "container": checkpoint.container,
            "location": checkpoint.location,
            "tensors": len(checkpoint.tensors),
            "notes": list(checkpoint.notes),
        }
    )
    for note in checkpoint.notes:
        terminal.note(f"{checkpoint.name}: {note}")
    terminal.line(f"wrote {len(checkpoint.tensors)} tensors to {output}")
