"""One layer's units of several clients, matched and averaged: no files, no plan, no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from fedmerge.errors import UsageError
from fedmerge.matching import SearchOptions, UnitFeatures, match_units, prior_at_threshold
from fedmerge.merging.options import DEFAULT_GROWTH, DEFAULT_THRESHOLD
from fedmerge.values.arrays import Array, Float64Array, FloatArray, IntArray
from fedmerge.values.option_fields import Rule, check_value, number, seed_rule
from fedmerge.values.plans import Assignment

LayerArrays: TypeAlias = Any  # a numpy array or a torch tensor whose rows are units, or several

_HIGHEST_THRESHOLD = 1 - 1e-6  # at 1 the variance σ² would vanish


class LayerMatch(NamedTuple):
    """One layer of the global model, and where every client's units stand in it."""

    layer: LayerArrays  # of the form that the clients' layers have
    assignments: tuple[IntArray, ...]  # per client (units,), the rows of the global layer


def match_layer(
    layers: Sequence[LayerArrays],
    *,
    client_weights: Sequence[float] | None = None,
    match_threshold: float = DEFAULT_THRESHOLD,
    max_growth: float | Literal["none"] = DEFAULT_GROWTH,
    seed: int = 0,
) -> LayerMatch:
    """Match the units of one layer over clients, and average those that belong together.

    A client's layer is an array or tensor (units, …), or several with the same units (its weight,
    its bias, its norm's scale), whose inputs must be in the same order for all clients already.
    Units whose weights have a cosine below `match_threshold` become global units of their own, as
    far as the global layer has at most `max_growth` times the widest client's (`"none"`: no limit).
    """
    numbers = {"match_threshold": match_threshold, "max_growth": max_growth, "seed": seed}
    for name, value in numbers.items():
        check_value(name, value, _RULES[name])
    if not isinstance(layers, list | tuple) or not layers:
        raise UsageError("`layers` is no list of layers, expected one layer per client")
    parts = [_parts_of(layer, number) for number, layer in enumerate(layers)]
    _check_alike(parts)
    weights = _checked_weights(client_weights, len(parts))
    rows = [_rows_of(client) for client in parts]
    assignments = _assignments(rows, match_threshold, max_growth, seed)
    means = [
        _mean([client[place] for client in parts], assignments, weights)
        for place in range(len(parts[0]))
    ]
    is_single = isinstance(layers[0], torch.Tensor | np.ndarray)
    return LayerMatch(
        means[0] if is_single else tuple(means),
        tuple(assignment.indices for assignment in assignments),
    )


def _assignments(
    rows: Sequence[FloatArray], threshold: float, growth: float | Literal["none"], seed: int
) -> tuple[Assignment, ...]:
    """Return where units (units, features) of every client go, by maximum a posteriori."""
    features = [UnitFeatures(own, np.empty((len(own), 0), own.dtype)) for own in rows]
    entries = sum(own.size for own in rows)
    moment = sum(float(client.squares.sum()) for client in features) / max(1, entries)
    widest = max(len(own) for own in rows)
    matching = match_units(
        features,
        prior_at_threshold(min(threshold, _HIGHEST_THRESHOLD), moment, gamma=1.0),
        SearchOptions(),
        max_width=None if growth == "none" else int(growth * widest),
        rng=np.random.default_rng(seed),
    )
    return matching.assignments


def _mean(
    parts: Sequence[Array | torch.Tensor],
    assignments: Sequence[Assignment],
    weights: Float64Array,
) -> Array | torch.Tensor:
    """Return the global array: every unit's mean over the clients that own it."""
    first = _numbers(parts[0])
    total = np.zeros((assignments[0].width, *first.shape[1:]))
    owned = np.zeros(assignments[0].width)
    for part, assignment, weight in zip(parts, assignments, weights, strict=True):
        total[assignment.indices] += weight * _numbers(part)  # no index comes twice
        owned[assignment.indices] += weight
    mean = total / owned.reshape(-1, *[1] * (total.ndim - 1))
    if isinstance(parts[0], torch.Tensor):
        return torch.from_numpy(mean).to(parts[0])
    return mean.astype(parts[0].dtype)


def _parts_of(layer: LayerArrays, client: int) -> tuple[Array | torch.Tensor, ...]:
    """Return the arrays of one client's layer."""
    parts = (layer,) if isinstance(layer, torch.Tensor | np.ndarray) else layer
    if not isinstance(parts, list | tuple) or not parts:
        raise UsageError(
            f"`layers`: client-{client + 1} has {type(layer).__name__}, expected an array or "
            "tensor of units, or several of the same units"
        )
    for part in parts:
        _check_part(part, client)
    if len({part.shape[0] for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise UsageError(
            f"`layers`: the arrays of client-{client + 1} have the shapes {shapes}, expected "
            "as many rows in each: a row is a unit"
        )
    return tuple(parts)


def _check_part(part: Any, client: int) -> None:
    is_tensor = isinstance(part, torch.Tensor)
    if not is_tensor and not isinstance(part, np.ndarray):
        found = type(part).__name__
    elif not (part.is_floating_point() if is_tensor else part.dtype.kind == "f"):
        found = f"{part.dtype} numbers"
    elif part.ndim == 0 or part.shape[0] == 0:
        found = "no units"
    elif not bool(torch.isfinite(part).all() if is_tensor else np.isfinite(part).all()):
        found = "NaN or infinite numbers"
    else:
        return
    raise UsageError(
        f"`layers`: client-{client + 1} has {found}, expected finite floating-point arrays "
        "or tensors whose rows are units"
    )


def _check_alike(parts: Sequence[Sequence[Array | torch.Tensor]]) -> None:
    shapes = [[tuple(part.shape[1:]) for part in client] for client in parts]
    for place, own in enumerate(shapes, start=1):
        if own != shapes[0]:
            raise UsageError(
                f"`layers`: units of client-{place} have the shapes {own}, those of "
                f"client-1 {shapes[0]}",
                "place the inputs as the layer before was matched, e.g. "
                "`padded[:, assignment] = weight`",
            )


def _checked_weights(weights: Sequence[float] | None, clients: int) -> Float64Array:
    given = np.ones(clients) if weights is None else np.asarray(weights, dtype=np.float64)
    if given.shape != (clients,) or not (np.isfinite(given) & (given > 0)).all():
        raise UsageError(
            f"`client_weights` is {weights}, expected a positive number for each of {clients} "
            "clients"
        )
    return given


_RULES: Mapping[str, Rule] = {
    "match_threshold": (
        lambda value: number(0, 1)(value) and value > 0,
        "a number above 0, up to 1",
    ),
    "max_growth": (lambda value: value == "none" or number(1)(value), "a number from 1, or 'none'"),
    "seed": seed_rule(),
}


def _numbers(part: Array | torch.Tensor) -> FloatArray:
    """Return a part's numbers, in single precision at least."""
    if isinstance(part, torch.Tensor):
        part = part.detach().cpu()
        return (part if part.dtype == torch.float64 else part.float()).numpy()
    return part if part.dtype == np.float64 else part.astype(np.float32, copy=False)


def _rows_of(parts: Sequence[Array | torch.Tensor]) -> FloatArray:
    """Return (units, features) all numbers of every unit."""
    return np.concatenate([_numbers(part).reshape(len(part), -1) for part in parts], axis=1)
