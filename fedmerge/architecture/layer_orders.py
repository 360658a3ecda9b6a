"""Orders in which layers may follow each other, where the file does not keep the model's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fedmerge.architecture.layers import (
    MODEL_HINT,
    Layer,
    numbers,
    place,
    skeleton,
)
from fedmerge.errors import ArchitectureError

_MOST_STEPS = 20_000  # of the search; beyond it the order counts as ambiguous


_MOST_ORDERS = 200


_Runs: TypeAlias = tuple[tuple[Layer, ...], ...]


@dataclass(frozen=True)
class _Giving:
    """What the layers so far may give: a width, and what kind of layer gave it."""

    width: int
    kind: str  # "linear", "recurrent", "embedding", or "conv" with its spatial axes in front


def choose_order(
    orders: Sequence[tuple[Layer, ...]], stored: tuple[Layer, ...], assume_chain: bool
) -> tuple[Layer, ...]:
    """Return the one order that agrees with what the names say of first and last."""
    spoken = [order for order in orders if _agrees_with_words(order)]
    if len(spoken) == 1:
        return spoken[0]
    if assume_chain and stored in orders:
        return stored
    raise ArchitectureError(
        "the file stores its names alphabetically, and several orders of its layers fit "
        + (f"({_shown(orders[0])}; {_shown(orders[1])})" if orders else "(too many to try)"),
        f"save the model with torch.save, which keeps the order, or {MODEL_HINT}",
    )


def _shown(order: Sequence[Layer]) -> str:
    return ", ".join(layer.prefix for layer in order[:6]) + (", …" if len(order) > 6 else "")


def _agrees_with_words(order: Sequence[Layer]) -> bool:
    places = [found for layer in order if (found := place(layer.prefix))]
    return all(earlier <= later for earlier, later in pairwise(places))


def possible_orders(layers: Sequence[Layer]) -> list[tuple[Layer, ...]] | None:
    """Return every order that keeps numbers rising and widths chained; None: too many to try."""
    found: dict[tuple[str, ...], tuple[Layer, ...]] = {}
    for steps, order in enumerate(_beginnings(_numbered_runs(layers))):
        if len(order) == len(layers):
            found[tuple(layer.prefix for layer in order)] = order
        if steps > _MOST_STEPS or len(found) > _MOST_ORDERS:
            return None
    return list(found.values())


def _numbered_runs(layers: Sequence[Layer]) -> _Runs:
    """Return the layers by name without numbers, each run in rising order.

    A layer without number is the first of its name (`fc, fc2`) if no other one is.
    """
    runs: dict[str, list[Layer]] = {}
    for layer in layers:
        runs.setdefault(skeleton(layer.prefix), []).append(layer)
    for name in [name for name in runs if "#" not in name]:
        others = runs.get(f"{name}#", [])
        if others and min(numbers(layer.prefix) for layer in others) >= (2,):
            others += runs.pop(name)
    rising = (sorted(run, key=lambda layer: numbers(layer.prefix)) for run in runs.values())
    return tuple(map(tuple, rising))


def _beginnings(runs: _Runs) -> Iterator[tuple[Layer, ...]]:
    """Yield every beginning of a chain that takes the layers of each run in turn, depth first."""
    waiting: list[tuple[_Runs, tuple[Layer, ...], frozenset[_Giving]]] = [(runs, (), frozenset())]
    while waiting:
        runs, order, given = waiting.pop()
        yield order
        for index, run in enumerate(runs):
            if run and (gives := _gives(run[0], given, is_first=not order)):
                rest = (*runs[:index], run[1:], *runs[index + 1 :])
                waiting.append((rest, (*order, run[0]), gives))


def _gives(layer: Layer, given: frozenset[_Giving], *, is_first: bool) -> frozenset[_Giving]:
    """Return what a layer may give behind what is given; nothing if it can't read that."""
    if not is_first and not any(_reads(layer, giving) for giving in given):
        return frozenset()
    gives = {_Giving(layer.output_width, _kind(layer))}
    if is_first and layer.kind == "linear" and "bias" not in layer.tensors:
        gives.add(_Giving(layer.input_width, "embedding"))
    return frozenset(gives)


def _kind(layer: Layer) -> str:
    return f"{len(layer.shape('weight')) - 2}d conv" if layer.kind == "conv" else layer.kind


def _reads(layer: Layer, giving: _Giving) -> bool:
    """Return whether a layer could read that: wider than the plan allows, so that no order hides.

    A linear layer may read whole multiples of a convolution's channels, or of several steps.
    """
    if layer.kind == "linear" and giving.kind != "linear":
        return layer.input_width % giving.width == 0
    if layer.kind == "conv":
        steps = _kind(layer) == "1d conv" and giving.kind in ("embedding", "recurrent")
        return layer.input_width == giving.width and (steps or giving.kind == _kind(layer))
    return layer.input_width == giving.width


def drop_misfits(layers: Sequence[Layer], kept: Collection[str]) -> Iterator[Layer]:
    """Yield the layers that fit behind those before them; `kept` ones may fall out."""
    given: frozenset[_Giving] = frozenset()
    is_first = True
    for layer in layers:
        gives = _gives(layer, given, is_first=is_first)
        if gives or not set(layer.names) <= set(kept):
            yield layer
            given, is_first = gives, False
