"""A decided merge: who owns which global unit, and the global tensors that follow from it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedmerge import __version__
from fedmerge.checkpoint import Checkpoint, parse_size, to_torch, write_model, written_path
from fedmerge.errors import UsageError
from fedmerge.graph import count_parameters, plan_to_json
from fedmerge.types.arrays import Array, Float64Array
from fedmerge.types.clients import Client, TensorInfo
from fedmerge.types.layouts import axis_size
from fedmerge.types.plans import Norm, Plan
from fedmerge.types.progress import Progress, silent
from fedmerge.types.words import listed
from fedmerge.units import (
    Averaging,
    Placement,
    average_tensor,
    place_tensor,
    with_owners_norms,
)
from fedmerge.workflow.options import (
    CORRECTING,
    NO_LEAD,
    Dials,
    MatchOptions,
    options_to_json,
)
from fedmerge.workflow.record import FORMAT, SCHEMA, GroupEntry, SourceEntry, source_entry
from fedmerge.workflow.starts import NEARLY_ALL, SHARED

if TYPE_CHECKING:
    from fedmerge.workflow.oneshot.quality import Quality

MOST_NAMES = 8  # clients that a hint names


@dataclass(frozen=True)
class Merge:
    """Everything that decides the global model; its tensors are computed when they are read."""

    clients: Sequence[Checkpoint]
    aligned: Sequence[Client]  # the clients under the first one's tensor names
    plan: Plan
    options: MatchOptions
    dials: Dials
    client_widths: Sequence[Mapping[str, int]]
    widths: Mapping[str, int]  # global
    placements: Sequence[Placement]
    averaging: Averaging
    groups: tuple[GroupEntry, ...]
    width_limit: float | None  # of every group, as a multiple of its widest client
    warnings: tuple[str, ...]
    fitted: Mapping[str, Array] = field(default_factory=dict)  # in place of averages
    probes: Mapping[str, Any] | None = None  # what the probes were
    quality: Quality | None = None  # as far as probes tell it
    frontier: Mapping[str, Any] | None = None  # what other sizes would give, where it was tried
    in_place: float | None = None  # share of units whose weights match at the same place

    @property
    def growth(self) -> float:
        """Global parameters ÷ those of a net with each group at its widest client's width."""
        return self.parameters(self.widths) / self.widest_parameters

    @property
    def widest_parameters(self) -> int:
        """The parameters of a net with each group at its widest client's width."""
        widest = {g: max(own[g] for own in self.client_widths) for g in self.widths}
        return self.parameters(widest)

    def parameters(self, widths: Mapping[str, int]) -> int:
        """Return how many floating-point numbers the net holds at the given widths."""
        kept = (self.aligned[0].tensors[name] for name in self.plan.kept)
        return count_parameters(self.plan, widths) + sum(i.size for i in kept if i.is_float)

    def norm_of(self, weight: str) -> Norm | None:
        """Return the batch norm that directly follows a weight, if any."""
        return next((norm for norm in self.plan.norms if norm.producer == weight), None)

    @property
    def ensemble_parameters(self) -> int:
        """How many floating-point numbers all clients hold together."""
        return sum(self.parameters(own) for own in self.client_widths)

    @property
    def shares_start(self) -> bool:
        """Whether the clients seem to have begun with the same weights."""
        return self.in_place is not None and self.in_place >= SHARED

    @property
    def stays_in_place(self) -> bool:
        """Whether units of such clients match at the same places but for a few."""
        return self.in_place is not None and self.in_place >= NEARLY_ALL

    def summary(self) -> dict[str, Any]:
        """Return what a script wants to know of the merge."""
        return {
            "clients": [client.name for client in self.clients],
            "architecture": self.plan.architecture,
            "groups": [group.summary() for group in self.groups],
            "parameters": self.parameters(self.widths),
            "ensemble_parameters": self.ensemble_parameters,
            "growth": self.growth,
            "width_limit": self.width_limit,
            "in_place": self.in_place,
            "quality": None if self.quality is None else self.quality.to_json(),
            "warnings": list(self.warnings),
        }

    @cached_property
    def sources(self) -> list[SourceEntry]:
        """What the record says of the clients; their files are read once for it."""
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return list(threads.map(source_entry, self.clients))

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Shape and dtype of every global tensor, by the first client's normalised names."""
        return {name: self._info(name, info) for name, info in self.aligned[0].tensors.items()}

    def _info(self, name: str, stored: TensorInfo) -> TensorInfo:
        planned = self.plan.tensors.get(self.aligned[0].aliases.get(name, name))
        shape = stored.shape
        if planned is not None:
            shape = tuple(axis_size(layout, self.widths) for layout in planned.axes)
        return TensorInfo(
            shape, (self.options.dtype or stored.dtype) if stored.is_float else stored.dtype
        )

    def read(self, name: str) -> Array:
        """Return one global tensor; what no plan describes is the first client's."""
        name = self.aligned[0].aliases.get(name, name)
        if name not in self.plan.tensors:
            return self.aligned[0].read(name)
        if name in self.fitted:
            return self.fitted[name]
        averaged = self._by_owners(average_tensor, name)
        if self.options.correct not in CORRECTING:
            return averaged
        return self._by_owners(with_owners_norms, name, averaged)

    def _by_owners(self, function: Callable[..., Array], *given: Any) -> Array:
        """Return what a function makes of the clients where they are placed."""
        return function(
            *given,
            self.aligned,
            self.plan,
            placements=self.placements,
            widths=self.widths,
            averaging=self.averaging,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the global model under the names that the user's model loads."""
        first = self.clients[0]
        return {
            first.output_name(name): to_torch(self.read(name), info.dtype)
            for name, info in self.tensors.items()
        }

    def placed_client(self, number: int) -> dict[str, torch.Tensor]:
        """Return one client's state dict in the global layout: its own function, if all is well."""
        client, first = self.aligned[number], self.clients[0]
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

        def read(written: str) -> Array:
            progress("writing", next(started), len(own_names))
            return self.read(own_names[written])

        write_model(
            Path(path),
            {written: self.tensors[name] for written, name in own_names.items()},
            read,
            aliases={first.output_name(a): first.output_name(n) for a, n in aliases},
            record=self.record,
            force=force,
            again=again,
            shard_size=most,
        )
        return written_path(path, sharded=most is not None)

    @property
    def _used_dials(self) -> Dials:
        """The dials, with the threshold that groups were matched at: on probes it is another."""
        used = {group.threshold for group in self.groups if group.threshold is not None}
        return replace(self.dials, threshold=used.pop()) if len(used) == 1 else self.dials

    def record(self, digests: Mapping[str, str]) -> dict[str, Any]:
        """Return the merge record, given the SHA-256 of every written tensor."""
        return {
            "fedmerge": __version__,
            "schema": SCHEMA,
            "format": FORMAT,
            "options": options_to_json(self.options, self._used_dials),
            "sources": [vars(source) for source in self.sources],
            "plan": plan_to_json(self.plan),
            "width_limit": self.width_limit,
            "parameters": self.parameters(self.widths),
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
            "warnings": list(self.warnings),
            "tensors": dict(digests),
        }


def averaging_for(
    options: MatchOptions, dials: Dials, plan: Plan, clients: Sequence[Client]
) -> Averaging:
    """Return how much each client counts, from the options."""
    weights = _client_weights(options.client_weight, clients)
    shrinkage = 0.0
    if dials.posterior_mean and not plan.is_recurrent:
        assert dials.sigma is not None
        assert dials.sigma0 is not None
        shrinkage = dials.sigma / dials.sigma0
    return Averaging(
        client_weights=weights,
        class_weights=_class_weights(options.class_counts, weights, plan, clients),
        shrinkage=shrinkage,
        recurrent_over_all=dials.posterior_mean,
        lead=_lead(options.lead, clients),
    )


def _lead(name: str | None, clients: Sequence[Client]) -> int | None:
    if name is None or name == NO_LEAD:
        return None
    names = [client.name for client in clients]
    if name not in names:
        raise UsageError(
            f"--lead names '{name}', which is no client",
            f"the clients are {listed(names, MOST_NAMES)}",
        )
    return names.index(name)


def _client_weights(given: Mapping[str, float], clients: Sequence[Client]) -> tuple[float, ...]:
    names = [client.name for client in clients]
    for name in given:
        if name not in names:
            raise UsageError(
                f"--client-weight names '{name}', which is no client",
                f"the clients are {listed(names, MOST_NAMES)}",
            )
    return tuple(float(given.get(name, 1.0)) for name in names)


def _class_weights(
    counts: Mapping[str, Sequence[float]] | None,
    weights: Sequence[float],
    plan: Plan,
    clients: Sequence[Client],
) -> Float64Array | None:
    """Return p (clients, classes): each client's share of a class, by weights where it has none."""
    if counts is None:
        return None
    outputs = {axis_size(t.axes[t.out], {}) for t in plan.tensors.values() if t.makes_outputs}
    names = [client.name for client in clients]
    if set(counts) != set(names):
        raise UsageError(
            f"--class-counts has the clients {listed(list(counts), MOST_NAMES)}, "
            f"expected {listed(names, MOST_NAMES)}",
            'the file holds {"name": [count per class, …]} with the names that `match` prints',
        )
    lengths = {len(counts[name]) for name in names}
    if lengths != outputs:
        raise UsageError(
            f"--class-counts has {_list(lengths)} classes, the last layer {_list(outputs)} outputs"
        )
    table = np.array([counts[name] for name in names], dtype=np.float64)
    if not np.isfinite(table).all() or (table < 0).any():
        raise UsageError("--class-counts has a count that is negative or no number")
    by_weight = np.asarray(weights)[:, None] / sum(weights) * np.ones_like(table)
    totals = table.sum(axis=0)
    return np.where(totals > 0, table / np.where(totals > 0, totals, 1.0), by_weight)


def _list(values: set[int]) -> str:
    return " or ".join(map(str, sorted(values))) or "no"
