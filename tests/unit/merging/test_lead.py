"""A client that leads: what it owns is its own, the rest is the others' mean."""

from __future__ import annotations

import numpy as np
import pytest

from fedmerge.merging import Averaging, average_tensor
from fedmerge.values import Assignment, FloatArray
from tests.unit.matching.test_units import PLAN, client

CLIENTS = [client(seed) for seed in range(3)]
WIDTHS = {"c": 3, "h": 5}
PLACEMENTS = [
    {"c": Assignment(np.array([0, 1]), 3), "h": Assignment(np.array([0, 1, 2]), 5)},
    {"c": Assignment(np.array([1, 2]), 3), "h": Assignment(np.array([4, 2, 3]), 5)},
    {"c": Assignment(np.array([2, 0]), 3), "h": Assignment(np.array([1, 3, 4]), 5)},
]


def averaged(
    name: str, lead: int | None, weights: tuple[float, ...] = (1.0, 2.0, 3.0)
) -> FloatArray:
    return average_tensor(
        name,
        CLIENTS,
        PLAN,
        placements=PLACEMENTS,
        widths=WIDTHS,
        averaging=Averaging(client_weights=weights, lead=lead),
    )


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_units_of_the_lead_are_its_own_to_the_bit(lead: int) -> None:
    for name, group in {"conv": "c", "conv.b": "c", "fc.b": "h"}.items():
        places = PLACEMENTS[lead][group].indices
        np.testing.assert_array_equal(averaged(name, lead)[places], CLIENTS[lead].arrays[name])
        assert not np.array_equal(averaged(name, None)[places], CLIENTS[lead].arrays[name])


@pytest.mark.parametrize("lead", [0, 1, 2])
def test_what_the_lead_reads_of_its_own_inputs_is_its_own_and_nothing_of_others(lead: int) -> None:
    found = averaged("fc", lead)[PLACEMENTS[lead]["h"].indices]
    own = PLACEMENTS[lead]["c"].indices
    columns = np.concatenate([[2 * c, 2 * c + 1] for c in own])
    np.testing.assert_array_equal(found[:, columns], CLIENTS[lead].arrays["fc"])
    others = np.setdiff1d(np.arange(6), columns)
    np.testing.assert_array_equal(found[:, others], 0)


def test_units_that_the_lead_does_not_own_are_the_mean_of_their_owners() -> None:
    found = averaged("fc.b", 0)
    one, two = CLIENTS[1].arrays["fc.b"], CLIENTS[2].arrays["fc.b"]
    np.testing.assert_allclose(found[3], (2 * one[2] + 3 * two[1]) / 5, rtol=1e-15)
    np.testing.assert_allclose(found[4], (2 * one[0] + 3 * two[2]) / 5, rtol=1e-15)


def test_outputs_are_everybodys() -> None:
    np.testing.assert_array_equal(averaged("out.b", 1), averaged("out.b", None))
    np.testing.assert_array_equal(averaged("out", 1), averaged("out", None))
