"""One session: clients that fit together, their plan and widths, the options, and all sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerge.architecture import (
    ChainOptions,
    count_parameters,
    keep_tensors,
    plan_chain,
    plan_from_json,
    solve_widths,
)
from fedmerge.checkpoint import ADAPTER_CONFIG, Checkpoint, adapter_folder
from fedmerge.decoding import Fail, decode_json, read_text
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.merging.averages import Averaging, averaging_for, changed_pieces
from fedmerge.merging.base_model import Base, base_of, check_base_options
from fedmerge.merging.client_sources import (
    align_names,
    check_dtypes,
    check_shapes,
    in_library_names,
    keep_matches,
    naming_configs,
)
from fedmerge.merging.options import Dials, MatchOptions, dials_for
from fedmerge.values.clients import Client
from fedmerge.values.plans import Pinned, Plan, TensorPlan, equal_widths

if TYPE_CHECKING:
    from torch import Tensor

    from fedmerge.architecture.folder_config import FolderConfig
    from fedmerge.architecture.model_code import ModelCode


_BY_PLACE = "averaged place by place"  # why positions are pinned where no plan is needed


@dataclass(frozen=True)
class Session:
    """All that is known before matching: clients, plan, widths, options, sizes."""

    clients: Sequence[Checkpoint]
    aligned: Sequence[Client]  # the clients under the first one's tensor names
    plan: Plan
    client_widths: Sequence[Mapping[str, int]]
    options: MatchOptions
    dials: Dials
    averaging: Averaging
    warnings: tuple[str, ...] = ()
    model: ModelCode | None = None  # that runs them
    device: str = "cpu"  # where products are computed and clients run
    config: FolderConfig | None = None  # that has to say the widths of the merge
    base: Base | None = None  # the model that the clients are fine-tunes of

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return [client.name for client in self.clients]

    @property
    def can_run(self) -> bool:
        """Whether there is code, or a graph in the first file, that runs the clients."""
        return _can_run(self.model, self.clients[0])

    @property
    def is_equally_wide(self) -> bool:
        """Whether every group is as wide in all clients."""
        first, *others = self.client_widths
        return all(widths == first for widths in others)

    @cached_property
    def widest(self) -> dict[str, int]:
        """The widest client's width of every group."""
        return {
            group.name: max(widths[group.name] for widths in self.client_widths)
            for group in self.plan.groups
        }

    def limits(self, growth: float) -> dict[str, int]:
        """Return the largest width of every group that can grow, at most this much wider."""
        return {
            group.name: int(growth * self.widest[group.name])
            for group in self.plan.groups
            if group.can_grow
        }

    def parameters(self, widths: Mapping[str, int]) -> int:
        """Return how many floating-point numbers a net of these widths holds.

        Groups without a width are at their widest client's; tied ones are made equal.
        """
        tied = equal_widths({**self.widest, **widths}, self.plan.same_width)
        kept = (self.aligned[0].tensors[name] for name in self.plan.kept)
        return count_parameters(self.plan, tied) + sum(i.size for i in kept if i.is_float)

    @cached_property
    def widest_parameters(self) -> int:
        """The size of a net with each group at its widest client's width."""
        return self.parameters(self.widest)

    @property
    def ensemble_parameters(self) -> int:
        """How many floating-point numbers all clients hold together."""
        return sum(self.parameters(widths) for widths in self.client_widths)

    def budget(self, growth: float) -> int:
        """Return how many parameters a net may have that grows this much."""
        return int(growth * self.widest_parameters)

    def adds_change(self, name: str) -> bool:
        """Return whether a merged tensor is the base's plus what clients changed of it."""
        return self.options.scale is not None and self.base is not None and self.base.has(name)

    def changed(self, name: str, dtype: str | None = None) -> Iterator[Tensor]:
        """Yield the base's tensor plus the clients' mean change of it, in flat pieces."""
        assert self.base is not None
        assert self.options.scale is not None
        weights, base = self.averaging.client_weights, self.base.checkpoint
        scale = self.options.scale
        return changed_pieces(name, self.aligned, weights, dtype, base=base, scale=scale)

    def with_options(self, **changes: Any) -> Session:
        """Return the session with other options, and the dials and averaging that they mean."""
        options = replace(self.options, **changes)
        dials = dials_for(options, self.plan)
        averaging = averaging_for(options, dials, self.plan, self.clients)
        return replace(self, options=options, dials=dials, averaging=averaging)

    def with_lead(self, lead: int | None, name: str) -> Session:
        """Return the session in which one client leads, or nobody."""
        averaging = replace(self.averaging, lead=lead)
        return replace(self, averaging=averaging, options=replace(self.options, lead=name))


def prepare(
    clients: Sequence[Checkpoint],
    options: MatchOptions,
    *,
    plan: Plan | None = None,
    model: ModelCode | None = None,
    device: str = "cpu",
    tries_growth: bool = False,
    config: FolderConfig | None = None,
    base: Checkpoint | None = None,
    is_run: bool = False,
) -> Session:
    """Bring clients to one set of names, plan them and check that they fit together.

    Which groups can grow is tried where it counts for the merge, or if `tries_growth` asks for it.
    With `config`, they grow only as the first client's config.json can say. `is_run`: the model is
    run, so that it is planned also where an average needs no plan. `base` is the model that the
    clients were fine-tuned from; what they changed of it is merged place by place.
    """
    if base is not None or options.scale is not None:
        check_base_options(options, has_base=base is not None)
    clients = in_library_names(clients)
    if base is not None and options.method == "fedma":
        is_run = is_run or _can_run(model, clients[0])
    by_places = (is_by_places(options) or base is not None) and not is_run
    for client in (*clients, *([] if base is None else [base])):
        check_no_adapter(client, is_averaged=by_places)
    kept = keep_matches(options.keep, clients[0])
    tries_growth = tries_growth or (base is None and _may_grow(clients, options))
    if plan is None and by_places:
        plan = plan_of_places(clients[0], kept)
    elif model is not None:
        plan = _plan_with_code(
            model, clients[0], plan, seed=options.seed, tries_growth=tries_growth
        )
    elif plan is None and clients[0].program is not None:
        plan = _plan_of_program(clients[0], seed=options.seed, tries_growth=tries_growth)
    if config is not None and plan is not None and tries_growth:
        plan, config = config.holding(plan, clients[0])
    with naming_configs(clients):
        aligned = align_names(clients, by_order=options.match_by_order, keep=options.keep)
        if by_places or base is not None:
            check_shapes(aligned, kept)
        planned, client_widths = plan_clients(aligned, options.chain, given=plan, kept=kept)
    if options.dtype is None:
        check_dtypes(aligned, planned.tensors)
    dials = dials_for(options, planned)
    found = None
    if base is not None:
        found = base_of(base, aligned, clients[0], list(planned.tensors))
    session = Session(
        clients=clients,
        aligned=aligned,
        plan=planned,
        client_widths=client_widths,
        options=options,
        dials=dials,
        averaging=averaging_for(options, dials, planned, clients),
        warnings=(
            *(() if options.method == "average" or base is not None else _nothing_free(planned)),
            *_same_files(clients),
            *_different_buffers(aligned),
            *(() if found is None else found.warnings(aligned)),
        ),
        model=model,
        device=device,
        config=config,
        base=found,
    )
    return session if options.max_params is None else _held_to(session, options.max_params)


def _can_run(model: ModelCode | None, first: Checkpoint) -> bool:
    return model is not None or first.program is not None


def check_no_adapter(client: Checkpoint, *, is_averaged: bool = False) -> None:
    """Refuse adapters, and factors of updates where they would be averaged by themselves."""
    is_adapter = client.path is not None and adapter_folder(client.path) is not None
    factors = [name for name in client.tensors if ".lora_A." in name or "lora_embedding_A" in name]
    if is_adapter:
        raise ArchitectureError(
            f"{client.name}: a LoRA adapter, not a model",
            "`fedmerge match` merges folders of adapters (merge_adapters in Python)",
        )
    if factors and is_averaged:
        raise ArchitectureError(
            f"{client.name}: has factors of a LoRA adapter ('{factors[0]}')",
            f"give the folders that peft saved, with {ADAPTER_CONFIG}, or merge each adapter into "
            "its base model first",
        )


def is_by_places(options: MatchOptions) -> bool:
    """Return whether tensors are averaged as they are, so that no plan is needed.

    Which of them makes the classes, only a plan tells.
    """
    return options.method == "average" and options.class_counts is None


def plan_of_places(client: Client, kept: Sequence[str]) -> Plan:
    """Return the plan in which every position of every float tensor is pinned."""
    tensors = {
        name: TensorPlan(tuple(Pinned(length, _BY_PLACE) for length in info.shape))
        for name, info in client.tensors.items()
        if info.is_float and name not in client.aliases and name not in kept
    }
    return Plan(groups=(), tensors=tensors, kept=tuple(kept))


def _held_to(session: Session, most: int) -> Session:
    """Return a session whose size budget is a number of parameters."""
    least = session.widest_parameters
    if most < least:
        raise UsageError(
            f"`max_params` is {most:,}, but a net as wide as the widest client has {least:,}"
        )
    return replace(session, dials=replace(session.dials, max_growth=most / least))


def _may_grow(clients: Sequence[Checkpoint], options: MatchOptions) -> bool:
    """Return whether any group may be wider in the merge than in some client."""
    first, *others = ([info.shape for info in client.tensors.values()] for client in clients)
    is_fixed = options.max_growth == 1 or options.method in ("average", "ot")
    return not is_fixed or any(shapes != first for shapes in others)


def _plan_with_code(
    model: ModelCode, client: Checkpoint, given: Plan | None, *, seed: int, tries_growth: bool
) -> Plan:
    """Return the given plan, checked on the model, or the model's own."""
    from fedmerge.architecture.model_code import check_plan, plan_code  # files alone do without

    if given is None:
        return plan_code(model, client, seed=seed, tries_growth=tries_growth)
    return check_plan(model, client, given, seed=seed, tries_growth=tries_growth)


def _plan_of_program(client: Checkpoint, *, seed: int, tries_growth: bool) -> Plan:
    from fedmerge.architecture.plan_apart import plan_graph  # other files do without

    return plan_graph(client, seed=seed, tries_growth=tries_growth)


def read_plan(path: Path) -> Plan:
    """Read a plan that was written by `fedmerge plan -o` or by hand."""

    def fail(reason: str) -> UsageError:
        return UsageError(f"`plan={path.name}` can't be read: {reason}")

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
                f"add it to the plan, or take it from the first client with `keep='{name}'`",
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


def _nothing_free(plan: Plan) -> list[str]:
    """Say if nothing, or a recurrent layer, can't be matched, and why that usually is."""
    pinned = [n for n, t in plan.tensors.items() if t.role == "recurrent" and not t.produces]
    if plan.groups and pinned:
        return [
            f"the units of '{pinned[0]}' are not matched, because its state is an output of the "
            "model: where that state is fed back, say so with `state`"
        ]
    if plan.groups:
        return []
    why = "a net without hidden layers, kept tensors, or a returned state that `state` could pair"
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
