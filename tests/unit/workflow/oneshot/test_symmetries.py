"""Symmetries of clients: which there are, that they change no outputs, and what makes alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedmerge.types.arrays import Float64Array
from fedmerge.workflow.oneshot.symmetries.embeddings import basis_change, common_bases, read_anew
from fedmerge.workflow.oneshot.symmetries.signs import alike_signs, sign_change, signed_groups
from fedmerge.workflow.oneshot.symmetries.trial import Trial
from tests.unit.workflow.oneshot.symmetric_nets import (
    SIGNED,
    TIGHT,
    answers,
    difference,
    embeddings_of,
    fresh,
    inputs_of,
    models_of,
    prepared_of,
    signs_for,
    written,
)

UNSIGNED = [
    *("lenet", "rnn, relu", "tanh, max pool", "tanh, layer norm"),
    *("resnet B", "vit", "gpt"),  # streams with ReLUs or layer norms
]


def found_groups(name: str) -> dict[str, int | None]:
    models = models_of(name, fresh(name, 1), fresh(name, 2))
    prepared = models.prepared
    trial = Trial(models, inputs_of(name))
    rng = np.random.default_rng(0)
    return signed_groups(trial, prepared.plan, prepared.client_widths[0], rng=rng)


@pytest.mark.parametrize("name", SIGNED)
def test_groups_with_odd_non_linearities_have_signs(name: str) -> None:
    assert found_groups(name) == SIGNED[name]


@pytest.mark.parametrize("name", UNSIGNED)
def test_other_groups_have_none(name: str) -> None:
    assert found_groups(name) == {}


@pytest.mark.parametrize("name", SIGNED)
def test_signs_change_no_outputs_unless_the_wrong_rows_change(name: str) -> None:
    state = fresh(name, 1, torch.float64)
    prepared = prepared_of(name, [state, state])
    widths, client = prepared.client_widths[0], prepared.aligned[0]
    before = answers(name, state)
    for seed, (group, part) in enumerate(SIGNED[name].items()):
        signs = signs_for(widths[group], seed)
        right = sign_change(prepared.plan, widths, group, part, signs)
        assert difference(before, answers(name, written(client, state, right))) < TIGHT
        half = dict(list(right.items())[1:])
        assert difference(before, answers(name, written(client, state, half))) > 1e-3
        if part is not None:
            for wrong in (None, 0):
                other = sign_change(prepared.plan, widths, group, wrong, signs)
                assert difference(before, answers(name, written(client, state, other))) > 1e-3


def test_an_embedding_may_be_in_any_basis_unless_it_is_tied_or_stored_in_half_precision() -> None:
    def found(name: str, dtype: torch.dtype) -> list[str]:
        return [own.table for own in embeddings_of(name, fresh(name, 1, dtype))]

    assert found("language model", torch.float32) == ["encoder.weight"]
    assert found("language model", torch.bfloat16) == []
    assert found("tied language model", torch.float32) == []
    assert found("gpt", torch.float32) == []  # layer norms read it


def test_another_basis_changes_no_outputs_unless_nobody_reads_it() -> None:
    name = "language model"
    state = fresh(name, 1, torch.float64)
    before, prepared = answers(name, state), prepared_of(name, [state, state])
    (own,) = embeddings_of(name, state)
    basis = np.random.default_rng(3).normal(size=(4, 4)) + np.eye(4)
    both = basis_change(prepared.plan, prepared.client_widths[0], own, basis)
    client = prepared.aligned[0]
    assert difference(before, answers(name, written(client, state, both))) < TIGHT
    table = {own.table: both[own.table]}
    assert difference(before, answers(name, written(client, state, table))) > 1e-2


def test_signs_and_orders_that_were_changed_are_found() -> None:
    rng = np.random.default_rng(0)
    units = rng.normal(size=(9, 300))
    planted, given = [], []
    for count in (7, 9, 8):
        signs, order = signs_for(count, count), rng.permutation(9)[:count]
        own = signs[:, None] * units[order] + 0.1 * rng.normal(size=(count, 300))
        own -= own.mean(1, keepdims=True)
        given.append((own / np.linalg.norm(own, axis=1, keepdims=True)).astype(np.float32))
        planted.append((order, signs))
    total = np.zeros((9, 3))
    for k, ((order, signs), found) in enumerate(
        zip(planted, alike_signs(given, "auto"), strict=True)
    ):
        total[order, k] = found * signs
    assert (np.abs(total.sum(1)) == np.abs(total).sum(1)).all()  # one sign per unit, whoever has it


def test_bases_bring_embeddings_of_the_same_products_together() -> None:
    rng = np.random.default_rng(0)
    table, readers = rng.normal(size=(30, 5)), rng.normal(size=(20, 5))
    turns = [rng.normal(size=(5, 5)) + 2 * np.eye(5) for _ in range(3)]
    factors = [
        (table @ turn, readers[rng.permutation(20)] @ np.linalg.inv(turn).T) for turn in turns
    ]
    bases = common_bases(factors, rng.uniform(1, 9, 30))
    one, *others = (own @ basis for (own, _), basis in zip(factors, bases, strict=True))
    for other in others:
        np.testing.assert_allclose(other, one, atol=TIGHT)
    assert np.linalg.norm(factors[1][0] - factors[0][0]) > 1


def test_readers_fit_a_merged_embedding_as_well_as_can_be() -> None:
    rng = np.random.default_rng(0)
    table, readers, merged = (rng.normal(size=(n, 4)) for n in (30, 9, 30))
    shares = rng.uniform(1, 9, 30)

    def lost(weight: Float64Array) -> float:
        return float((shares[:, None] * np.square(merged @ weight.T - table @ readers.T)).sum())

    best = readers @ read_anew(table, merged, shares)
    assert lost(best) < 0.9 * lost(readers)
    assert all(lost(best + 0.01 * rng.normal(size=best.shape)) > lost(best) for _ in range(20))
    np.testing.assert_allclose(read_anew(table, table, shares), np.eye(4), atol=TIGHT)
