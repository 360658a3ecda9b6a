"""FedAvg and FedProx: every round averages the clients' models element by element."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedmerge.engines.engine import array_bytes
from fedmerge.federated.federation import (
    Decided,
    Exchange,
    Federation,
    Layer,
    LocalModel,
    Round,
    averaging_of,
    same_units,
)
from fedmerge.matching.features import Placement
from fedmerge.merging.averages import Averaging, average_tensor
from fedmerge.merging.record_schema import GroupEntry
from fedmerge.values.plans import Plan, Widths
from fedmerge.values.work import Arrays

ALL_LAYERS = "all layers"


def averaging_rounds(
    plan: Plan, count: int, *, epochs: int, first_epochs: int
) -> tuple[Round, ...]:
    """Return the rounds of FedAvg and FedProx: every tensor in each of them."""
    everything = Layer(ALL_LAYERS, None, tuple(plan.tensors))
    return tuple(
        Round(k + 1, k + 1, everything, "whole", epochs if k else first_epochs, True)
        for k in range(count)
    )


@dataclass(frozen=True)
class FedAvg:
    """Clients train the global model, and their weighted mean is the next one.

    FedProx differs in the clients' loss alone.
    """

    plan: Plan
    widths: Widths  # of all clients
    averaging: Averaging
    rounds: Sequence[Round]
    initial: Sequence[LocalModel]
    kept: Arrays
    merge_first: Callable[[Sequence[LocalModel]], Arrays] | None = None  # in place of a first mean

    def start(self) -> Federation:
        """Return the clients as they came; every unit stays at its place."""
        models = tuple(model.without(self.kept) for model in self.initial)
        groups = tuple(
            GroupEntry(group, (width,) * len(models), width, 0, 1.0, None)
            for group, width in self.widths.items()
        )
        return Federation(models, self.kept, (self._placement,) * len(models), groups)

    @property
    def _placement(self) -> Placement:
        return {group: same_units(width) for group, width in self.widths.items()}

    def decided(self, done: int) -> Decided:
        """Return everything: whole models are averaged."""
        return Decided(tuple(self.widths), tuple(self.plan.tensors))

    def begin(self, federation: Federation, current: Round) -> Federation:
        """Give every client the global model."""
        if current.number == 1:
            return federation
        planned = {name: federation.fixed[name] for name in self.plan.tensors}
        models = tuple(model.updated(planned) for model in federation.locals)
        return replace(federation, locals=models, fixed=self.kept)

    def client_widths(self, federation: Federation, client: int) -> Widths:
        """Return the widths, which never change."""
        return self.widths

    def exchange(self, federation: Federation, current: Round, present: Sequence[int]) -> Exchange:
        """Average the models of the clients that are present; whole models go up and down."""
        clients = [federation.locals[k] for k in present]
        if current.number == 1 and self.merge_first is not None:
            averaged = self.merge_first(clients)
        else:
            averaged = self._average(clients, averaging_of(self.averaging, present))
        done = replace(
            federation,
            locals=tuple(model.without(averaged) for model in federation.locals),
            fixed={**self.kept, **averaged},
        )
        up = sum(array_bytes({name: c.arrays[name] for name in averaged}) for c in clients)
        return Exchange(done, up, len(federation.locals) * array_bytes(averaged))

    def weigh(self, federation: Federation, losses: Mapping[str, float]) -> Federation:
        """Return the federation as it is: what clients count never changes."""
        return federation

    def _average(self, clients: Sequence[LocalModel], averaging: Averaging) -> Arrays:
        return {
            name: average_tensor(
                name,
                clients,
                self.plan,
                placements=[self._placement] * len(clients),
                widths=self.widths,
                averaging=averaging,
            )
            for name in self.plan.tensors
        }
