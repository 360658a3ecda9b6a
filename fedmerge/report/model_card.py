"""The README.md of a merged folder: what was merged, how, and how good it is as far as known."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedmerge import __version__
from fedmerge.checkpoint import Checkpoint
from fedmerge.merging.quality import Quality
from fedmerge.merging.result import Merge
from fedmerge.values.wording import AVERAGE, count, percent, whole_percent, widths

CARD = "README.md"
MOST_CLIENTS = 100  # that the card lists


def model_card(merge: Merge, library: str | None, name: str, weights: str) -> str:
    """Return the card of a merge that is going to be in a folder of this name."""
    return "\n".join(
        [
            *_front_matter(library),
            f"# {name}",
            "",
            f"{count(len(merge.clients))} {merge.plan.architecture or 'models'} merged into one of "
            f"{count(merge.parameters)} parameters by fedmerge {__version__}, which {_way(merge)}.",
            "",
            "## Merged models",
            "",
            *_table(("model", "SHA-256 of its weights"), _sources(merge)),
            "",
            "## How",
            "",
            *_how(merge),
            "",
            "```console",
            f"$ {_command(merge, name, weights)}",
            "```",
            "",
            "The whole record (options, assignments of units, hashes of all tensors) is in the "
            "metadata of the weights; `fedmerge verify` checks them against it.",
            "",
            "## How good it is",
            "",
            *_quality(merge),
            "",
        ]
    )


def _way(merge: Merge) -> str:
    """Return what was done with the clients, as far as it is the same for all of their units."""
    base = merge.session.base
    if merge.options.merge_units == "fit-in-place":
        return "fits every layer to their mean outputs, each unit where it is"
    if base is not None:
        return f"adds {merge.options.scale:g} × their mean change to {base.name}"
    if _is_average(merge):
        return "averages them element by element"
    return "matches their hidden units before it merges them"


def _is_average(merge: Merge) -> bool:
    """Return whether no unit was moved: by the user's wish, or as the clients share their start."""
    if merge.quality is not None:
        return merge.quality.chosen == AVERAGE
    return merge.options.method == "average" or (merge.stays_in_place and merge.growth == 1)


def _command(merge: Merge, name: str, weights: str) -> str:
    """Return the command that makes the merge again: its record has all options."""
    base = merge.session.base
    files = [
        *map(_file, merge.clients),
        *([] if base is None else ["--base", _file(base.checkpoint)]),
    ]
    record = f"{name}/{weights}"
    return shlex.join(["fedmerge", "match", *files, "--config", record, "-o", f"{name}-again"])


def _file(model: Checkpoint) -> str:
    return model.path.name if model.path else model.name


def _front_matter(library: str | None) -> list[str]:
    named = [f"library_name: {library}"] if library else []
    return ["---", *named, "tags:", "- merge", "- fedmerge", "---", ""]


def _sources(merge: Merge) -> list[Sequence[str]]:
    rows = [(source.name, f"`{source.sha256}`") for source in merge.sources[:MOST_CLIENTS]]
    rest = len(merge.sources) - len(rows)
    return [*rows, *([(f"and {count(rest)} more", "")] if rest else [])]


def _how(merge: Merge) -> Iterator[str]:
    yield f"Method: {merge.options.method}; growth {merge.growth:.2f}."
    rows = [
        (group.name, widths(group.client_widths), str(group.width), whole_percent(group.match_rate))
        for group in merge.groups
    ]
    if rows:
        yield ""
        yield from _table(("units", "in the models", "merged", "matched"), rows)


def _quality(merge: Merge) -> Iterator[str]:
    found: Quality | None = merge.quality
    yield merge.verdict
    if found is None:
        return
    yield ""
    yield f"On {found.samples} held-out probes ({found.source}), without labels:"
    yield ""
    rows = [(name, percent(own.decisions)) for name, own in found.clients.items()]
    rows.append(("this merge", percent(found.merged.decisions)))
    yield from _table(("model", "decides as the ensemble of all"), rows)
    for warning in found.warnings():
        yield ""
        yield f"Note: {warning}."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'|'.join('---' for _ in header)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def library_of(config: Mapping[str, Any]) -> str | None:
    """Return the library that loads a folder by itself, as the Hub calls it."""
    if isinstance(config.get("model_type"), str):
        return "transformers"
    return "timm" if "pretrained_cfg" in config else None
