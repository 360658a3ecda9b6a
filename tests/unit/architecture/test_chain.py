"""Plans from names and shapes alone: what is accepted, and what is refused with which reason."""

import pytest
import torch
from torch import nn

from fedmerge.architecture import ChainOptions, plan_chain, solve_widths
from fedmerge.errors import ArchitectureError
from fedmerge.values import Concat, Pinned, Plan, Product, TensorInfo, Units
from tests.zoo import ZOO, LeNet, mlp_batch_norm

Shapes = dict[str, tuple[int, ...]]


def infos(shapes: Shapes) -> dict[str, TensorInfo]:
    return {name: TensorInfo(shape, "float32") for name, shape in shapes.items()}


def planned(shapes: Shapes, **options: object) -> Plan:
    return plan_chain(infos(shapes), ChainOptions(**options), aliases={}, source="a")  # type: ignore[arg-type]


def shapes_of(model: nn.Module) -> Shapes:
    return {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }


def dense(*widths: int, names: str = "fc{}") -> Shapes:
    """Return the shapes of a chain of linear layers called fc1, fc2, …"""
    shapes: Shapes = {}
    for number, (rows, columns) in enumerate(zip(widths[1:], widths, strict=False), start=1):
        name = names.format(number)
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    return shapes


@pytest.mark.parametrize("name", [n for n in ZOO if "tied" not in n])
def test_every_zoo_model_has_its_hand_counted_groups(name: str) -> None:
    plan = planned(shapes_of(ZOO[name].build()))
    assert len(plan.groups) == ZOO[name].groups
    assert set(plan.tensors) == set(shapes_of(ZOO[name].build()))


def test_lenet_is_recognised_and_its_flatten_is_channels_times_pixels() -> None:
    plan = planned(shapes_of(LeNet()))
    assert plan.architecture == "lenet"
    assert plan.tensors["fc1.weight"].axes == (
        Units("fc1"),
        Product((Units("conv2"), Pinned(4))),
    )
    assert plan.tensors["fc2.weight"].axes == (Pinned(4, "output"), Units("fc1"))


def test_lstm_rows_are_gates_times_hidden_and_directions_are_concatenated() -> None:
    plan = planned(shapes_of(ZOO["lstm, 3 layers, both directions"].build()))
    assert plan.tensors["rnn.weight_hh_l1_reverse"].axes == (
        Product((Pinned(4), Units("rnn_l1_reverse"))),
        Units("rnn_l1_reverse"),
    )
    assert plan.tensors["fc.weight"].axes[1] == Concat((Units("rnn_l2"), Units("rnn_l2_reverse")))
    assert plan.same_width == (tuple(group.name for group in plan.groups),)


def test_an_embedding_produces_along_its_second_axis() -> None:
    plan = planned(shapes_of(ZOO["char-lstm"].build()))
    assert plan.architecture == "char-lstm"
    assert plan.tensors["encoder.weight"].out == 1
    assert plan.tensors["encoder.weight"].produces == {"encoder"}


def test_batch_norm_is_folded_only_behind_its_producer() -> None:
    plan = planned(shapes_of(mlp_batch_norm()))
    assert [(norm.producer, norm.bias) for norm in plan.norms] == [
        ("0.weight", "0.bias"),
        ("3.weight", None),
    ]
    flat = planned(shapes_of(ZOO["batch norm after flatten"].build()))
    assert flat.norms == ()


def test_tied_embedding_and_decoder_share_one_group() -> None:
    shapes = shapes_of(ZOO["char-lstm, tied"].build())
    plan = plan_chain(
        infos(shapes), ChainOptions(), aliases={"decoder.weight": "encoder.weight"}, source="a"
    )
    assert [group.name for group in plan.groups] == ["encoder"]
    assert "decoder.weight" not in plan.tensors
    assert plan.tensors["rnn.weight_hh_l0"].axes[1] == Units("encoder")


def test_the_last_recurrent_layer_without_a_decoder_is_the_output() -> None:
    plan = planned(shapes_of(nn.LSTM(3, 4, num_layers=2)))
    assert [group.name for group in plan.groups] == ["l0"]
    assert not plan.groups[0].can_grow
    assert plan.tensors["weight_hh_l1"].axes == (
        Product((Pinned(4), Pinned(4, "output"))),
        Pinned(4, "output"),
    )


def test_a_layer_norm_keeps_its_group_from_growing() -> None:
    plan = planned(shapes_of(ZOO["mlp with layer norm"].build()))
    assert not plan.groups[0].can_grow
    assert "'1'" in plan.groups[0].why


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (dense(4, 8, 8, 3, names="part{}.lin"), "both 8 wide"),
        (dense(4, 8, 8, 3, names="layers.{}"), "both 8 wide"),
        ({"b.weight": (6, 6), "a.weight": (5, 6)}, "an embedding or linear"),
        ({"a.weight": (6, 6), "b.weight": (5, 6)}, "several orders of its layers fit"),
        (dense(4, 8) | {"x.pos": (3, 8)}, "'x.pos' belongs to no layer"),
        (dense(4, 8, 3) | {"block.downsample.weight": (3, 3)}, "a block \\('downsample'\\)"),
        (dense(4, 8, 3) | {"attn.in_proj_weight": (9, 3)}, "a block"),
        ({"fc.weight_g": (8, 1), "fc.weight_v": (8, 4)}, "parametrised weight"),
        (dense(4, 8) | {"fc2.weight": (3, 9)}, "reads 9 values, but 'fc1' gives 8"),
        (
            {"conv1.weight": (8, 3, 3, 3), "conv2.weight": (8, 1, 3, 3), "fc.weight": (3, 8)},
            "transposed, grouped or depthwise",
        ),
        ({"conv1.weight": (8, 3, 3, 3), "conv2.weight": (8, 4, 3, 3)}, "transposed, grouped"),
        (
            {"conv1.weight": (8, 3, 3, 3), "fc.weight": (3, 8 * 12), "fc.bias": (3,)},
            "12 positions per channel, which is no whole square",
        ),
        (
            {"conv1.weight": (8, 3, 3, 3), "gn.weight": (8,), "gn.bias": (8,)},
            "without running statistics",
        ),
        (
            {"conv.weight": (8, 3, 3, 3)} | shapes_of(nn.LSTM(8, 4)),
            "is recurrent and reads the convolution",
        ),
        ({"rnn.weight_ih_l0": (10, 3), "rnn.weight_hh_l0": (10, 5)}, "expected 1 .* 3 .* 4"),
    ],
)
def test_what_is_no_plain_chain_is_refused_with_the_reason_and_the_model_hint(
    shapes: Shapes, reason: str
) -> None:
    with pytest.raises(ArchitectureError, match=reason) as caught:
        planned(shapes)
    assert caught.value.exit_code == 3
    assert "parametri" in caught.value.hint or "`model=" in caught.value.hint


@pytest.mark.parametrize(
    "shapes",
    [
        dense(4, 8, 8, 3),
        dense(4, 8, 8, 3, names="layers.{}") | {},
    ],
)
def test_equal_widths_are_accepted_if_numbered_or_assumed(shapes: Shapes) -> None:
    assert len(planned(shapes, assume_chain=True).groups) == 2


def test_numbered_layers_and_sequentials_with_gaps_need_no_assumption() -> None:
    assert len(planned(dense(4, 8, 8, 3)).groups) == 2
    sequential = shapes_of(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    )
    assert len(planned(sequential).groups) == 2


def test_flatten_says_how_many_positions_there_are() -> None:
    shapes = {"conv1.weight": (8, 3, 3, 3), "fc.weight": (3, 8 * 12), "fc.bias": (3,)}
    plan = planned(shapes, flatten=12)
    assert plan.tensors["fc.weight"].axes[1] == Product((Units("conv1"), Pinned(12)))
    with pytest.raises(ArchitectureError, match="not `flatten=6`"):
        planned(shapes, flatten=6)


def test_kept_layers_may_fall_out_of_the_chain() -> None:
    shapes = dense(4, 8, 3) | {"other_head.weight": (5, 8)}
    with pytest.raises(ArchitectureError, match="reads 8 values, but 'fc2' gives 3"):
        planned(shapes)
    kept = plan_chain(
        infos(shapes), ChainOptions(), aliases={}, kept=["other_head.weight"], source="a"
    )
    assert [group.name for group in kept.groups] == ["fc1"]


def test_widths_are_solved_through_products_and_concatenations() -> None:
    model = ZOO["lstm, 3 layers, both directions"].build()
    plan = planned(shapes_of(model))
    assert solve_widths(plan, shapes_of(model), source="a") == {g.name: 6 for g in plan.groups}


def test_a_client_that_contradicts_the_plan_is_named_with_tensor_and_axis() -> None:
    plan = planned(shapes_of(LeNet()))
    wrong = shapes_of(LeNet()) | {"conv2.weight": (6, 5, 5, 3)}
    with pytest.raises(ArchitectureError, match=r"b: 'conv2.weight' has size 5 along axis 2"):
        solve_widths(plan, wrong, source="b")


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (
            {"r.weight_ih_l0": (8,), "r.weight_hh_l0": (8, 2)},
            "'r.weight_ih_l0' belongs to no layer",
        ),
        (
            {"r.weight_ih_l0": (8, 3), "r.weight_hh_l0": (8,)},
            "'r.weight_hh_l0' belongs to no layer",
        ),
        ({"r.bias_ih_l0": (8,)}, "'r' has no weight_hh_l0"),
        ({"r.weight_ih_l0": (8, 3), "r.weight_hh_l1": (8, 2)}, "'r' has no weight_hh_l0"),
        (
            {"r.weight_ih_l0": (8, 3), "r.weight_hh_l0": (8, 2)}
            | {"r.weight_ih_l1": (8, 3), "r.weight_hh_l1": (8, 2)},
            "'r.weight_ih_l1' reads 3 values, expected 2",
        ),
        ({"fc1.weight": (0, 4), "fc1.bias": (0,), "fc2.weight": (3, 0)}, "an axis of size 0"),
        ({"r.weight_ih_l0": (0, 3), "r.weight_hh_l0": (0, 0)}, "an axis of size 0"),
        ({"bn.weight": (3,), "bn.bias": (3,)}, "no layer with weights"),
    ],
)
def test_tensors_that_make_no_layer_are_refused(shapes: Shapes, reason: str) -> None:
    with pytest.raises(ArchitectureError, match=reason):
        planned(shapes)


def test_a_one_channel_convolution_that_may_be_grouped_is_mentioned() -> None:
    shapes = {"conv1.weight": (6, 1, 3, 3), "conv1.bias": (6,), "fc.weight": (3, 6)}
    assert any("grouped" in note for note in planned(shapes).notes)
    shapes = {"conv1.weight": (8, 1, 3, 3), "conv1.bias": (8,), "fc.weight": (3, 8)}
    assert not any("grouped" in note for note in planned(shapes).notes)


def test_integer_buffers_take_no_part() -> None:
    model = mlp_batch_norm()
    tensors = {
        name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for name, t in model.state_dict().items()
    }
    plan = plan_chain(tensors, ChainOptions(), aliases={}, source="a")
    assert not any("num_batches" in name for name in plan.tensors)
    assert torch.int64 in {t.dtype for t in model.state_dict().values()}
