"""Whether a record agrees with itself and with its file, before anything is computed from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count

from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import CheckpointError, FedmergeError
from fedmerge.graph import solve_widths
from fedmerge.workflow.record import GroupEntry, MergeRecord, record_from_json


def consistent_record(
    value: object, *, source: str, checkpoint: Checkpoint | None = None
) -> MergeRecord:
    """Return the record that JSON values describe; refuse one that contradicts itself or its file.

    Widths and assignments can be worked with then: no array is larger than the record itself.
    """
    record = record_from_json(value, source=source)
    own = () if checkpoint is None else shape_differences(checkpoint, record)
    for difference in chain(assignment_differences(record), own):
        raise CheckpointError(
            f"{source}: its merge record is damaged ({difference})", "merge again from the clients"
        )
    return record


def shape_differences(checkpoint: Checkpoint, record: MergeRecord) -> Iterator[str]:
    """Compare the widths that the tensors' shapes give with the recorded ones."""
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    try:
        widths = solve_widths(record.plan, shapes, source=checkpoint.name)
    except FedmergeError as error:
        yield error.problem
        return
    for entry in record.groups:
        if widths.get(entry.name) != entry.width:
            found = widths.get(entry.name)
            yield f"group '{entry.name}' is {found} wide in the file, {entry.width} in the record"


def assignment_differences(record: MergeRecord) -> Iterator[str]:
    """Check that assignments are injective, in range, and together cover every global unit."""
    names = [source.name for source in record.sources]
    groups = [group.name for group in record.plan.groups]
    if sorted(record.assignments) != sorted(names):
        yield "the record's assignments and sources name different clients"
        return
    listed = {"the record's widths": [entry.name for entry in record.groups]}
    listed |= {f"{name}'s assignments": list(record.assignments[name]) for name in names}
    for what, found in listed.items():
        if sorted(found) != sorted(groups):
            odd = [*sorted(set(groups).symmetric_difference(found)), *found][0]
            how = "missing" if odd not in found else "unknown or there twice"
            yield f"{what} are not those of the plan's groups: '{odd}' is {how}"
            return
    widest = max((entry.width - entry.padding for entry in record.groups), default=0)
    for entry in record.groups:
        yield from _group_differences(record, entry, names, widest)


def _group_differences(
    record: MergeRecord, entry: GroupEntry, names: Sequence[str], widest: int
) -> Iterator[str]:
    """Check one group; nothing is made as long as its width says before that is known to be true.

    `widest` is the most units that clients have in any group: none is padded beyond it.
    """
    matched = entry.width - entry.padding
    covered: set[int] = set()
    for name, width in zip(names, entry.client_widths, strict=False):
        units = record.assignments[name][entry.name].tolist()
        where = f"{name}'s assignment of group '{entry.name}'"
        if len(units) != width:
            yield f"{where} has {len(units)} units, its recorded width is {width}"
        if len(set(units)) < len(units):
            yield f"{where} gives two units the same global unit"
        if not all(0 <= unit < matched for unit in units):
            yield f"{where} leaves the range of 0 to {matched - 1}"
        covered |= set(units)
    if len(entry.client_widths) != len(names):
        yield f"group '{entry.name}' has {len(entry.client_widths)} recorded widths"
    elif entry.similarities and tuple(map(len, entry.similarities)) != entry.client_widths:
        yield f"group '{entry.name}' has similarities of other units than its clients'"
    missing = next(unit for unit in count() if unit not in covered)
    if missing < matched:
        yield f"global unit {missing} of group '{entry.name}' belongs to no client"
    if entry.width > max(widest, matched):
        yield f"group '{entry.name}' is padded to {entry.width} units, no group has so many"
