"""`fedmerge inspect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedmerge.api import inspect
from fedmerge.checkpoint import model_folder
from fedmerge.cli.arguments import match_options
from fedmerge.cli.commands import COMMANDS
from fedmerge.cli.exit_codes import error_to_json
from fedmerge.cli.output import Terminal
from fedmerge.merging.inspection import Inspection
from fedmerge.values import wording


def run(given: Mapping[str, Any], terminal: Terminal) -> int:
    """Show every file; the exit code is the first refusal's, else 0."""
    options = match_options(given)
    with terminal.busy("reading files"):
        inspections = inspect(given["files"], options.reading, options.chain)
    terminal.result({"files": [_to_json(own) for own in inspections]})
    for inspection in inspections:
        _show(inspection, terminal)
    if len(inspections) > 1:
        _show_differences(inspections, terminal)
    refusals = [i.refused for i in inspections if i.refused is not None]
    return refusals[0].exit_code if refusals else 0


def _show(inspection: Inspection, terminal: Terminal) -> None:
    checkpoint = inspection.checkpoint
    if checkpoint is None:
        assert inspection.refused is not None
        terminal.line(f"{inspection.path.name}: refused")
        terminal.line(f"  reason: {inspection.refused.problem}")
        if inspection.refused.hint:
            terminal.line(f"  way out: {inspection.refused.hint}")
        return
    floats = sum(info.size for info in checkpoint.tensors.values() if info.is_float)
    where = f", state dict at '{checkpoint.location}'" if checkpoint.location else ""
    title = (
        f"{inspection.path.name}: {checkpoint.container}{where}; "
        f"{len(checkpoint.tensors)} tensors, {wording.count(floats)} parameters"
    )
    rows = [
        [
            f"{layer.prefix}.{leaf}" if layer.prefix else leaf,
            wording.shape(info.shape),
            info.dtype,
            layer.kind,
        ]
        for layer in inspection.layers
        for leaf, info in layer.tensors.items()
    ]
    terminal.table(title, ["tensor", "shape", "dtype", "layer"], rows)
    if inspection.members:
        terminal.line(
            f"  an ensemble's program: {inspection.members} members side by side, and the weighted "
            "mean of their outputs"
        )
    for note in checkpoint.notes:
        terminal.line(f"  note: {note}")
    for alias, name in checkpoint.aliases.items():
        terminal.line(f"  tied: '{alias}' is '{name}'")
    if inspection.plan is not None:
        groups = ", ".join(group.name for group in inspection.plan.groups)
        terminal.line(f"  understood as {inspection.plan.architecture}; units: {groups or 'none'}")
    elif inspection.unplanned is not None:
        source = "names" if checkpoint.program is None else "its graph"
        terminal.line(f"  not mergeable from {source} alone: {inspection.unplanned.problem}")
        hint = inspection.unplanned.hint
        if model_folder(inspection.path) is not None:
            plan = COMMANDS["plan"].suggested([inspection.path], {}, ())
            hint = f"its config.json tells what the model is, which merges go by: {plan}"
        terminal.line(f"  way out: {hint}")


def _show_differences(inspections: Sequence[Inspection], terminal: Terminal) -> None:
    opened = [i for i in inspections if i.checkpoint is not None]
    different = [i for i in opened if i.difference is not None]
    for inspection in different:
        terminal.line(f"first difference: {inspection.path.name}: {inspection.difference}")
    if len(opened) > 1 and not different:
        terminal.line(f"the {len(opened)} files have the same names, shapes and dtypes")


def _to_json(inspection: Inspection) -> dict[str, Any]:
    if inspection.checkpoint is None:
        assert inspection.refused is not None
        return {"file": str(inspection.path), "refused": error_to_json(inspection.refused)}
    checkpoint = inspection.checkpoint
    return {
        "file": str(inspection.path),
        "name": checkpoint.name,
        "container": checkpoint.container,
        "location": checkpoint.location,
        "weights": checkpoint.weights,
        "prefix": checkpoint.prefix,
        "notes": list(checkpoint.notes),
        "aliases": dict(checkpoint.aliases),
        "tensors": {
            name: {"shape": list(info.shape), "dtype": info.dtype}
            for name, info in checkpoint.tensors.items()
        },
        "layers": {layer.prefix: layer.kind for layer in inspection.layers},
        "architecture": inspection.plan.architecture if inspection.plan else None,
        "not_mergeable": error_to_json(inspection.unplanned) if inspection.unplanned else None,
        "difference": inspection.difference,
        "members": inspection.members,
    }
