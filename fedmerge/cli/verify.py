"""`fedmerge verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedmerge.cli.terminal import Terminal
from fedmerge.errors import VerificationError
from fedmerge.workflow.verify import verify


def run(merged: Path, clients: Sequence[Path], terminal: Terminal) -> int:
    """Show every difference; the exit code is 1 if there is any."""
    with terminal.progress() as progress:
        found = verify(merged, clients, progress=progress)
    terminal.result(
        {
            "ok": found.ok,
            "tensors": found.tensors,
            "recomputed": found.recomputed,
            "differences": list(found.differences),
        }
    )
    for difference in found.differences:
        terminal.problem(f"difference: {difference}")
    if not found.ok:
        terminal.line(f"{merged.name}: differs from its record")
        return VerificationError.exit_code
    terminal.line(
        f"{merged.name}: {found.tensors} tensors and all assignments agree with the record"
    )
    if found.recomputed:
        terminal.line(f"recomputed from its {found.recomputed} clients: equal")
    else:
        terminal.line("not recomputed: give the clients' files to do that")
    return 0
