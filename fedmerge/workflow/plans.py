"""The plan of a merge: given by the user, or read off the first client, then checked on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmerge.decoding import Fail, decode_json, read_text
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.graph import ChainOptions, keep_tensors, plan_chain, plan_from_json, solve_widths
from fedmerge.types.clients import Client
from fedmerge.types.plans import Plan


def read_plan(path: Path) -> Plan:
    """Read a plan that was written by `fedmerge plan -o` or by hand."""

    def fail(reason: str) -> UsageError:
        return UsageError(f"--plan {path.name} can't be read: {reason}")

    return parse_plan(read_text(path, fail=fail), fail=fail)


def parse_plan(text: str | bytes, *, fail: Fail) -> Plan:
    """Return the plan that JSON describes."""
    return plan_from_json(decode_json(text, Any, fail=fail))


def plan_clients(
    clients: Sequence[Client], chain: ChainOptions, *, given: Plan | None, kept: Sequence[str]
) -> tuple[Plan, list[dict[str, int]]]:
    """Return the plan and every client's group widths, or say why they don't fit together."""
    first = clients[0]
    plan = given or plan_chain(
        first.tensors, chain, aliases=first.aliases, kept=kept, source=first.name
    )
    _check_kept(plan, first)
    plan = _with_kept(plan, first, kept)
    _check_covered(plan, first)
    widths = [solve_widths(plan, _shapes(client), source=client.name) for client in clients]
    _check_fixed_groups(plan, clients, widths)
    return plan, widths


def _with_kept(plan: Plan, first: Client, kept: Sequence[str]) -> Plan:
    kept = [name for name in kept if name not in plan.kept]
    if not kept:
        return plan
    widths = solve_widths(plan, _shapes(first), source=first.name)
    return keep_tensors(plan, kept, tensors=first.tensors, widths=widths)


def _shapes(client: Client) -> Mapping[str, tuple[int, ...]]:
    return {name: info.shape for name, info in client.tensors.items()}


def _check_kept(plan: Plan, first: Client) -> None:
    """Refuse a plan that keeps tensors which the first client does not have."""
    for name in plan.kept:
        if name not in first.tensors:
            raise ArchitectureError(
                f"{first.name}: has no tensor '{name}', which the plan keeps",
                "a plan must name the tensors of the files it is used for; see `fedmerge inspect`",
            )


def _check_covered(plan: Plan, first: Client) -> None:
    """Refuse float tensors that the plan says nothing about."""
    for name, info in first.tensors.items():
        described = name in plan.tensors or name in plan.kept or name in first.aliases
        if info.is_float and not described:
            raise ArchitectureError(
                f"{first.name}: the plan says nothing about '{name}'",
                f"add it to the plan, or take it from the first client with --keep '{name}'",
            )


def _check_fixed_groups(
    plan: Plan, clients: Sequence[Client], widths: Sequence[Mapping[str, int]]
) -> None:
    for group in plan.groups:
        sizes = {own[group.name] for own in widths}
        if not group.can_grow and len(sizes) > 1:
            shown = ", ".join(
                f"{c.name} {w[group.name]}" for c, w in zip(clients, widths, strict=True)
            )
            raise ArchitectureError(
                f"group '{group.name}' can't grow ({group.why}), but its widths differ: {shown}",
                "merge clients of equal width",
            )
