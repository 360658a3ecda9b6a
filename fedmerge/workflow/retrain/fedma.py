"""Federated matched averaging, layer by layer: Algorithm 1 of the paper, and with communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedmerge.matching import GroupMatching
from fedmerge.types.arrays import Array
from fedmerge.types.assignments import Assignment
from fedmerge.types.layouts import Widths
from fedmerge.types.plans import Plan
from fedmerge.types.work import Arrays, array_bytes
from fedmerge.units import Averaging, Placement, average_tensor
from fedmerge.workflow.layers import Problem, bisect
from fedmerge.workflow.record import GroupEntry, rounded
from fedmerge.workflow.retrain.federation import Decided, Exchange, Federation, averaging_of
from fedmerge.workflow.retrain.locals import (
    LocalModel,
    place_units,
    placed_array,
    same_units,
    taken_array,
)
from fedmerge.workflow.retrain.matching import exchanged_plan, match_layer
from fedmerge.workflow.retrain.schedule import Layer, Round

INDEX_BYTES = 8  # of one unit's place in the global layout, as sent to its client


@dataclass(frozen=True)
class FedMA:
    """Match a layer of all clients, freeze it, let them train the rest, go on with the next.

    Each further pass begins with local models of the original size, cut out of the global one.
    """

    problem: Problem  # of the clients as they came, with their own widths
    averaging: Averaging
    rounds: Sequence[Round]
    initial: Sequence[LocalModel]
    kept: Arrays  # the first client's tensors that everybody takes as they are

    def start(self) -> Federation:
        """Return the clients as they came, nothing matched."""
        models = tuple(model.without(self.kept) for model in self.initial)
        return Federation(models, self.kept, tuple({} for _ in models), ())

    def decided(self, done: int) -> Decided:
        """Return the groups and tensors of this pass's layers."""
        current = self.rounds[done - 1].pass_number
        layers = [each.layer for each in self.rounds[:done] if each.pass_number == current]
        return Decided(
            tuple(layer.group for layer in layers if layer.group is not None),
            tuple(name for layer in layers for name in layer.tensors),
        )

    def begin(self, federation: Federation, current: Round) -> Federation:
        """Return the federation for a round: the first one of a pass rebuilds local models."""
        is_rebuilt = current.number > 1 and self.rounds[current.number - 2].completes
        return self._rebuilt(federation) if is_rebuilt else federation

    def client_widths(self, federation: Federation, client: int) -> Widths:
        """Return a client's widths: global where matched, else its own."""
        return {**self.problem.client_widths[client], **federation.widths}

    def exchange(self, federation: Federation, current: Round, present: Sequence[int]) -> Exchange:
        """Match and average one layer of the clients that are present, and place it at all.

        The tensors of the layer go up, the global ones and each client's assignment down.
        """
        layer = current.layer
        up = sum(
            array_bytes({name: federation.locals[k].arrays[name] for name in layer.tensors})
            for k in present
        )
        matched, placement = self._matched(federation, layer, present)
        averaged: Arrays = {
            name: self._average(federation, name, present, placement) for name in layer.tensors
        }
        for absent in sorted(set(range(len(federation.locals))) - set(present)):
            averaged, placement = self._joined(federation, layer, averaged, placement, absent)
        indices = sum(len(a.indices) for assigned in placement for a in assigned.values())
        down = len(federation.locals) * array_bytes(averaged) + INDEX_BYTES * indices
        entry = None if matched is None else self._entry(layer, matched, placement)
        done = self._placed(federation, layer, averaged, placement, entry)
        return Exchange(done, up, down, entry)

    def _matched(
        self, federation: Federation, layer: Layer, present: Sequence[int]
    ) -> tuple[GroupMatching | None, list[dict[str, Assignment]]]:
        """Match the layer's group, and return per client where its units went.

        Clients that are not present have no place yet.
        """
        placement: list[dict[str, Assignment]] = [{} for _ in federation.locals]
        if layer.group is None:
            return None, placement
        problem = replace(
            self.problem,
            clients=[federation.locals[k] for k in present],
            client_widths=[self.client_widths(federation, k) for k in present],
        )
        limit = self._limit(layer.group, federation.widths)
        matching = match_layer(problem, layer, federation.widths, limit)
        for client, assignment in zip(present, matching.assignments, strict=True):
            placement[client] = {layer.group: assignment}
        return matching, placement

    def _limit(self, group: str, matched: Widths) -> int | None:
        """Return the largest width of a group within the size budget, None if there is none.

        All groups that are not matched yet may grow to the same multiple of their widest client.
        """
        problem = self.problem
        if not problem.plan.group(group).can_grow:
            return problem.widest[group]
        growth = problem.dials.max_growth
        if growth is None:
            return None
        budget = int(growth * problem.parameters(problem.widest))
        multiple = bisect(
            lambda limit: problem.parameters({**problem.limits(limit), **matched}) <= budget,
            1.0,
            float(len(problem.clients)),
        )
        return problem.limits(multiple)[group]

    def _average(
        self,
        federation: Federation,
        name: str,
        present: Sequence[int],
        placement: Sequence[Placement],
    ) -> Array:
        """Return one global tensor: each unit's mean over the clients that own it.

        Tensors along whose out axis the clients have global units already are first cut to the
        units that each client owns.
        """
        tensor = self.problem.plan.tensors[name]
        clients, placements = [], []
        for k in present:
            earlier = federation.placements[k]
            owned = {g: earlier[g] for g in tensor.produces if g in earlier}
            values = taken_array(
                federation.locals[k].arrays[name], tensor, owned, self.client_widths(federation, k)
            )
            clients.append(LocalModel(federation.locals[k].name, {name: values}))
            shared = {g: same_units(width) for g, width in federation.widths.items()}
            placements.append({**shared, **placement[k], **owned})
        widths = {g: a.width for g, a in placements[0].items()}
        averaging = averaging_of(self.averaging, present)
        return average_tensor(
            name,
            clients,
            self.problem.plan,
            placements=placements,
            widths=widths,
            averaging=averaging,
        )

    def _joined(
        self,
        federation: Federation,
        layer: Layer,
        averaged: Arrays,
        placement: Sequence[Placement],
        absent: int,
    ) -> tuple[Arrays, list[dict[str, Assignment]]]:
        """Give a client that missed the round its places among the global units.

        Its units as the server last saw them are matched with the new global ones and change
        nothing of these. Where it is wider than the global layer, units are added that stay zero.
        """
        joined = [dict(assigned) for assigned in placement]
        if layer.group is None:
            return averaged, joined
        own = self.client_widths(federation, absent)
        width = next(assigned[layer.group].width for assigned in placement if assigned)
        widths = {**own, layer.group: width}
        problem = replace(
            self.problem,
            clients=[LocalModel("global", averaged), federation.locals[absent]],
            client_widths=[widths, own],
            plan=exchanged_plan(self.problem.plan, layer),
        )
        limit = max(width, own[layer.group])
        matching = match_layer(problem, layer, federation.widths, limit)
        moved, joined[absent] = ({layer.group: a} for a in matching.assignments)
        for assigned in joined:
            if assigned and assigned is not joined[absent]:
                indices = moved[layer.group].indices[assigned[layer.group].indices]
                assigned[layer.group] = Assignment(indices, matching.width)
        tensors = problem.plan.tensors
        return {n: placed_array(a, tensors[n], moved, widths) for n, a in averaged.items()}, joined

    def _placed(
        self,
        federation: Federation,
        layer: Layer,
        averaged: Arrays,
        placement: Sequence[Placement],
        entry: GroupEntry | None,
    ) -> Federation:
        """Freeze the layer, and permute and pad what each client has behind it."""
        models = tuple(
            place_units(
                model.without(layer.tensors),
                self.problem.plan,
                placement[k],
                self.client_widths(federation, k),
            )
            for k, model in enumerate(federation.locals)
        )
        return Federation(
            models,
            {**federation.fixed, **averaged},
            tuple(
                {**earlier, **new}
                for earlier, new in zip(federation.placements, placement, strict=True)
            ),
            federation.groups if entry is None else (*federation.groups, entry),
        )

    def _entry(
        self, layer: Layer, matching: GroupMatching, placement: Sequence[Placement]
    ) -> GroupEntry:
        assert layer.group is not None
        assignments = tuple(assigned[layer.group] for assigned in placement)
        whole = replace(matching, assignments=assignments, width=assignments[0].width)
        known = matching.similarities  # not of clients that missed the round
        return GroupEntry(
            name=layer.group,
            client_widths=tuple(len(a.indices) for a in assignments),
            width=whole.width,
            padding=0,
            match_rate=whole.match_rate,
            scatter=matching.scatter,
            threshold=matching.threshold,
            similarities=rounded(known if len(known) == len(assignments) else ()),
        )

    def _rebuilt(self, federation: Federation) -> Federation:
        """Return local models of the original size, cut out of the global one."""
        return replace(
            federation,
            locals=tuple(
                model.updated(local_arrays(federation.fixed, self.problem.plan, placement))
                for model, placement in zip(federation.locals, federation.placements, strict=True)
            ),
            fixed=self.kept,
            placements=tuple({} for _ in federation.locals),
            groups=(),
        )


def local_arrays(
    global_arrays: Arrays, plan: Plan, placement: Mapping[str, Assignment]
) -> dict[str, Array]:
    """Return the tensors of a client's own units, cut out of the global ones."""
    return {
        name: taken_array(global_arrays[name], tensor, placement, {})
        for name, tensor in plan.tensors.items()
    }
