"""Embeddings: what counts is their product with the weights that read them, so bases are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedmerge.types.arrays import Float64Array
from fedmerge.types.clients import Client
from fedmerge.types.layouts import Pinned, Units, Widths, axis_size, unit_positions
from fedmerge.types.plans import Plan
from fedmerge.workflow.oneshot.symmetries.rewritten import Change
from fedmerge.workflow.oneshot.symmetries.trial import Trial

EXACT = ("float32", "float64")  # others would round a change of basis
SMALLEST = 1e-3  # of the largest singular value of a change of basis: it must be undone exactly


@dataclass(frozen=True)
class Embedding:
    """A table of tokens whose dimensions, a group, are read by linear weights only."""

    group: str
    table: str  # (tokens, dimensions)
    readers: tuple[tuple[str, int], ...]  # weights, and the axis that reads


def free_embeddings(
    trial: Trial, plan: Plan, client: Client, widths: Widths, *, rng: np.random.Generator
) -> list[Embedding]:
    """Return the embeddings that may be in any basis, if the weights that read them are too."""
    found = []
    for own in filter(None, (_embedding(plan, group.name) for group in plan.groups)):
        change = basis_change(plan, widths, own, _some_basis(widths[own.group], rng))
        tied = set(client.aliases.values()) & set(change)
        is_exact = all(client.tensors[name].dtype in EXACT for name in change)
        if is_exact and not tied and trial.keeps_outputs(change):
            found.append(own)
    return found


def _embedding(plan: Plan, group: str) -> Embedding | None:
    places = list(plan.axes_of(group))
    tables = [name for name, axis in places if plan.tensors[name].out == axis]
    if len(tables) != 1:
        return None
    match plan.tensors[tables[0]].axes:
        case (Pinned(_, "tokens"), Units(_)):
            readers = tuple(place for place in places if place[0] != tables[0])
            return Embedding(group, tables[0], readers)
    return None


def basis_change(plan: Plan, widths: Widths, own: Embedding, basis: Float64Array) -> Change:
    """Return E·A in place of an embedding E, and W·A⁻ᵀ of what reads it: E·Wᵀ stays."""
    readers = reader_change(plan, widths, own, np.linalg.inv(basis).T)
    return {own.table: {1: basis}, **readers}


def reader_change(plan: Plan, widths: Widths, own: Embedding, matrix: Float64Array) -> Change:
    """Return W·M in place of all weights W that read an embedding's dimensions."""
    change: dict[str, dict[int, Float64Array]] = {}
    for name, axis in own.readers:
        layout = plan.tensors[name].axes[axis]
        whole = np.eye(axis_size(layout, widths))
        for places in unit_positions(layout, own.group, widths).T:
            whole[np.ix_(places, places)] = matrix
        change.setdefault(name, {})[axis] = whole
    return change


def _some_basis(size: int, rng: np.random.Generator) -> Float64Array:
    """Return a random basis (size, size) that is neither orthogonal nor ill-conditioned."""
    turned, _ = np.linalg.qr(rng.standard_normal((size, size)))
    return np.asarray(turned * rng.uniform(0.5, 2.0, size))


def factors_of(
    client: Client, plan: Plan, widths: Widths, own: Embedding
) -> tuple[Float64Array, Float64Array]:
    """Return an embedding E (tokens, dimensions) and its readers' weights W (rows, dimensions)."""
    rows = []
    for name, axis in own.readers:
        places = unit_positions(plan.tensors[name].axes[axis], own.group, widths)
        weight = np.moveaxis(client.read(name).astype(np.float64), axis, 0)[places]
        rows.append(weight.reshape(len(weight), -1).T)
    return client.read(own.table).astype(np.float64), np.concatenate(rows)


def common_bases(
    factors: Sequence[tuple[Float64Array, Float64Array]], shares: Float64Array
) -> list[Float64Array]:
    """Return a basis A for every client in which its embedding is close to one they share.

    All products E·Wᵀ side by side are factored at the embeddings' width, tokens counted by
    `shares` (tokens,): E* is their best common embedding, A the least-squares solution of E·A = E*.
    """
    weights = np.sqrt(shares / shares.mean())[:, None]
    products = np.concatenate([table @ readers.T for table, readers in factors], axis=1)
    _, values, right = np.linalg.svd(weights * products, full_matrices=False)
    width = factors[0][0].shape[1]
    shared = products @ right[:width].T / np.sqrt(np.maximum(values[:width], 1e-12 * values[0]))
    size = np.mean([np.linalg.norm(table) for table, _ in factors])
    shared *= size / np.linalg.norm(shared)
    return [_conditioned(np.linalg.lstsq(weights * t, weights * shared)[0]) for t, _ in factors]


def read_anew(table: Float64Array, merged: Float64Array, shares: Float64Array) -> Float64Array:
    """Return M (dimensions, dimensions) with which weights W read a merged embedding as their own.

    Ē·(W·M)ᵀ is as close to E·Wᵀ as can be, tokens counted by `shares`: M = (Ē⁺·E)ᵀ.
    """
    weights = np.sqrt(shares)[:, None]
    return np.asarray(np.linalg.lstsq(weights * merged, weights * table)[0].T)


def _conditioned(basis: Float64Array) -> Float64Array:
    """Return a basis whose smallest singular values are not too small to be undone."""
    left, values, right = np.linalg.svd(basis)
    return np.asarray(left * np.maximum(values, SMALLEST * values[0]) @ right)
