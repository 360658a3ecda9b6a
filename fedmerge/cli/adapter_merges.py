"""`fedmerge match` of LoRA adapters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.api import merge_adapters
from fedmerge.checkpoint import adapter_folder, expand_paths
from fedmerge.cli.arguments import match_options
from fedmerge.cli.next_commands import CHECKED, next_command
from fedmerge.cli.output import Terminal
from fedmerge.errors import UsageError
from fedmerge.values import wording

if TYPE_CHECKING:
    from fedmerge.merging.adapter_merge import AdapterMerge

_OF_MODELS = (  # what says something about models alone
    *("model", "model_arg", "input_shape", "plan", "report", "image", "frontier", "frontier_plot"),
    *(
        "shard_size",
        "require",
        "base",
        "probe",
        "probe_data",
        "probe_count",
        "probe_mean",
        "augment",
    ),
)


def has_adapters(clients: Sequence[Path]) -> bool:
    """Return whether any client is a LoRA adapter."""
    return any(adapter_folder(path) is not None for path in expand_paths(clients))


def merge_given(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Merge the adapters, write the result and say what it is."""
    for name in _OF_MODELS:
        if given[name]:
            raise UsageError(f"`{name}` means nothing for LoRA adapters", "leave it out")
    started, options = time.perf_counter(), match_options(given)
    is_dry: bool = given["dry_run"]
    output: Path | None = None if is_dry else given["output"]
    with terminal.working("reading adapters") as work:
        merge = merge_adapters(
            given["clients"],
            options,
            output=output,
            force=given["force"],
            progress=work.progress,
        )
    for warning in merge.warnings:
        terminal.warn(warning)
    seconds = round(time.perf_counter() - started, 3)
    told = {"dry_run": is_dry, "output": None if output is None else str(output)}
    terminal.result({**merge.summary(), **told, "seconds": seconds})
    _show(merge, terminal)
    if output is None:
        terminal.line("dry run: nothing is written")
        return
    terminal.line(f"wrote {output}, which peft loads; check it with:")
    terminal.line(next_command("verify", [output, *given["clients"]], given, CHECKED))


def _show(merge: AdapterMerge, terminal: Terminal) -> None:
    ranks = merge.client_ranks
    rows = [[name, str(rank)] for name, rank in ranks.items()]
    rows.append(["merged", str(merge.rank)])
    modules = wording.count(len(merge.layers))
    title = f"{wording.count(len(ranks))} LoRA adapters, updates of {modules} modules"
    terminal.table(title, ["adapter", "rank"], rows)
    terminal.line(f"parameters: {wording.count(merge.parameters)}")
    if merge.kept < 1:
        terminal.line(
            f"kept: {wording.percent(merge.kept)} of the mean update (squared Frobenius norm); "
            "without --max-growth all of it"
        )
    else:
        terminal.line(
            "kept: the whole mean update; --max-growth 1 holds it to the largest client's rank"
        )
    if merge.adapters[0].others:
        count = wording.count(len(merge.adapters[0].others))
        terminal.line(f"averaged element by element: {count} tensors that were trained whole")
