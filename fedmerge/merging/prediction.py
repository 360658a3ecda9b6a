"""`--dry-run`: how large a merge may become, before any work is done."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedmerge.merging.averages import PIECE
from fedmerge.merging.session import Session
from fedmerge.values.plans import Plan, TensorPlan, axis_size

_PIECES = 8  # bytes of a number in a piece of an average, at most


@dataclass(frozen=True)
class GroupPrediction:
    """The range of one group's global width."""

    name: str
    client_widths: tuple[int, ...]
    narrowest: int
    widest: int


@dataclass(frozen=True)
class Prediction:
    """What a merge would take; parameters as a range, memory and bytes at its upper end."""

    groups: tuple[GroupPrediction, ...]
    fewest_parameters: int
    most_parameters: int
    memory: int  # bytes beyond the interpreter and its libraries
    read: int  # bytes of the clients' files
    rounds: int = 0  # exchanges with clients: none, a one-shot merge reads files

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        return {**vars(self), "groups": [vars(group) for group in self.groups]}


def predict(session: Session) -> Prediction:
    """Return the sizes that a merge of these clients may reach."""
    budget = session.dials.max_growth
    grows = session.options.method == "fedma" and budget != 1
    groups = []
    for group in session.plan.groups:
        widths = tuple(own[group.name] for own in session.client_widths)
        most = sum(widths) if grows and group.can_grow else max(widths)
        groups.append(GroupPrediction(group.name, widths, max(widths), most))
    narrow, wide = {g.name: g.narrowest for g in groups}, {g.name: g.widest for g in groups}
    fewest, most = session.parameters(narrow), session.parameters(wide)
    if grows and budget is not None:
        most = max(fewest, min(most, int(budget * fewest)))
    is_read_whole = session.options.method != "average" or bool(session.plan.groups)
    memory = 4 * most + _largest_group_bytes(session, narrow)
    return Prediction(
        groups=tuple(groups),
        fewest_parameters=fewest,
        most_parameters=most,
        memory=memory if is_read_whole else _PIECES * PIECE * (len(session.clients) + 2),
        read=sum(client.size for client in session.clients),
    )


def _largest_group_bytes(session: Session, widths: Mapping[str, int]) -> int:
    """Return what matching one group holds, at its largest: all clients' units, and the global.

    Features are float32 in the global layout, sums over clients float64.
    """
    sizes = [0]
    for group in session.plan.groups:
        features = sum(_features(t, widths) for t in _producers(session.plan, group.name))
        units = sum(own[group.name] for own in session.client_widths)
        sizes.append(features * (4 * units + 8 * 2 * widths[group.name]))
    return max(sizes)


def _producers(plan: Plan, group: str) -> list[TensorPlan]:
    return [t for t in plan.tensors.values() if group in t.produces and t.role != "pointwise"]


def _features(tensor: TensorPlan, widths: Mapping[str, int]) -> int:
    """Return how many numbers of a tensor belong to one position of its out axis."""
    return math.prod(axis_size(a, widths) for k, a in enumerate(tensor.axes) if k != tensor.out)
