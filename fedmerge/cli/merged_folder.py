"""What is said of a merge that is written as a folder: its widths, and how to go on with it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from fedmerge.merging.result import Merge
from fedmerge.values import wording

MOST_GROUPS = 2  # that are named per reason; `fedmerge plan` names all
REPOSITORY = "YOUR-NAME"  # of the user, on the Hub


def width_lines(merge: Merge) -> Iterator[str]:
    """Yield which fields of config.json changed, and which groups can't grow, by the reason."""
    config = merge.session.config
    if config is None or merge.is_program:
        return
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
