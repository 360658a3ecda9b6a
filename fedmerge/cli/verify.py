"""`fedmerge verify`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedmerge.cli.arguments import model_code
from fedmerge.cli.output import Terminal
from fedmerge.errors import UsageError, VerificationError
from fedmerge.measuring import verify


def run(given: Mapping[str, Any], terminal: Terminal) -> int:
    """Show every difference; the exit code is 1 if there is any."""
    merged: Path = given["merged"]
    model = model_code(given)
    if model is not None and not given["clients"]:
        raise UsageError("--model compares the clients' outputs", "give the clients' files too")
    if given["allow_global"] and not given["clients"]:
        raise UsageError("--allow-global is for the clients' files", "give the clients' files too")
    if given["base"] is not None and not given["clients"]:
        raise UsageError("--base is for a merge of clients", "give the clients' files too")
    with terminal.progress() as progress:
        found = verify(
            merged,
            given["clients"] or (),
            model=model,
            base=given["base"],
            allow_global=given["allow_global"] or (),
            progress=progress,
        )
    terminal.result(
        {
            "ok": found.ok,
            "tensors": found.tensors,
            "recomputed": found.recomputed,
            "fitted": found.fitted,
            "differences": list(found.differences),
        }
    )
    for difference in found.differences:
        terminal.problem(f"difference: {difference}")
    if not found.ok:
        terminal.line(f"{merged.name}: differs from its record")
        return VerificationError.exit_code
    what = "tensors" if found.is_program or found.is_adapter else "tensors and all assignments"
    terminal.line(f"{merged.name}: {found.tensors} {what} agree with the record")
    if found.recomputed:
        if found.fitted < found.tensors:
            how = "compared with" if found.is_program else "recomputed from"
            terminal.line(f"{how} its {found.recomputed} clients: equal")
        if found.fitted:
            terminal.line(
                f"not recomputed: {found.fitted} tensors that depend on more than the "
                "assignments; to check these, merge again with the same options and compare"
            )
        if model is not None:
            terminal.line(
                "its outputs are the mean of the clients'"
                if found.is_program
                else "every client's outputs are the same in the global layout"
            )
    elif found.is_trained:
        terminal.line("not recomputed: its tensors were trained in rounds")
    else:
        terminal.line("not recomputed: give the clients' files to do that")
    return 0
