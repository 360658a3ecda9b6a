"""`fedmerge partition`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedmerge.api import partition
from fedmerge.cli.output import Terminal
from fedmerge.federated.sharding import Partition, PartitionOptions, WrittenShard
from fedmerge.merging.evaluations import given_preparation
from fedmerge.values import wording

MOST_COLUMNS = 10  # classes that are shown one by one; more would not fit beside each other


def run(given: Mapping[str, Any], terminal: Terminal) -> None:
    """Write the shards and show how the classes are spread over them."""
    known = [field.name for field in fields(PartitionOptions)]
    options = PartitionOptions(**{name: given[name] for name in known if given[name] is not None})
    with terminal.busy("splitting"):
        done = partition(
            given["data"],
            given["output"],
            options,
            preparation=given_preparation(given["normalize"], given["channels_last"]),
            force=given["force"],
        )
    terminal.result({"output": str(given["output"]), **done.to_json()})
    for note in _notes(given["data"], done):
        terminal.note(f"note: {note}")
    samples = wording.count(sum(shard.samples for shard in done.shards))
    title = f"{given['output']}: {samples} samples of {given['data']} in {len(done.shards)} shards"
    columns, rows = _table(done.shards)
    terminal.table(title, columns, wording.shortened(rows))


def _table(shards: Sequence[WrittenShard]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows: samples per class, or of how many classes where they are many."""
    rows = [[shard.client, wording.count(shard.samples)] for shard in shards]
    columns = ["shard", "samples"]
    counts = [shard.class_counts for shard in shards if shard.class_counts is not None]
    if not counts:
        return columns, rows
    if len(counts[0]) > MOST_COLUMNS:
        present = [f"{sum(c > 0 for c in own)} of {len(own)}" for own in counts]
        return [*columns, "classes"], [
            [*row, cell] for row, cell in zip(rows, present, strict=True)
        ]
    classes = [f"class {number}" if not number else str(number) for number in range(len(counts[0]))]
    return [*columns, *classes], [
        [*row, *map(str, own)] for row, own in zip(rows, counts, strict=True)
    ]


def _notes(data: str, done: Partition) -> list[str]:
    notes = []
    if done.left_out:
        names = wording.listed(done.left_out, wording.MOST_LISTED)
        notes.append(f"left out, for too few samples: {names}")
    if done.kept_apart:
        columns = " and ".join(done.kept_apart)
        notes.append(f"{columns} are in no shard: evaluate on them with --data {data}")
    return notes
