"""Resized modules: every layer type follows the shapes, and so do the user's own integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture import resize_module
from fedmerge.errors import ArchitectureError
from tests.model_zoo_attention import CountedAttention
from tests.zoo import CharModel


class OwnState(nn.Module):
    """A recurrent net that makes its initial state from an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_size, self.num_layers = 6, 2
        self.lstm = nn.LSTM(5, 6, 2, batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(self.num_layers, len(x), self.hidden_size)
        steps, _ = self.lstm(x, (state, state))
        logits: Tensor = self.fc(steps[:, -1])
        return logits


def widened(model: nn.Module, old: int, new: int) -> dict[str, tuple[int, ...]]:
    """Return the model's shapes with every multiple of a width up to 4 replaced."""
    sizes = {k * old: k * new for k in (1, 3, 4)}
    return {
        name: tuple(sizes.get(size, size) for size in tensor.shape)
        for name, tensor in model.state_dict().items()
    }


def attention_shapes(stream: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the zoo's attention that counts its heads."""
    made = {f"{n}.weight": (inner, stream) for n in "qkv"} | {f"{n}.bias": (inner,) for n in "qv"}
    return {**made, "out.weight": (stream, inner), "out.bias": (stream,)}


@pytest.mark.parametrize(
    ("stream", "inner", "heads"),
    [
        (12, 20, 5),  # two heads more
        (16, 12, 3),  # the stream alone, which is as wide as all heads were
        (16, 20, 5),  # both
        (12, 14, 3),  # no whole number of heads
    ],
)
def test_the_number_of_heads_follows_the_heads_and_not_the_stream(
    stream: int, inner: int, heads: int
) -> None:
    attention = CountedAttention(12, heads=3, head_dim=4)
    resize_module(attention, attention_shapes(stream, inner))
    assert (attention.num_heads, attention.head_dim) == (heads, 4)


def test_integers_follow_the_number_of_heads_by_their_names() -> None:
    attention = CountedAttention(12, heads=3, head_dim=4)
    counting = ("heads", "n_head", "nhead", "num_attention_heads", "head_count", "H_heads")
    others = ("head_out", "dim_heads", "overhead", "n_units_per_head", "layers")
    for name in (*counting, *others):
        setattr(attention, name, 3)
    resize_module(attention, attention_shapes(12, 20))
    assert {name: getattr(attention, name) for name in counting} == dict.fromkeys(counting, 5)
    assert {name: getattr(attention, name) for name in others} == dict.fromkeys(others, 3)


def test_a_user_s_integer_follows_the_width_that_it_equals() -> None:
    model = OwnState()
    resize_module(model, widened(model, 6, 8))
    assert model.hidden_size == 8
    assert model.num_layers == 2
    assert model.lstm.hidden_size == 8
    assert model.fc.in_features == 8
    assert model(torch.zeros(2, 4, 5)).shape == (2, 3)


def test_an_integer_follows_the_widths_of_its_own_part_only() -> None:
    class Part(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.count = 6
            self.linear = nn.Linear(inputs, outputs)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = 6

    model = nn.Sequential(Part(5, 6), Part(6, 4), Part(4, 3), Bare())
    shapes = {"0.linear.weight": (8, 5), "0.linear.bias": (8,), "1.linear.weight": (4, 8)}
    resize_module(model, {**{n: tuple(t.shape) for n, t in model.state_dict().items()}, **shapes})
    counts = [getattr(part, "count") for part in model]  # noqa: B009
    assert counts == [8, 8, 6, 8]  # the third part has no axis of 6; the last no tensors at all


@pytest.mark.parametrize(
    "settings",
    [{}, {"kdim": 6, "vdim": 7}, {"add_bias_kv": True}, {"bias": False}],
    ids=["stacked", "separate", "bias_k and bias_v", "no bias"],
)
def test_attention_follows_its_shapes_and_keeps_its_number_of_heads(
    settings: dict[str, Any],
) -> None:
    small = nn.MultiheadAttention(8, 2, batch_first=True, **settings)
    wide = nn.MultiheadAttention(12, 2, batch_first=True, **settings)
    resize_module(small, {name: tuple(t.shape) for name, t in wide.state_dict().items()})
    small.load_state_dict(wide.state_dict())
    for name in ("embed_dim", "kdim", "vdim", "num_heads", "head_dim"):
        assert getattr(small, name) == getattr(wide, name)
    torch.manual_seed(0)
    query = torch.randn(2, 3, 12)
    key = torch.randn(2, 5, settings.get("kdim", 12))
    value = torch.randn(2, 5, settings.get("vdim", 12))
    assert torch.equal(small(query, key, value)[0], wide(query, key, value)[0])


def test_an_integer_that_could_follow_two_widths_stays() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.width = 6
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    model = Two()
    resize_module(model, {"a.weight": (8, 6), "a.bias": (8,), "b.weight": (3, 8), "b.bias": (3,)})
    assert model.width == 6  # the input is 6 wide still
    assert model.b(model.a(torch.zeros(1, 6))).shape == (1, 3)


def test_tied_parameters_stay_one_parameter() -> None:
    model = CharModel(nn.LSTM, tied=True)
    resize_module(model, widened(model, 4, 5))
    assert model.decoder.weight is model.encoder.weight
    assert model.encoder.embedding_dim == 5
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 11)


@pytest.mark.parametrize(
    ("layer", "shapes", "attributes"),
    [
        (nn.Conv2d(3, 4, 3), {"weight": (6, 5, 3, 3), "bias": (6,)}, {"in_channels": 5}),
        (nn.BatchNorm1d(4), dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (6,)),
         {"num_features": 6}),
        (nn.BatchNorm1d(4, affine=False), {"running_mean": (6,), "running_var": (6,)},
         {"num_features": 6}),
        (nn.LayerNorm(4), {"weight": (6,), "bias": (6,)}, {"normalized_shape": (6,)}),
        (nn.Embedding(9, 4), {"weight": (9, 6)}, {"embedding_dim": 6, "num_embeddings": 9}),
        (nn.PReLU(4), {"weight": (6,)}, {"num_parameters": 6}),
        (nn.GRUCell(3, 4), {"weight_ih": (15, 3), "weight_hh": (15, 5), "bias_ih": (15,),
                            "bias_hh": (15,)}, {"hidden_size": 5, "input_size": 3}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
def test_every_layer_type_follows_the_shapes(
    layer: nn.Module, shapes: dict[str, tuple[int, ...]], attributes: dict[str, object]
) -> None:
    resize_module(layer, shapes)
    for name, value in attributes.items():
        assert getattr(layer, name) == value
    own = dict(layer.state_dict())
    assert {name: tuple(own[name].shape) for name in shapes} == shapes


def test_another_number_of_axes_is_refused() -> None:
    with pytest.raises(ArchitectureError, match="'weight' has 4 axes in the file and 2"):
        resize_module(nn.Linear(3, 4), {"weight": (4, 3, 1, 1)})
