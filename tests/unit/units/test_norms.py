"""Averaged units with their owners' norms: lengths by hand, and what stays to the last bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedmerge.types.arrays import Array, FloatArray
from fedmerge.types.plans import Norm
from fedmerge.units import Averaging, average_tensor, with_owners_norms
from fedmerge.units.norms import has_norms
from tests.unit.units.test_lead import CLIENTS, PLACEMENTS, WIDTHS
from tests.unit.units.test_units import PLAN

WEIGHTS = (1.0, 2.0, 3.0)
EXACT = 1e-12  # double precision


def both(name: str, lead: int | None = None, plan: object = PLAN) -> tuple[FloatArray, FloatArray]:
    """Return a tensor averaged, and corrected."""
    averaging = Averaging(client_weights=WEIGHTS, lead=lead)
    where = {"placements": PLACEMENTS, "widths": WIDTHS, "averaging": averaging}
    plain = average_tensor(name, CLIENTS, PLAN, **where)  # type: ignore[arg-type]
    return plain, with_owners_norms(name, plain, CLIENTS, plan, **where)  # type: ignore[arg-type]


def length(row: Array) -> float:
    return float(np.sqrt(np.sum(np.square(row))))


def test_a_shared_unit_is_as_long_as_its_owners_in_the_mean_and_points_as_before() -> None:
    plain, corrected = both("conv")
    owners = [(CLIENTS[0], 1, 1.0), (CLIENTS[1], 0, 2.0)]  # of channel 1: row and weight
    wanted = sum(w * length(c.arrays["conv"][row]) for c, row, w in owners) / 3
    assert length(corrected[1]) == pytest.approx(wanted, rel=EXACT)
    assert length(plain[1]) < 0.99 * wanted  # averaging shrinks
    np.testing.assert_allclose(
        corrected[1] / length(corrected[1]), plain[1] / length(plain[1]), rtol=EXACT
    )


def test_a_unit_of_one_owner_keeps_its_row_to_the_bit() -> None:
    plain, corrected = both("fc")
    np.testing.assert_array_equal(corrected[0], plain[0])  # client 0's alone
    assert not np.array_equal(corrected[2], plain[2])


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_units_of_the_lead_keep_their_rows_to_the_bit(lead: int) -> None:
    plain, corrected = both("fc", lead)
    places = PLACEMENTS[lead]["h"].indices
    np.testing.assert_array_equal(corrected[places], plain[places])


@pytest.mark.parametrize("name", ["conv.b", "fc.b", "out", "out.b"])
def test_biases_and_outputs_stay(name: str) -> None:
    plain, corrected = both(name)
    np.testing.assert_array_equal(corrected, plain)


def test_what_a_batch_norm_follows_stays() -> None:
    norm = Norm("conv", "conv.b", None, None, "mean", "variance")
    plain, corrected = both("conv", plan=replace(PLAN, norms=(norm,)))
    np.testing.assert_array_equal(corrected, plain)
    assert has_norms(PLAN, "conv")
    assert not has_norms(replace(PLAN, norms=(norm,)), "conv")
