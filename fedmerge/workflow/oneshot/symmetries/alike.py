"""Rewrite clients so that they are as alike as they can be, and compute what they did before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.probing import Probes
from fedmerge.probing.signatures import normalised, unit_responses
from fedmerge.types.arrays import Float64Array, FloatArray
from fedmerge.user_code import own_code, parts_of
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.models import evaluated
from fedmerge.workflow.oneshot.fit import FEW
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.steady import steady_weights
from fedmerge.workflow.oneshot.symmetries.embeddings import (
    Embedding,
    basis_change,
    common_bases,
    factors_of,
    free_embeddings,
    read_anew,
    reader_change,
)
from fedmerge.workflow.oneshot.symmetries.rewritten import Change, Rewritten
from fedmerge.workflow.oneshot.symmetries.signs import alike_signs, sign_change, signed_groups
from fedmerge.workflow.oneshot.symmetries.trial import Trial
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.prepared import Prepared

TRIED = 8  # samples on which it is tried what a change does
BATCH = 128  # samples run at once
RARE = 1.0  # added to every token's count: one that no probe has counts a little


@dataclass(frozen=True)
class Alike:
    """Finds what may be changed of clients, and what makes them alike."""

    models: Models
    options: MatchOptions
    probes: Probes

    def rewritten(self) -> Models | None:
        """Return the clients rewritten, or nothing if they have no symmetry that could be used."""
        each = [*self._basis_changes(), *self._sign_changes()]
        if not each:
            return None
        clients = [
            Rewritten(client, tuple(changes[number] for changes in each))
            for number, client in enumerate(self._prepared.aligned)
        ]
        return replace(self.models, prepared=replace(self._prepared, aligned=clients))

    @property
    def _prepared(self) -> Prepared:
        return self.models.prepared

    @cached_property
    def _trial(self) -> Trial:
        return Trial(self.models, next(self.probes.batches(TRIED, self.models.device)))

    def read_anew(self, merge: Merge) -> Merge:
        """Return a merge whose readers of embeddings fit the merged ones: products count.

        Averages of both factors alone would not be factors of anything that a client has.
        """
        changes = [self._reader_changes(merge, own) for own in self._shared]
        if not changes:
            return merge
        each = zip(merge.aligned, *changes, strict=True)
        return replace(merge, aligned=[Rewritten(client, tuple(own)) for client, *own in each])

    def _reader_changes(self, merge: Merge, own: Embedding) -> list[Change]:
        merged, found = merge.read(own.table).astype(np.float64), []
        each = zip(merge.aligned, merge.placements, merge.client_widths, strict=True)
        for client, placement, widths in each:
            table = client.read(own.table).astype(np.float64)
            own_part = merged[:, placement[own.group].indices]
            matrix = read_anew(table, own_part, self._shares[own])
            found.append(reader_change(merge.plan, widths, own, matrix))
        return found

    def _basis_changes(self) -> list[list[Change]]:
        """Return, for every embedding, what brings each client's to a common basis."""
        prepared, changes = self._prepared, []
        for own in self._shared:
            bases = common_bases(self._factors(own), self._shares[own])
            both = zip(prepared.client_widths, bases, strict=True)
            changes.append([basis_change(prepared.plan, w, own, basis) for w, basis in both])
        return changes

    @cached_property
    def _shared(self) -> list[Embedding]:
        """The embeddings in free bases that are equally wide in all clients."""
        prepared, rng = self._prepared, np.random.default_rng(self.options.seed)
        first, *others = prepared.client_widths
        found = free_embeddings(self._trial, prepared.plan, prepared.aligned[0], first, rng=rng)
        return [
            own for own in found if {widths[own.group] for widths in others} == {first[own.group]}
        ]

    def _factors(self, own: Embedding) -> list[tuple[Float64Array, Float64Array]]:
        prepared = self._prepared
        both = zip(prepared.aligned, prepared.client_widths, strict=True)
        return [factors_of(client, prepared.plan, widths, own) for client, widths in both]

    def _sign_changes(self) -> list[list[Change]]:
        """Return, for every group whose units have a sign, each client's changes."""
        prepared, rng = self._prepared, np.random.default_rng(self.options.seed)
        plan, widths = prepared.plan, prepared.client_widths
        done = {own.group for own in self._shared}  # a basis has signs, too
        parts = signed_groups(self._trial, plan, widths[0], rng=rng, but=done)
        each = [self._responses(k) for k in range(len(prepared.aligned))] if parts else []
        known = [group for group in parts if all(group in own for own in each)]
        changes = []
        for group in known:
            signs = alike_signs([own[group] for own in each], self.options.solver)
            if any((own < 0).any() for own in signs):
                both = zip(widths, signs, strict=True)
                changes.append([sign_change(plan, w, group, parts[group], own) for w, own in both])
        return changes

    def _responses(self, number: int) -> dict[str, FloatArray]:
        names = self.models.own_names.items()
        found = unit_responses(
            self.models.client(number),
            self._prepared.plan,
            self._prepared.client_widths[number],
            self.probes,
            names={model: name for model, name in names if name in self._steady},
            seed=self.options.seed,
            device=self.models.device,
        )
        return {group: normalised(own) for group, own in found.items()}

    @cached_property
    def _steady(self) -> frozenset[str]:
        return steady_weights(self.models, next(self.probes.batches(FEW, self.models.device)))

    @cached_property
    def _shares(self) -> dict[Embedding, Float64Array]:
        """How often each token of an embedding is looked up in the probes, and once more."""
        return {own: RARE + self._counts(own) for own in self._shared}

    def _counts(self, own: Embedding) -> Float64Array:
        model, first = self.models.client(0), self._prepared.aligned[0]
        counts = torch.zeros(first.tensors[own.table].shape[0], dtype=torch.float64)

        def count(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            with own_code():
                for tokens in given[:1]:  # none where they are given by name
                    counts.add_(torch.bincount(tokens.flatten().cpu(), minlength=len(counts)))

        for name, module in parts_of(model):
            weight = f"{name}.weight" if name else "weight"
            is_own = self.models.own_names.get(weight) == own.table
            if is_own and isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(count)
        for batch in self.probes.batches(BATCH, self.models.device):
            evaluated(model, batch)
        return counts.numpy()
