"""FedMA in rounds: Algorithm 1 of the paper, and its repetition "with communication".

    for every pass:                                   `matching_rounds` lists all rounds
        rebuild local models at their own widths      `FedMA.begin`
        for every layer n, first to last:             `layers_of`
            clients train what is not frozen          `Rounds.finish` in rounds.py
            Π_j = BBP-MAP(W_1n, …, W_Jn)              `FedMA.exchange`: `match_layer`
            W_n = mean over clients j of W_jn Π_jᵀ      `FedMA._average`
            W_j,n+1 = Π_j W_j,n+1, W_n frozen           `FedMA._placed`

Clients train before each exchange, not after it, which is the same order of steps; clients that
come trained skip the first. The last layer has no units to match: the averaging weighs its
outputs by each client's counts of classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    place_units,
    placed_array,
    same_units,
    taken_array,
)
from fedmerge.matching import GroupMatching
from fedmerge.matching.features import Placement
from fedmerge.merging.averages import Averaging, average_tensor
from fedmerge.merging.by_weights import bisect, is_same, match_group
from fedmerge.merging.record_schema import GroupEntry, rounded
from fedmerge.merging.session import Session
from fedmerge.values.arrays import Array
from fedmerge.values.plans import Assignment, Plan, Widths
from fedmerge.values.run_settings import Stage
from fedmerge.values.work import Arrays

LAST_LAYER = "last layer"
INDEX_BYTES = 8  # of one unit's place in the global layout, as sent to its client


@dataclass(frozen=True)
class FedMA:
    """Match a layer of all clients, freeze it, let them train the rest, go on with the next.

    Each further pass begins with local models of the original size, cut out of the global one.
    """

    session: Session  # of the clients as they came, with their own widths
    averaging: Averaging
    rounds: Sequence[Round]
    initial: Sequence[LocalModel]
    kept: Arrays  # the first client's tensors that everybody takes as they are

    def exchange(self, federation: Federation, current: Round, present: Sequence[int]) -> Exchange:
        """Match and average one layer of the clients that are present, and place it at all."""
        layer = current.layer
        matching, placement = self._match(federation, layer, present)
        averaged: Arrays = {
            name: self._average(federation, name, present, placement) for name in layer.tensors
        }
        for absent in sorted(set(range(len(federation.locals))) - set(present)):
            averaged, placement = self._joined(federation, layer, averaged, placement, absent)
        entry = None if matching is None else self._entry(layer, matching, placement)
        return Exchange(
            self._placed(federation, layer, averaged, placement, entry),
            up=_bytes_up([federation.locals[k] for k in present], layer),
            down=_bytes_down(averaged, placement),
            matched=entry,
        )

    def weigh(self, federation: Federation, losses: Mapping[str, float]) -> Federation:
        """Return the federation as it is: what clients count never changes."""
        return federation

    def _match(
        self, federation: Federation, layer: Layer, present: Sequence[int]
    ) -> tuple[GroupMatching | None, list[dict[str, Assignment]]]:
        """Match the layer's group, and return per client where its units went.

        Clients that are not present have no place yet.
        """
        placement: list[dict[str, Assignment]] = [{} for _ in federation.locals]
        if layer.group is None:
            return None, placement
        session = replace(
            self.session,
            aligned=[federation.locals[k] for k in present],
            client_widths=[self.client_widths(federation, k) for k in present],
        )
        limit = self._limit(layer.group, federation.widths)
        matching = match_layer(session, layer, federation.widths, limit)
        for client, assignment in zip(present, matching.assignments, strict=True):
            placement[client] = {layer.group: assignment}
        return matching, placement

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
        tensor = self.session.plan.tensors[name]
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
            self.session.plan,
            placements=placements,
            widths=widths,
            averaging=averaging,
        )

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
                self.session.plan,
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

    def begin(self, federation: Federation, current: Round) -> Federation:
        """Return the federation for a round: the first one of a pass rebuilds local models."""
        is_rebuilt = current.number > 1 and self.rounds[current.number - 2].completes
        return self._rebuilt(federation) if is_rebuilt else federation

    def _rebuilt(self, federation: Federation) -> Federation:
        """Return local models of the original size, cut out of the global one."""
        return replace(
            federation,
            locals=tuple(
                model.updated(local_arrays(federation.fixed, self.session.plan, placement))
                for model, placement in zip(federation.locals, federation.placements, strict=True)
            ),
            fixed=self.kept,
            placements=tuple({} for _ in federation.locals),
            groups=(),
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
        session = replace(
            self.session,
            aligned=[LocalModel("global", averaged), federation.locals[absent]],
            client_widths=[widths, own],
            plan=exchanged_plan(self.session.plan, layer),
        )
        limit = max(width, own[layer.group])
        matching = match_layer(session, layer, federation.widths, limit)
        moved, joined[absent] = ({layer.group: a} for a in matching.assignments)
        for assigned in joined:
            if assigned and assigned is not joined[absent]:
                indices = moved[layer.group].indices[assigned[layer.group].indices]
                assigned[layer.group] = Assignment(indices, matching.width)
        tensors = session.plan.tensors
        return {n: placed_array(a, tensors[n], moved, widths) for n, a in averaged.items()}, joined

    def _limit(self, group: str, matched: Widths) -> int | None:
        """Return the largest width of a group within the size budget, None if there is none.

        All groups that are not matched yet may grow to the same multiple of their widest client.
        """
        session = self.session
        if not session.plan.group(group).can_grow:
            return session.widest[group]
        growth = session.dials.max_growth
        if growth is None:
            return None
        budget = session.budget(growth)
        multiple = bisect(
            lambda limit: session.parameters({**session.limits(limit), **matched}) <= budget,
            1.0,
            float(len(session.aligned)),
        )
        return session.limits(multiple)[group]

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

    def start(self) -> Federation:
        """Return the clients as they came, nothing matched."""
        models = tuple(model.without(self.kept) for model in self.initial)
        return Federation(models, self.kept, tuple({} for _ in models), ())

    def decided(self, done: int) -> Decided:
        """Return the groups and tensors of this pass's layers."""
        current = self.rounds[done - 1].pass_number
        layers = [r.layer for r in self.rounds[:done] if r.pass_number == current]
        return Decided(
            tuple(layer.group for layer in layers if layer.group is not None),
            tuple(name for layer in layers for name in layer.tensors),
        )

    def client_widths(self, federation: Federation, client: int) -> Widths:
        """Return a client's widths: global where matched, else its own."""
        return {**self.session.client_widths[client], **federation.widths}


def match_layer(
    session: Session, layer: Layer, matched: Widths, limit: int | None
) -> GroupMatching:
    """Match a layer's group of clients whose `matched` groups have the same units already.

    Incoming weights decide first. Tensors of the layer that both make and read the group (recurrent
    weights) can be compared only around a matching, so the group is matched with them again, up to
    `refine` times, until nothing changes. Where its width is limited it does not grow any more.
    """
    assert layer.group is not None
    number = [group.name for group in session.plan.groups].index(layer.group)
    earlier = _same_matchings(matched, len(session.aligned))
    matching = match_group(session, number, earlier, limit, progress=lambda share: None)
    exchanged = replace(session, plan=exchanged_plan(session.plan, layer))
    for _ in range(session.dials.refine if _feeds_itself(exchanged.plan, layer.group) else 0):
        before = matching
        matching = match_group(
            exchanged,
            number,
            {**earlier, layer.group: before},
            None if limit is None else before.width,
            outgoing=True,
            progress=lambda share: None,
        )
        if is_same(matching, before):
            break
    return matching


def exchanged_plan(plan: Plan, layer: Layer) -> Plan:
    """Return the plan with those tensors alone that the layer's round exchanges."""
    return replace(plan, tensors={name: plan.tensors[name] for name in layer.tensors})


def _feeds_itself(plan: Plan, group: str) -> bool:
    """Whether a tensor both makes and reads the units of a group."""
    return any(group in t.produces & t.consumes for t in plan.tensors.values())


def _same_matchings(widths: Widths, clients: int) -> dict[str, GroupMatching]:
    """Return the matchings of groups along which all clients have the same units already."""
    return {
        name: GroupMatching((same_units(width),) * clients, width, 0, 0.0)
        for name, width in widths.items()
    }


def local_arrays(
    global_arrays: Arrays, plan: Plan, placement: Mapping[str, Assignment]
) -> dict[str, Array]:
    """Return the tensors of a client's own units, cut out of the global ones."""
    return {
        name: taken_array(global_arrays[name], tensor, placement, {})
        for name, tensor in plan.tensors.items()
    }


def _bytes_up(clients: Sequence[LocalModel], layer: Layer) -> int:
    """Return the bytes of the layer's tensors, which every client sends."""
    return sum(array_bytes({name: c.arrays[name] for name in layer.tensors}) for c in clients)


def _bytes_down(averaged: Arrays, placement: Sequence[Placement]) -> int:
    """Return the bytes that all clients get: the global tensors, and each its assignment."""
    indices = sum(len(a.indices) for assigned in placement for a in assigned.values())
    return len(placement) * array_bytes(averaged) + INDEX_BYTES * indices


def matching_rounds(
    plan: Plan,
    passes: int,
    *,
    epochs: int,
    first_epochs: int,
    last_epochs_factor: int,
    trainable: Collection[str],
) -> tuple[Round, ...]:
    """Return the rounds of FedMA; the clients train `first_epochs` before the first of them.

    A round in which nothing `trainable` is left to train has no epochs.
    """
    layers = layers_of(plan)
    rounds = []
    for number in range(passes * len(layers)):
        place = number % len(layers)
        left = [name for layer in layers[place:] for name in layer.tensors]
        stage = _stage(plan, place, left)
        asked = epochs * last_epochs_factor if stage == "last" else epochs
        rounds.append(
            Round(
                number=number + 1,
                pass_number=number // len(layers) + 1,
                layer=layers[place],
                stage=stage,
                epochs=(asked if number else first_epochs) if set(left) & set(trainable) else 0,
                completes=place == len(layers) - 1,
            )
        )
    return tuple(rounds)


def _stage(plan: Plan, place: int, left: Collection[str]) -> Stage:
    if place == 0:
        return "whole"
    return "last" if all(plan.tensors[name].makes_outputs for name in left) else "partial"


def layers_of(plan: Plan) -> tuple[Layer, ...]:
    """Return the layers of a plan in the order in which Algorithm 1 goes through them.

    Round k matches the k-th group. A tensor is averaged when the units that it makes are matched
    and it was trained once on the matched units that it reads, so in the k-th round at the
    earliest if it makes the k-th group's units, and one round after the last group that it reads
    (recurrent weights are matched with their own group). In a chain, that is layer by layer.
    Biases and norms go with the weights before them. The network's outputs come last, alone.
    """
    rounds = _rounds(plan)
    hidden = {n: k for n, k in rounds.items() if not plan.tensors[n].makes_outputs}
    last = 1 + max([len(plan.groups), *hidden.values()])
    order = {name: hidden.get(name, last) for name in plan.tensors}
    layers = []
    for number in range(1, last + 1):
        tensors = tuple(name for name, k in order.items() if k == number)
        if number <= len(plan.groups):
            group = plan.groups[number - 1].name
            layers.append(Layer(group, group, tensors))
        elif tensors:
            label = LAST_LAYER if number == last else tensors[0].rpartition(".")[0]
            layers.append(Layer(label or tensors[0], None, tensors))
    return tuple(layers)


def _rounds(plan: Plan) -> dict[str, int]:
    """Return the round of every tensor, but for biases of nobody, which go with the outputs."""
    places = {group.name: number for number, group in enumerate(plan.groups, start=1)}
    makers = {
        name: max(
            [
                1,
                *(places[group] for group in tensor.produces),
                *(places[group] + 1 for group in tensor.consumes - tensor.produces),
            ]
        )
        for name, tensor in plan.tensors.items()
        if len(tensor.axes) > 1
    }
    others = {name: _with_makers(name, plan, makers) for name in plan.tensors.keys() - makers}
    return makers | {name: k for name, k in others.items() if k is not None}


def _with_makers(name: str, plan: Plan, makers: Mapping[str, int]) -> int | None:
    """Return the round of a bias's or norm's weights, None if there are none.

    These are, as far as there are any: the one before a batch norm; those of the same module;
    those stored before it; all that make the same units.
    """
    tensor = plan.tensors[name]
    order = list(plan.tensors)
    same = [maker for maker in makers if plan.tensors[maker].produces == tensor.produces]
    module = name.rpartition(".")[0]
    choices: Sequence[Collection[str]] = (
        [norm.producer for norm in plan.norms if name in vars(norm).values()],
        [maker for maker in same if maker.rpartition(".")[0] == module],
        [maker for maker in same if order.index(maker) < order.index(name)],
        same,
    )
    chosen = next((choice for choice in choices if choice), [])
    return max((makers[maker] for maker in chosen), default=None)
