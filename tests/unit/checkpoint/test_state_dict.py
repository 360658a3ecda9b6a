from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedmerge.checkpoint import Checkpoint, ReadOptions, from_state_dict, open_checkpoint
from fedmerge.errors import CheckpointError
from tests.unit.checkpoint.samples import prefixed, save_zip, state


def opened(content: object, folder: Path, **options: Any) -> Checkpoint:
    path = folder / f"a{len(list(folder.iterdir()))}.pt"  # one file per call: none may change
    return open_checkpoint(save_zip(content, path), ReadOptions(**options))


def optimizer() -> dict[str, Any]:
    return {"state": {0: {"exp_avg": torch.zeros(4, 3)}}, "param_groups": [{"lr": 0.1}]}


# ------------------------------------------------------------------ where the state dict is


@pytest.mark.parametrize("location", ["state_dict", "model_state_dict", "model", "a.b.c", "nets.0"])
def test_the_one_mapping_of_tensors_is_found_at_any_depth(tmp_path: Path, location: str) -> None:
    content: Any = state()
    for part in reversed(location.split(".")):
        content = [content] if part == "0" else {part: content, "epoch": 3}
    checkpoint = opened(content, tmp_path)
    assert checkpoint.location == location
    assert list(checkpoint.tensors) == list(state())


def test_a_lightning_checkpoint_gives_its_model_and_says_what_was_ignored(tmp_path: Path) -> None:
    content = {
        "epoch": 3,
        "global_step": torch.tensor(100),
        "best_score": torch.tensor(0.9),
        "rng_state": torch.zeros(16, dtype=torch.uint8),
        "state_dict": prefixed(state(), "model."),
        "optimizer_states": [optimizer()],
        "lr_schedulers": [{"last_epoch": 3}],
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.9)}},
    }
    checkpoint = opened(content, tmp_path)
    assert checkpoint.location == "state_dict"
    assert checkpoint.prefix == "model."
    assert checkpoint.notes == ("optimizer states ignored",)
    assert checkpoint.output_name("fc1.weight") == "model.fc1.weight"


def test_several_state_dicts_are_listed_and_chosen_by_key(tmp_path: Path) -> None:
    content = {"nets": {"G": state(0), "D": {"fc.weight": torch.ones(1, 2)}}}
    several = r"'nets\.G' \(5 tensors\), 'nets\.D' \(1 tensor\)"
    with pytest.raises(CheckpointError, match=several) as caught:
        opened(content, tmp_path)
    assert "`key=nets.G`" in caught.value.hint
    checkpoint = opened(content, tmp_path, key="nets.D")
    assert checkpoint.location == "nets.D"
    np.testing.assert_array_equal(checkpoint.read("fc.weight"), [[1, 1]])


def test_a_key_may_name_a_parent_the_top_level_or_have_dots_itself(tmp_path: Path) -> None:
    content = {"a.b": {"c": state()}, "w": torch.ones(3), "x": {"fc.weight": torch.ones(2)}}
    assert opened(content, tmp_path, key="a.b").location == "a.b.c"
    assert opened(content, tmp_path, key="a.b.c").location == "a.b.c"
    top = opened(content, tmp_path, key=".")
    assert (top.location, list(top.tensors)) == ("", ["w"])


def test_a_state_dict_stored_twice_is_one(tmp_path: Path) -> None:
    tensors = state()
    content = {"model": tensors, "state_dict": tensors}
    assert opened(content, tmp_path).location == "model"
    assert opened(content, tmp_path, key="state_dict").location == "state_dict"


def test_an_absent_key_is_answered_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no 'net'") as caught:
        opened({"model": state()}, tmp_path, key="net")
    assert "'model' (5 tensors)" in caught.value.hint


def test_entries_that_are_no_tensors_are_ignored_and_named(tmp_path: Path) -> None:
    checkpoint = opened(state() | {"epoch": 3, "acc": 0.5}, tmp_path)
    assert list(checkpoint.tensors) == list(state())
    assert checkpoint.notes == ("ignored 2 entries that are no weights: epoch, acc",)


@pytest.mark.parametrize(
    "content",
    [
        optimizer(),
        {"optimizer": optimizer(), "epoch": 3},
        {"optimizer_states": [optimizer()], "step": torch.tensor(3)},
        {"optim": {"momentum": {"fc.weight": torch.ones(3)}}},
    ],
)
def test_a_file_with_nothing_but_optimizer_states_says_so(tmp_path: Path, content: object) -> None:
    with pytest.raises(CheckpointError, match="holds optimizer state only") as caught:
        opened(content, tmp_path)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [torch.ones(3)], torch.ones(3), 5])
def test_a_file_without_named_tensors_says_so(tmp_path: Path, content: object) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors under names"):
        opened(content, tmp_path)


def test_a_file_without_float_tensors_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no float tensors"):
        opened({"a": torch.arange(3)}, tmp_path)


# ------------------------------------------------------------------ EMA copies


def averaged() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state().items()}


@pytest.mark.parametrize("key", ["ema", "model_ema", "ema_state_dict", "state_dict_ema", "EMA"])
def test_an_ema_copy_beside_the_weights_is_chosen_by_option(tmp_path: Path, key: str) -> None:
    content = {"net": state(), key: averaged()}
    raw, asked, ema = (opened(content, tmp_path, weights=w) for w in (None, "raw", "ema"))
    assert (raw.location, asked.location, ema.location) == ("net", "net", key)
    assert (raw.weights, asked.weights, ema.weights) == ("raw", "raw", "ema")
    assert raw.notes == (f"the EMA copy '{key}' ignored",)
    assert not ema.read("fc1.weight").any()
    assert raw.read("fc1.weight").any()


@pytest.mark.parametrize(
    ("raw_prefix", "ema_prefix"),
    [("", "ema."), ("model.", "model_ema."), ("module.model.", "module.ema_model.")],
)
def test_an_ema_copy_among_the_names_is_chosen_by_option(
    tmp_path: Path, raw_prefix: str, ema_prefix: str
) -> None:
    content = prefixed(state(), raw_prefix) | prefixed(averaged(), ema_prefix)
    content[ema_prefix + "decay"] = torch.tensor(0.999)
    raw = opened(content, tmp_path)
    ema = opened(content, tmp_path, weights="ema")
    assert list(raw.tensors) == list(ema.tensors) == list(state())
    assert (raw.weights, ema.weights) == ("raw", "ema")
    assert raw.notes[0] == "an EMA copy of 5 tensors ignored"
    assert raw.read("fc1.weight").any()
    assert not ema.read("fc1.weight").any()


def test_ema_names_without_dots_are_recognised(tmp_path: Path) -> None:
    squashed = {f"model_ema.{name.replace('.', '')}": t for name, t in averaged().items()}
    del squashed["model_ema.bnrunning_mean"]
    content = prefixed(state(), "model.") | squashed
    ema = opened(content, tmp_path, weights="ema")
    assert ema.prefix == "model."
    assert set(ema.tensors) == set(state()) - {"bn.running_mean"}
    assert ema.notes == ("the EMA copy lacks model.bn.running_mean",)


def test_a_file_with_an_ema_copy_alone_gives_that(tmp_path: Path) -> None:
    for content in ({"ema": averaged()}, prefixed(averaged(), "ema_model.")):
        checkpoint = opened(content, tmp_path)
        assert checkpoint.weights == "ema"
        assert list(checkpoint.tensors) == list(state())
        with pytest.raises(CheckpointError, match="has no raw weights"):
            opened(content, tmp_path, weights="raw")


def test_an_ema_copy_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for content in (state(), {"net": state()}):
        with pytest.raises(CheckpointError, match="has no ema weights"):
            opened(content, tmp_path, weights="ema")


def test_a_layer_called_ema_that_copies_nothing_is_a_layer(tmp_path: Path) -> None:
    content = state() | {"attention.ema.weight": torch.ones(3, 3), "schema.bias": torch.ones(2)}
    checkpoint = opened(content, tmp_path)
    assert list(checkpoint.tensors) == list(content)
    assert checkpoint.weights == "raw"


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("wrapper", "prefix", "removed"),
    [
        ("module.", "", ["module."]),
        ("_orig_mod.", "", ["_orig_mod."]),
        ("module._orig_mod.module.", "", ["module.", "_orig_mod."]),
        ("_orig_mod.module.", "", ["module.", "_orig_mod."]),
        ("model.", "model.", []),
        ("model.model.", "model.model.", []),
        ("module.model._orig_mod.", "model.", ["module.", "_orig_mod."]),
        ("model.module.", "model.", ["module."]),
    ],
)
def test_wrappers_are_stripped_in_any_order(wrapper: str, prefix: str, removed: list[str]) -> None:
    checkpoint = from_state_dict(prefixed(state(), wrapper), name="a")
    assert list(checkpoint.tensors) == list(state())
    assert checkpoint.prefix == prefix
    assert checkpoint.notes == tuple(f"stripped '{name}' from the names" for name in removed)


def test_wrapped_modules_give_the_names_of_the_plain_one() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    wrapped = nn.DataParallel(net).state_dict()
    assert list(from_state_dict(wrapped, name="a").tensors) == list(net.state_dict())
    swa = torch.optim.swa_utils.AveragedModel(net).state_dict()
    checkpoint = from_state_dict(swa, name="a")
    assert list(checkpoint.tensors) == list(net.state_dict())
    assert checkpoint.notes[0] == "ignored 1 entry that is no weight: n_averaged"


def test_only_wrappers_in_front_of_every_name_are_stripped() -> None:
    tensors = {"model.fc.weight": torch.ones(2, 2), "head.module.weight": torch.ones(2, 2)}
    checkpoint = from_state_dict(tensors, name="a")
    assert list(checkpoint.tensors) == list(tensors)
    assert checkpoint.prefix == ""


def test_a_compiled_part_of_a_model_loses_the_compilers_name() -> None:
    tensors = {"body._orig_mod.weight": torch.ones(2, 2), "head.weight": torch.ones(1, 2)}
    assert list(from_state_dict(tensors, name="a").tensors) == ["body.weight", "head.weight"]


def test_a_tensor_called_like_a_wrapper_keeps_its_name() -> None:
    for name in ("model", "module", "_orig_mod"):
        assert list(from_state_dict({name: torch.ones(2)}, name="a").tensors) == [name]


def test_names_that_collide_without_wrappers_are_refused() -> None:
    tensors = {"a._orig_mod.weight": torch.ones(2), "a.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match=r"are both 'a\.weight' without"):
        from_state_dict(tensors, name="a")


@pytest.mark.parametrize("name", ["fc\n.weight", "\x1b[2J", "\udc80"])
def test_names_that_cannot_be_printed_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="is no printable text"):
        from_state_dict({name: torch.ones(2)}, name="a")


# ------------------------------------------------------------------ ties


def test_a_tied_tensor_keeps_its_place_and_is_an_alias_of_the_first(tmp_path: Path) -> None:
    weight = torch.randn(5, 3)
    tensors = {"emb.weight": weight, "fc.bias": torch.ones(5), "fc.weight": weight}
    for checkpoint in (opened(tensors, tmp_path), from_state_dict(tensors, name="a")):
        assert list(checkpoint.tensors) == ["emb.weight", "fc.bias", "fc.weight"]
        assert checkpoint.aliases == {"fc.weight": "emb.weight"}
        np.testing.assert_array_equal(checkpoint.read("fc.weight"), weight.numpy())
        assert checkpoint.tensor_digest("fc.weight") == checkpoint.tensor_digest("emb.weight")


def test_views_of_one_storage_and_empty_tensors_are_no_ties(tmp_path: Path) -> None:
    base = torch.randn(4, 4)
    tensors = {"whole": base, "top": base[:2], "bottom": base[2:], "turned": base.T}
    tensors |= {"none.a": torch.ones(0, 2), "none.b": torch.ones(0, 2)}
    checkpoint = opened(tensors, tmp_path)
    assert list(checkpoint.tensors) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor.numpy())


# ------------------------------------------------------------------ tensors that cannot be merged


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.ones(2, 2).to_sparse(), "is sparse"),
        (torch.ones(2, dtype=torch.complex64), "has dtype complex64"),
        (torch.ones(2, device="meta"), "is a meta tensor"),
        (torch.ones(2).to(torch.float8_e4m3fn), "has dtype float8_e4m3fn"),
        (nn.LazyLinear(3).weight, "is not initialised"),
    ],
    ids=["sparse", "complex", "meta", "float8", "lazy"],
)
def test_tensors_without_plain_values_are_refused_by_name(
    tensor: torch.Tensor, problem: str
) -> None:
    with pytest.raises(CheckpointError, match=f"client: 'x' {problem}"):
        from_state_dict({"fc.weight": torch.ones(2), "x": tensor}, name="client")


def test_float8_in_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2).to(torch.float8_e5m2)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="'x' has dtype f8_e5m2"):
        open_checkpoint(tmp_path / "a.safetensors")


def test_parameters_that_require_gradients_are_fine(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    for checkpoint in (
        opened({"w": parameter}, tmp_path),
        from_state_dict({"w": parameter, "v": parameter * 2}, name="a"),
    ):
        np.testing.assert_array_equal(checkpoint.read("w"), [[1, 1], [1, 1]])
