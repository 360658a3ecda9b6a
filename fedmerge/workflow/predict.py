"""`--dry-run`: how large a merge may become, before any work is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedmerge.graph import count_parameters
from fedmerge.types.plans import equal_widths
from fedmerge.workflow.match import Prepared, kept_parameters
from fedmerge.workflow.options import MatchOptions, dials_for


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


def predict(prepared: Prepared, options: MatchOptions) -> Prediction:
    """Return the sizes that a merge of these clients may reach."""
    budget = dials_for(options, prepared.plan).max_growth
    grows = options.method == "fedma" and budget != 1
    groups = []
    for group in prepared.plan.groups:
        widths = tuple(own[group.name] for own in prepared.client_widths)
        most = sum(widths) if grows and group.can_grow else max(widths)
        groups.append(GroupPrediction(group.name, widths, max(widths), most))
    kept = kept_parameters(prepared)
    ties = prepared.plan.same_width
    fewest = kept + count_parameters(
        prepared.plan, equal_widths({g.name: g.narrowest for g in groups}, ties)
    )
    most = kept + count_parameters(
        prepared.plan, equal_widths({g.name: g.widest for g in groups}, ties)
    )
    if grows and budget is not None:
        most = max(fewest, min(most, int(budget * fewest)))
    return Prediction(
        groups=tuple(groups),
        fewest_parameters=fewest,
        most_parameters=most,
        memory=4 * most + _largest_group_bytes(prepared),
        read=sum(client.size for client in prepared.clients),
    )


def _largest_group_bytes(prepared: Prepared) -> int:
    """Return the size in float32 of all clients' tensors that produce one group, at its largest."""
    sizes = [0]
    for group in prepared.plan.groups:
        producing = [n for n, t in prepared.plan.tensors.items() if group.name in t.produces]
        sizes.append(sum(c.tensors[name].size for c in prepared.aligned for name in producing))
    return 4 * max(sizes)
