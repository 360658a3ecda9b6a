"""In which round which tensors are matched or averaged: a plan's groups as layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedmerge.training import Stage
from fedmerge.types.plans import Plan

LAST_LAYER = "last layer"
ALL_LAYERS = "all layers"


@dataclass(frozen=True)
class Layer:
    """What one round of a pass decides."""

    label: str  # what the user is told
    group: str | None  # that is matched; none where all groups are matched already
    tensors: tuple[str, ...]  # averaged, and frozen from then on


@dataclass(frozen=True)
class Round:
    """One exchange with the clients, after they trained."""

    number: int  # from 1
    pass_number: int  # from 1
    layer: Layer
    stage: Stage
    epochs: int  # of local training before the exchange; 0: none
    completes: bool  # whether there is a whole global model after it


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
    found = next((choice for choice in choices if choice), [])
    return max((makers[maker] for maker in found), default=None)


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


def averaging_rounds(
    plan: Plan, count: int, *, epochs: int, first_epochs: int
) -> tuple[Round, ...]:
    """Return the rounds of FedAvg and FedProx: every tensor in each of them."""
    everything = Layer(ALL_LAYERS, None, tuple(plan.tensors))
    return tuple(
        Round(k + 1, k + 1, everything, "whole", epochs if k else first_epochs, True)
        for k in range(count)
    )


def _stage(plan: Plan, place: int, left: Collection[str]) -> Stage:
    if place == 0:
        return "whole"
    return "last" if all(plan.tensors[name].makes_outputs for name in left) else "partial"
