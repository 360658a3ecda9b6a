"""Prepared clients: planned, checked, ready to be matched; and the merge that matchings mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.graph import count_parameters
from fedmerge.matching import GroupMatching, SearchOptions
from fedmerge.types.arrays import IntArray
from fedmerge.types.assignments import Assignment
from fedmerge.types.clients import Client
from fedmerge.types.plans import Plan, equal_widths
from fedmerge.units import Averaging, TieBreaker
from fedmerge.workflow.clients import (
    align_names,
    check_dtypes,
    keep_matches,
)
from fedmerge.workflow.layers import Problem, Solution
from fedmerge.workflow.merge import Merge, averaging_for
from fedmerge.workflow.options import Dials, MatchOptions, dials_for
from fedmerge.workflow.plans import plan_clients
from fedmerge.workflow.record import GroupEntry, rounded

if TYPE_CHECKING:
    from fedmerge.workflow.models import ModelCode


@dataclass(frozen=True)
class Prepared:
    """Clients that fit together, with their plan: all that is known before matching."""

    clients: Sequence[Checkpoint]
    aligned: Sequence[Client]
    plan: Plan
    client_widths: Sequence[Mapping[str, int]]
    dials: Dials
    averaging: Averaging
    warnings: tuple[str, ...]
    model: ModelCode | None = None  # that runs them

    @property
    def can_run(self) -> bool:
        """Whether there is code, or a graph in the first file, that runs the clients."""
        return self.model is not None or self.clients[0].program is not None

    @property
    def is_equally_wide(self) -> bool:
        """Whether every group is as wide in all clients."""
        first, *others = self.client_widths
        return all(widths == first for widths in others)

    @property
    def kept_parameters(self) -> int:
        """The size of the tensors that are taken from the first client."""
        infos = (self.aligned[0].tensors[name] for name in self.plan.kept)
        return sum(info.size for info in infos if info.is_float)


def prepare(
    clients: Sequence[Checkpoint],
    options: MatchOptions,
    *,
    plan: Plan | None = None,
    model: ModelCode | None = None,
) -> Prepared:
    """Bring clients to one set of names, plan them and check that they fit together."""
    kept = keep_matches(options.keep, clients[0])
    if model is not None:
        plan = _plan_with_code(model, clients[0], plan, seed=options.seed)
    elif plan is None and clients[0].program is not None:
        plan = _plan_of_program(clients[0], seed=options.seed)
    aligned = align_names(clients, by_order=options.match_by_order, keep=options.keep)
    planned, client_widths = plan_clients(aligned, options.chain, given=plan, kept=kept)
    if options.dtype is None:
        check_dtypes(aligned, planned.tensors)
    dials = dials_for(options, planned)
    prepared = Prepared(
        clients=clients,
        aligned=aligned,
        plan=planned,
        client_widths=client_widths,
        dials=dials,
        averaging=averaging_for(options, dials, planned, clients),
        warnings=(*_nothing_free(planned), *_same_files(clients), *_different_buffers(aligned)),
        model=model,
    )
    return prepared if options.max_params is None else _held_to(prepared, options.max_params)


def _held_to(prepared: Prepared, most: int) -> Prepared:
    """Return prepared clients whose size budget is a number of parameters."""
    own = prepared.client_widths
    widest = {group: max(widths[group] for widths in own) for group in own[0]}
    least = prepared.kept_parameters + count_parameters(prepared.plan, widest)
    if most < least:
        raise UsageError(
            f"--max-params is {most:,}, but a net as wide as the widest client has {least:,}"
        )
    return replace(prepared, dials=replace(prepared.dials, max_growth=most / least))


def _plan_with_code(model: ModelCode, client: Checkpoint, given: Plan | None, *, seed: int) -> Plan:
    """Return the given plan, checked on the model, or the model's own."""
    from fedmerge.workflow.models import check_plan, plan_code  # files alone do without

    if given is None:
        return plan_code(model, client, seed=seed)
    check_plan(model, client, given, seed=seed)
    return given


def _plan_of_program(client: Checkpoint, *, seed: int) -> Plan:
    from fedmerge.workflow.models import plan_program  # other files do without

    return plan_program(client, seed=seed)


def problem_of(prepared: Prepared, options: MatchOptions, *, device: str) -> Problem:
    """Return what there is to be matched: prepared clients, and how they are searched."""
    dials = prepared.dials
    return Problem(
        clients=prepared.aligned,
        plan=prepared.plan,
        client_widths=prepared.client_widths,
        dials=dials,
        search=SearchOptions(
            sweeps=dials.sweeps, solver=options.solver, unit_cap=dials.unit_cap, device=device
        ),
        ties=TieBreaker(scale=options.tie_breaker),
        seed=options.seed,
        kept_parameters=prepared.kept_parameters,
    )


def merge_of(
    prepared: Prepared, options: MatchOptions, solution: Solution, *, is_compared: bool = True
) -> Merge:
    """Return the merge that a matching of all groups means."""
    matched = {group: matching.width for group, matching in solution.matchings.items()}
    widths = equal_widths(matched, prepared.plan.same_width)
    assignments = {
        client.name: {g: m.assignments[number].indices for g, m in solution.matchings.items()}
        for number, client in enumerate(prepared.clients)
    }
    entries = (_entry(g, m, widths[g]) for g, m in solution.matchings.items())
    if not is_compared:
        entries = (replace(entry, scatter=None, similarities=()) for entry in entries)
    groups = tuple(entries)
    return decide(prepared, options, widths, assignments, groups, width_limit=solution.limit)


def decide(
    prepared: Prepared,
    options: MatchOptions,
    widths: Mapping[str, int],
    assignments: Mapping[str, Mapping[str, IntArray]],
    groups: tuple[GroupEntry, ...],
    *,
    width_limit: float | None,
) -> Merge:
    """Return the merge that these assignments (client → group → global units) mean."""
    return Merge(
        clients=prepared.clients,
        aligned=prepared.aligned,
        plan=prepared.plan,
        options=options,
        dials=prepared.dials,
        client_widths=prepared.client_widths,
        widths=widths,
        placements=[
            {g: Assignment(units, widths[g]) for g, units in assignments[client.name].items()}
            for client in prepared.clients
        ],
        averaging=prepared.averaging,
        groups=groups,
        width_limit=width_limit,
        warnings=prepared.warnings,
    )


def average_of(prepared: Prepared, options: MatchOptions) -> Merge:
    """Return the element-wise average that a match with these options has to beat.

    Clients and classes count as they do in the match; what else it does to units is its own.
    """
    nothing: dict[str, Any] = dict.fromkeys(_OF_THE_MATCH)
    plain = replace(options, method="average", **nothing)
    dials = dials_for(plain, prepared.plan)
    averaging = averaging_for(plain, dials, prepared.plan, prepared.clients)
    own = replace(prepared, dials=dials, averaging=averaging)
    return merge_of(own, plain, line_up(own), is_compared=False)


_OF_THE_MATCH = (
    *("preset", "match_threshold", "max_growth", "max_params", "gamma", "sigma", "sigma0"),
    *("signature", "merge_units", "correct", "batch_norm", "lead", "symmetries"),
)


def line_up(prepared: Prepared) -> Solution:
    """Assign every unit to the one at the same place: the element-wise average."""
    matchings = {}
    for group in prepared.plan.groups:
        widths = [own[group.name] for own in prepared.client_widths]
        if len(set(widths)) > 1:
            raise ArchitectureError(
                f"group '{group.name}' has different widths ({', '.join(map(str, widths))}), "
                "which an element-wise average can't merge",
                "use --method fedma",
            )
        assignment = Assignment(np.arange(widths[0]), widths[0])
        matchings[group.name] = GroupMatching(
            assignments=(assignment,) * len(widths), width=widths[0], sweeps=0, scatter=0.0
        )
    return Solution(matchings, None)


def _entry(name: str, matching: GroupMatching, width: int) -> GroupEntry:
    return GroupEntry(
        name=name,
        client_widths=tuple(len(a.indices) for a in matching.assignments),
        width=width,
        padding=width - matching.width,
        match_rate=matching.match_rate,
        scatter=matching.scatter,
        threshold=matching.threshold,
        similarities=rounded(matching.similarities),
    )


def _nothing_free(plan: Plan) -> list[str]:
    """Say if nothing, or a recurrent layer, can't be matched, and why that usually is."""
    pinned = [n for n, t in plan.tensors.items() if t.role == "recurrent" and not t.produces]
    if plan.groups and pinned:
        return [
            f"the units of '{pinned[0]}' are not matched, because its state is an output of the "
            "model: where that state is fed back, say so with --state"
        ]
    if plan.groups:
        return []
    why = "a net without hidden layers, kept tensors, or a returned state that --state could pair"
    return [f"no hidden units are free, so tensors are averaged element by element ({why})"]


def _same_files(clients: Sequence[Checkpoint]) -> list[str]:
    seen: dict[Path, str] = {}
    warnings = []
    for client in clients:
        if client.path is None:
            continue
        path = client.path.resolve()
        if path in seen:
            warnings.append(f"{client.name} is the same file as {seen[path]}")
        seen.setdefault(path, client.name)
    return warnings


def _different_buffers(clients: Sequence[Client]) -> list[str]:
    """Say which integer buffers differ between the clients; single counters are nobody's worry."""
    first, *others = clients
    arrays = [n for n, i in first.tensors.items() if not i.is_float and i.size > 1]
    return [
        f"'{name}' differs between the clients; the first one's is taken"
        for name in arrays
        if any(
            name in client.tensors and not np.array_equal(client.read(name), first.read(name))
            for client in others
        )
    ]
