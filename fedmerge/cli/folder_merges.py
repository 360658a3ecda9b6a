"""`fedmerge match` of folders: of LoRA adapters, and what is said of a model that is one."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.api import merge_adapters
from fedmerge.cli.arguments import match_options
from fedmerge.cli.command_line import CHECKED
from fedmerge.cli.commands import COMMANDS
from fedmerge.cli.output import Terminal
from fedmerge.errors import UsageError
from fedmerge.values import wording

if TYPE_CHECKING:
    from fedmerge.architecture.folder_config import FolderConfig
    from fedmerge.merging.adapter_merge import AdapterMerge
    from fedmerge.merging.result import Merge

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
MOST_GROUPS = 2  # that are named per reason; `fedmerge plan` names all
REPOSITORY = "YOUR-NAME"  # of the user, on the Hub


def merge_adapters_given(given: Mapping[str, Any], terminal: Terminal) -> None:
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
    _show_adapters(merge, terminal)
    if output is None:
        terminal.line("dry run: nothing is written")
        return
    terminal.line(f"wrote {output}, which peft loads; check it with:")
    terminal.line(COMMANDS["verify"].suggested([output, *given["clients"]], given, CHECKED))


def _show_adapters(merge: AdapterMerge, terminal: Terminal) -> None:
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


def width_lines(merge: Merge, config: FolderConfig) -> Iterator[str]:
    """Yield which fields of config.json changed, and which groups can't grow, by the reason."""
    changed = [
        f"{said.name} {said.width} → {merge.widths[said.groups[0]]}"
        for said in config.said
        if merge.widths[said.groups[0]] != said.width
    ]
    if changed:
        yield f"config.json says: {', '.join(changed)}"
    if merge.options.max_growth == 1:  # nobody asked
        return
    stuck: dict[str, list[str]] = {}
    for group in merge.plan.groups:
        if not group.can_grow:
            stuck.setdefault(group.why.partition(":")[0], []).append(group.name)
    for why, names in stuck.items():
        yield f"can't grow ({why}): {wording.listed(names, MOST_GROUPS)}"


def upload_command(output: Path) -> str:
    """Return the command that uploads a folder."""
    place = f"{REPOSITORY}/{output.resolve().name}"
    return shlex.join(["hf", "upload", place, str(output)])
