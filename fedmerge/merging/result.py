"""A decided merge: who owns which global unit, and the global tensors that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedmerge import __version__
from fedmerge.architecture import plan_to_json
from fedmerge.checkpoint import (
    Checkpoint,
    Values,
    parse_size,
    to_torch,
    write_model,
    written_path,
)
from fedmerge.errors import ArchitectureError, QualityError, UsageError
from fedmerge.matching import GroupMatching
from fedmerge.matching.features import Placement, place_tensor
from fedmerge.merging.averages import MOST_NAMES, average_tensor, mean_pieces
from fedmerge.merging.options import Dials, MatchOptions, options_to_json
from fedmerge.merging.record_schema import FORMAT, SCHEMA, GroupEntry, SourceEntry, rounded
from fedmerge.merging.session import Session
from fedmerge.notebook import html_table
from fedmerge.values.arrays import Array, IntArray
from fedmerge.values.clients import Client, TensorInfo
from fedmerge.values.plans import Assignment, Norm, Plan, TensorPlan, axis_size, equal_widths
from fedmerge.values.wording import Progress, listed, percent, silent, widths

if TYPE_CHECKING:
    from fedmerge.merging.quality import Quality


# Of the matched units at the same places; of clients trained apart it is one or two of a layer.
SHARED = 0.5
ALIKE = 0.5  # cosine of a unit's weights and its fellows' above which they do much the same
NEARLY_ALL = 0.999  # from here on nothing is gained by matching: the average is as good or better


@dataclass(frozen=True)
class Solution:
    """The matching of every group, and the limit on the groups' growth that gave it."""

    matchings: Mapping[str, GroupMatching]
    limit: float | None  # the largest width ÷ the widest client's; None: no limit was needed

    def fills(self, limits: Mapping[str, int]) -> bool:
        """Return whether every group is as wide as it may be."""
        return all(self.matchings[group].width == width for group, width in limits.items())


@dataclass(frozen=True)
class Merge:
    """Everything that decides the global model; its tensors are computed when they are read."""

    session: Session
    widths: Mapping[str, int]  # global
    placements: Sequence[Placement]
    groups: tuple[GroupEntry, ...]
    width_limit: float | None  # of every group, as a multiple of its widest client
    warnings: tuple[str, ...]
    fitted: Mapping[str, Array] = field(default_factory=dict)  # in place of averages
    probes: Mapping[str, Any] | None = None  # what the probes were
    quality: Quality | None = None  # as far as probes tell it
    frontier: Mapping[str, Any] | None = None  # what other sizes would give, where it was tried
    is_program: bool = False  # clients as branches of a program, instead of one net
    in_place: float | None = None  # share of units whose weights match at the same place

    @property
    def clients(self) -> Sequence[Checkpoint]:
        """The clients that are merged."""
        return self.session.clients

    @property
    def plan(self) -> Plan:
        """Which tensor axes carry which units."""
        return self.session.plan

    @property
    def options(self) -> MatchOptions:
        """What the user asked for, with what was chosen where that was left open."""
        return self.session.options

    @property
    def parameters(self) -> int:
        """How many floating-point numbers the global model holds."""
        if self.is_program:
            return self.session.ensemble_parameters
        return self.session.parameters(self.widths)

    @property
    def growth(self) -> float:
        """Global parameters ÷ those of a net with each group at its widest client's width."""
        return self.parameters / self.session.widest_parameters

    @cached_property
    def leaders(self) -> dict[str, IntArray]:
        """The numbers (units,) of the clients whose units a group's stand for, where it is so."""
        return {g.name: np.array(g.leaders, dtype=np.int64) for g in self.groups if g.leaders}

    def norm_of(self, weight: str) -> Norm | None:
        """Return the batch norm that directly follows a weight, if any."""
        return next((norm for norm in self.plan.norms if norm.producer == weight), None)

    @property
    def shares_start(self) -> bool:
        """Whether the clients seem to have begun with the same weights."""
        return self.in_place is not None and self.in_place >= SHARED

    @property
    def stays_in_place(self) -> bool:
        """Whether units of such clients match at the same places but for a few."""
        return self.in_place is not None and self.in_place >= NEARLY_ALL

    @property
    def alike_share(self) -> float | None:
        """Which share of the units that have fellows is alike them, by weights; None: unknown."""
        known = [
            cosine
            for group in self.groups
            for own in group.similarities
            for cosine in own
            if cosine is not None
        ]
        return sum(cosine > ALIKE for cosine in known) / len(known) if known else None

    def check_better(self) -> None:
        """Raise `QualityError` unless the merge is expected to be better than every client."""
        if self.quality is not None and self.quality.is_better:
            return
        told = "nothing tells how good it is" if self.quality is None else self.verdict
        raise QualityError(
            f"the merge is not expected to be better than every client: {told}",
            "give the model's code (`model`), real inputs (`probe_data`), more `effort` or "
            "`max_growth`; without `require` it is written all the same",
        )

    def summary(self) -> dict[str, Any]:
        """Return what a script wants to know of the merge."""
        base = self.session.base
        return {
            "clients": [client.name for client in self.clients],
            "architecture": self.plan.architecture,
            "groups": [group.summary() for group in self.groups],
            "parameters": self.parameters,
            "ensemble_parameters": self.session.ensemble_parameters,
            "growth": self.growth,
            "width_limit": self.width_limit,
            "in_place": self.in_place,
            "alike_share": self.alike_share,
            "quality": None if self.quality is None else self.quality.to_json(),
            **(
                {}
                if base is None
                else {"base": base.to_json(self.clients, scale=self.options.scale)}
            ),
            "warnings": list(self.warnings),
        }

    @cached_property
    def sources(self) -> list[SourceEntry]:
        """What the record says of the clients; their files are read once for it."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return list(threads.map(_source, self.clients))

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every global tensor, by the first client's normalised names."""
        return {
            name: self._info(name, info) for name, info in self.session.aligned[0].tensors.items()
        }

    def _info(self, name: str, stored: TensorInfo) -> TensorInfo:
        planned = self.plan.tensors.get(self.session.aligned[0].aliases.get(name, name))
        shape = stored.shape
        if planned is not None:
            shape = tuple(axis_size(layout, self.widths) for layout in planned.axes)
        return TensorInfo(
            shape, (self.options.dtype or stored.dtype) if stored.is_float else stored.dtype
        )

    def read(self, name: str) -> Array:
        """Return one global tensor; what no plan describes is the first client's."""
        name = self.session.aligned[0].aliases.get(name, name)
        if name not in self.plan.tensors:
            return self.session.aligned[0].read(name)
        if name in self.fitted:
            return self.fitted[name]
        return self.averaged(name)

    def values(self, name: str) -> Values:
        """Return one global tensor for its file: in pieces where it is a mean of equal places."""
        source = self.session.aligned[0].aliases.get(name, name)
        planned = self.plan.tensors.get(source)
        if planned is None or source in self.fitted or self._is_moved(planned):
            return self.read(name)
        dtype = self.tensors[name].dtype
        if self.session.adds_change(source):
            return self.session.changed(source, dtype)
        shares = self.session.averaging.client_shares(planned)
        if shares is None:
            return self.read(name)
        return mean_pieces(source, self.session.aligned, shares, dtype)

    def _is_moved(self, tensor: TensorPlan) -> bool:
        """Return whether any client's numbers go to other places than they have."""
        return not (tensor.produces | tensor.consumes) <= self._unmoved

    @cached_property
    def _unmoved(self) -> frozenset[str]:
        """The groups whose units all stay where they are, in every client."""
        return frozenset(
            group
            for group, width in self.widths.items()
            if all(np.array_equal(p[group].indices, np.arange(width)) for p in self.placements)
        )

    def averaged(self, name: str, clients: Sequence[Client] | None = None) -> Array:
        """Return the owners' mean of one tensor, of the clients or of others in their place."""
        if clients is None and self.session.adds_change(name):
            shape = self.session.aligned[0].tensors[name].shape
            return torch.cat([*self.session.changed(name)]).reshape(shape).numpy()
        return average_tensor(
            name,
            self.session.aligned if clients is None else clients,
            self.plan,
            placements=self.placements,
            widths=self.widths,
            averaging=self.session.averaging,
            leaders=self.leaders,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the global model under the names that the user's model loads."""
        first = self.clients[0]
        return {
            first.output_name(name): to_torch(self.read(name), info.dtype)
            for name, info in self.tensors.items()
        }

    def to_module(self) -> torch.nn.Module:
        """Return the global model as a module, built by the code that the clients were run with."""
        from fedmerge.merging.loading import load_model  # files alone do without

        code = self.session.model
        if code is None:
            raise UsageError(
                "the merge knows no code that builds its model",
                "give it to `match` (model=Net), or use fedmerge.load_model(Net, merge)",
            )
        return load_model(code.build, self)

    def __repr__(self) -> str:
        """Return the merge in one line."""
        names = listed([client.name for client in self.clients], MOST_NAMES)
        return (
            f"<{type(self).__name__} of {len(self.clients)} clients ({names}): "
            f"{self.parameters:,} parameters, growth {self.growth:.2f}>"
        )

    def _repr_html_(self) -> str:
        """Return how good the merge is as far as it is known, and its groups, for a notebook."""
        rows = [
            [group.name, widths(group.client_widths), str(group.width), percent(group.match_rate)]
            for group in self.groups
        ]
        header = ["group", "clients", "global", "matched"]
        return html_table(f"{self!r} {self.verdict}".strip("<"), header, rows)

    @property
    def verdict(self) -> str:
        """What is known of how good the merge is, in one sentence."""
        if self.quality is None:
            return "How good it is, is not known without data or the model's code."
        return self.quality.verdict

    def placed_client(self, number: int) -> dict[str, torch.Tensor]:
        """Return one client's state dict in the global layout: its own function, if all is well."""
        client, first = self.session.aligned[number], self.clients[0]
        state = {}
        for name, info in self.tensors.items():
            source = first.aliases.get(name, name)
            values = client.read(source) if source in client.tensors else first.read(source)
            planned = self.plan.tensors.get(source)
            if planned is not None:
                values = place_tensor(values, planned, self.placements[number], self.widths)
            stored = client.tensors.get(source, info)
            state[first.output_name(name)] = to_torch(values, stored.dtype)
        return state

    def write(
        self,
        path: str | Path,
        *,
        force: bool = False,
        again: bool = False,
        shard_size: str | int | None = None,
        progress: Progress = silent,
    ) -> Path:
        """Write the global model and its merge record; return the file to open.

        With `shard_size` (bytes, or text such as "2GB") that is the index of safetensors shards.
        `force` replaces what is there; `again`: the same bytes may be there already.
        """
        most = parse_size(shard_size)
        first = self.clients[0]
        own_names = {first.output_name(name): name for name in self.tensors}
        aliases = first.aliases.items()
        started = itertools.count()

        def read(written: str) -> Values:
            progress("writing", next(started), len(own_names))
            return self.values(own_names[written])

        write_model(
            Path(path),
            {written: self.tensors[name] for written, name in own_names.items()},
            read,
            aliases={first.output_name(a): first.output_name(n) for a, n in aliases},
            record=self.record,
            force=force,
            again=again,
            shard_size=most,
            beside=first.beside_state_dict(path),
        )
        return written_path(path, sharded=most is not None)

    @property
    def _used_dials(self) -> Dials:
        """The dials, with the threshold that groups were matched at: on probes it is another.

        None where units stand for others: to ask for a threshold is to ask for another matching.
        """
        if self.leaders:
            return replace(self.session.dials, threshold=None)
        used = {group.threshold for group in self.groups if group.threshold is not None}
        threshold = used.pop() if len(used) == 1 else self.session.dials.threshold
        return replace(self.session.dials, threshold=threshold)

    def record(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Return the merge record, given the SHA-256 of every written tensor."""
        base = self.session.base
        return {
            "fedmerge": __version__,
            "schema": SCHEMA,
            "format": FORMAT,
            "options": options_to_json(self.options, self._used_dials, has_base=base is not None),
            "sources": [vars(source) for source in self.sources],
            **({} if base is None else {"base_model": vars(_source(base.checkpoint))}),
            "plan": plan_to_json(self.plan),
            "width_limit": self.width_limit,
            "parameters": self.parameters,
            "growth": self.growth,
            "groups": [group.to_json() for group in self.groups],
            "assignments": {
                client.name: {g: a.indices.tolist() for g, a in placement.items()}
                for client, placement in zip(self.clients, self.placements, strict=True)
            },
            "probes": self.probes,
            "quality": None if self.quality is None else self.quality.to_json(),
            "frontier": self.frontier,
            "fitted": sorted(self.fitted),
            **({"is_program": True} if self.is_program else {}),
            "warnings": list(self.warnings),
            "tensors": dict(digests),
        }


def merge_of(session: Session, solution: Solution, *, is_compared: bool = True) -> Merge:
    """Return the merge that a matching of all groups means."""
    matched = {group: matching.width for group, matching in solution.matchings.items()}
    widths = equal_widths(matched, session.plan.same_width)
    assignments = {
        client.name: {g: m.assignments[number].indices for g, m in solution.matchings.items()}
        for number, client in enumerate(session.clients)
    }
    entries = (_entry(g, m, widths[g]) for g, m in solution.matchings.items())
    if not is_compared:
        entries = (replace(entry, scatter=None, similarities=()) for entry in entries)
    return decide(session, widths, assignments, tuple(entries), width_limit=solution.limit)


def decide(
    session: Session,
    widths: Mapping[str, int],
    assignments: Mapping[str, Mapping[str, IntArray]],
    groups: tuple[GroupEntry, ...],
    *,
    width_limit: float | None,
) -> Merge:
    """Return the merge that these assignments (client → group → global units) mean."""
    return Merge(
        session=session,
        widths=widths,
        placements=[
            {g: Assignment(units, widths[g]) for g, units in assignments[client.name].items()}
            for client in session.clients
        ],
        groups=groups,
        width_limit=width_limit,
        warnings=session.warnings,
    )


def average(session: Session) -> Merge:
    """Return the element-wise average: every unit is assigned to the one at the same place."""
    matchings = {}
    for group in session.plan.groups:
        widths = [own[group.name] for own in session.client_widths]
        if len(set(widths)) > 1:
            raise ArchitectureError(
                f"group '{group.name}' has different widths ({', '.join(map(str, widths))}), "
                "which an element-wise average can't merge",
                "use `method=fedma`",
            )
        assignment = Assignment(np.arange(widths[0]), widths[0])
        matchings[group.name] = GroupMatching(
            assignments=(assignment,) * len(widths), width=widths[0], sweeps=0, scatter=0.0
        )
    return merge_of(session, Solution(matchings, None), is_compared=False)


def _source(client: Checkpoint) -> SourceEntry:
    file = client.path.name if client.path else ""
    return SourceEntry(client.name, file, client.sha256(), client.size)


def _entry(name: str, matching: GroupMatching, width: int) -> GroupEntry:
    return GroupEntry(
        name=name,
        client_widths=tuple(a.units for a in matching.assignments),
        width=width,
        padding=width - matching.width,
        match_rate=matching.match_rate,
        scatter=matching.scatter,
        threshold=matching.threshold,
        similarities=rounded(matching.similarities),
        leaders=matching.leaders,
    )
