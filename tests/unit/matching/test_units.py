"""Features, placement and averages against plain loops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from fedmerge.matching import TieBreaker, gather_units
from fedmerge.merging import Averaging, average_tensor
from fedmerge.values import (
    Array,
    Assignment,
    Group,
    Norm,
    Pinned,
    Plan,
    Product,
    TensorInfo,
    TensorPlan,
    Units,
)

OUT = Pinned(2, "output")
PLAN = Plan(
    groups=(Group("c"), Group("h")),
    tensors={
        "conv": TensorPlan((Units("c"), Pinned(1), Pinned(2))),
        "conv.b": TensorPlan((Units("c"),)),
        "fc": TensorPlan((Units("h"), Product((Units("c"), Pinned(2))))),
        "fc.b": TensorPlan((Units("h"),)),
        "out": TensorPlan((OUT, Units("h"))),
        "out.b": TensorPlan((OUT,)),
    },
)
WIDTHS = {"c": 2, "h": 3}


@dataclass(frozen=True)
class ArrayClient:
    """A client in memory, without files."""

    arrays: Mapping[str, Array]
    name: str = "client"
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {n: TensorInfo(a.shape, str(a.dtype)) for n, a in self.arrays.items()}

    def read(self, name: str) -> Array:
        return np.array(self.arrays[name])


def client(seed: int, c: int = 2, h: int = 3) -> ArrayClient:
    rng = np.random.default_rng(seed)
    shapes = {
        "conv": (c, 1, 2),
        "conv.b": (c,),
        "fc": (h, 2 * c),
        "fc.b": (h,),
        "out": (2, h),
        "out.b": (2,),
    }
    return ArrayClient({name: rng.normal(size=shape) for name, shape in shapes.items()})


def placed(width: int, *indices: int) -> Assignment:
    return Assignment(np.array(indices), width)


def test_features_are_incoming_weights_in_the_global_layout_and_the_bias() -> None:
    one = client(0)
    units = gather_units(
        one, PLAN, "h", widths=WIDTHS, placed={"c": placed(4, 3, 1)}, ties=TieBreaker()
    )
    for unit in range(3):
        expected = np.zeros(9)
        expected[6:8] = one.arrays["fc"][unit, 0:2]  # channel 0 is global channel 3
        expected[2:4] = one.arrays["fc"][unit, 2:4]  # channel 1 is global channel 1
        expected[8] = one.arrays["fc.b"][unit]
        np.testing.assert_array_equal(units.weights[unit], expected)
    assert units.entries == 3 * 5  # padding is nobody's


def test_ties_are_outgoing_weights_in_ascending_order() -> None:
    one = client(0)
    units = gather_units(one, PLAN, "h", widths=WIDTHS, placed={"c": placed(2, 0, 1)},
                         ties=TieBreaker(scale=0.5, count=2))  # fmt: skip
    np.testing.assert_array_equal(units.ties, 0.5 * np.sort(one.arrays["out"].T, axis=1))
    limited = gather_units(one, PLAN, "c", widths=WIDTHS, placed={}, ties=TieBreaker(1.0, 3))
    outgoing = np.sort(one.arrays["fc"].reshape(3, 2, 2).transpose(1, 0, 2).reshape(2, 6), axis=1)
    np.testing.assert_array_equal(limited.ties, outgoing[:, [0, 2, 5]])


def test_features_do_not_depend_on_the_order_of_later_units() -> None:
    one = client(0)
    order = np.array([2, 0, 1])
    arrays = dict(one.arrays)
    arrays["fc"], arrays["fc.b"] = arrays["fc"][order], arrays["fc.b"][order]
    arrays["out"] = arrays["out"][:, order]
    other = ArrayClient(arrays)
    for name in ("weights", "ties"):
        found = [
            getattr(gather_units(c, PLAN, "c", widths=WIDTHS, placed={}, ties=TieBreaker()), name)
            for c in (one, other)
        ]
        np.testing.assert_array_equal(found[0], found[1])


def test_recurrent_features_are_the_gates_rows_side_by_side() -> None:
    gates = Product((Pinned(2), Units("h")))
    plan = Plan(
        groups=(Group("h"),),
        tensors={
            "ih": TensorPlan((gates, Pinned(3))),
            "hh": TensorPlan((gates, Units("h")), role="recurrent"),
        },
    )
    arrays = {"ih": np.arange(12.0).reshape(4, 3), "hh": np.arange(8.0).reshape(4, 2)}
    units = gather_units(
        ArrayClient(arrays), plan, "h", widths={"h": 2}, placed={}, ties=TieBreaker(1.0, 4)
    )
    np.testing.assert_array_equal(units.weights[1], [3, 4, 5, 9, 10, 11])
    np.testing.assert_array_equal(units.ties[1], [2, 3, 6, 7, 1, 3, 5, 7])  # rows, then columns


def test_a_batch_norm_is_folded_into_its_producer() -> None:
    names = ("gamma", "beta", "mean", "var")
    plan = Plan(
        groups=(Group("h"),),
        tensors={
            "w": TensorPlan((Units("h"), Pinned(3))),
            "b": TensorPlan((Units("h"),)),
            **{name: TensorPlan((Units("h"),), role="pointwise") for name in names},
        },
        norms=(Norm("w", "b", "gamma", "beta", "mean", "var", eps=0.5),),
    )
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {n: rng.uniform(0.5, 2, size=2) for n in ("b", *names)}
    arrays["w"] = rng.normal(size=(2, 3))
    units = gather_units(
        ArrayClient(arrays), plan, "h", widths={"h": 2}, placed={}, ties=TieBreaker()
    )
    x = rng.normal(size=3)
    folded = units.weights[:, :3] @ x + units.weights[:, 3]
    hidden = arrays["w"] @ x + arrays["b"]
    normed = (hidden - arrays["mean"]) / np.sqrt(arrays["var"] + 0.5)
    np.testing.assert_allclose(folded, arrays["gamma"] * normed + arrays["beta"], rtol=1e-12)


def test_hidden_units_are_averaged_over_their_owners() -> None:
    one, two = client(1), client(2)
    placements = [
        {"c": placed(2, 0, 1), "h": placed(4, 0, 1, 2)},
        {"c": placed(2, 1, 0), "h": placed(4, 2, 3, 1)},
    ]
    merged = average_tensor(
        "fc",
        [one, two],
        PLAN,
        placements=placements,
        widths={"c": 2, "h": 4},
        averaging=Averaging((1.0, 3.0)),
    )
    swapped = two.arrays["fc"][:, [2, 3, 0, 1]]  # its channels in the global order
    np.testing.assert_allclose(merged[0], one.arrays["fc"][0])
    np.testing.assert_allclose(merged[1], (one.arrays["fc"][1] + 3 * swapped[2]) / 4)
    np.testing.assert_allclose(merged[2], (one.arrays["fc"][2] + 3 * swapped[0]) / 4)
    np.testing.assert_allclose(merged[3], swapped[1])


def test_outputs_are_averaged_over_all_clients_never_over_the_owners_of_the_input() -> None:
    one, two = client(1), client(2)
    placements = [{"h": placed(4, 0, 1, 2)}, {"h": placed(4, 1, 2, 3)}]
    settings = {"placements": placements, "widths": {"h": 4}}
    merged = average_tensor("out", [one, two], PLAN, averaging=Averaging((1.0, 1.0)), **settings)  # type: ignore[arg-type]
    np.testing.assert_allclose(merged[:, 0], one.arrays["out"][:, 0] / 2)
    np.testing.assert_allclose(merged[:, 3], two.arrays["out"][:, 2] / 2)
    shares = np.array([[0.25, 1.0], [0.75, 0.0]])
    by_class = average_tensor(
        "out.b", [one, two], PLAN, averaging=Averaging((1.0, 1.0), shares), **settings  # type: ignore[arg-type]
    )  # fmt: skip
    expected = shares[0] * one.arrays["out.b"] + shares[1] * two.arrays["out.b"]
    np.testing.assert_allclose(by_class, expected)


@pytest.mark.parametrize(("shrinkage", "factor"), [(0.0, 1.0), (1.0, 2 / 3), (0.5, 0.8)])
def test_shrinkage_is_the_posterior_mean_of_hidden_units_only(
    shrinkage: float, factor: float
) -> None:
    one = client(1)
    placements = [{"c": placed(2, 0, 1), "h": placed(3, 0, 1, 2)}] * 2
    averaging = Averaging((1.0, 1.0), shrinkage=shrinkage)
    for name, expected in (("fc", factor), ("out", 1.0)):
        merged = average_tensor(
            name, [one, one], PLAN, placements=placements, widths=WIDTHS, averaging=averaging
        )
        np.testing.assert_allclose(merged, expected * one.arrays[name])


def test_padding_units_of_no_client_are_zero() -> None:
    one = client(1)
    placements = [{"c": placed(2, 0, 1), "h": placed(5, 0, 1, 2)}]
    merged = average_tensor(
        "fc.b",
        [one],
        PLAN,
        placements=placements,
        widths={"c": 2, "h": 5},
        averaging=Averaging((1.0,)),
    )
    np.testing.assert_array_equal(merged, [*one.arrays["fc.b"], 0, 0])


def test_float32_sums_are_made_in_float64_and_written_as_float32() -> None:
    values = [np.float32(1e8), np.float32(1), np.float32(-1e8)]
    clients = [ArrayClient({"out.b": np.full(2, v, dtype=np.float32)}) for v in values]
    merged = average_tensor(
        "out.b", clients, PLAN, placements=[{}] * 3, widths={}, averaging=Averaging((1.0,) * 3)
    )
    assert merged.dtype == np.float32
    np.testing.assert_allclose(merged, 1 / 3, rtol=1e-7)
    assert (values[0] + values[1]) + values[2] != 1  # what float32 sums would give
