"""Folders that transformers saved: merged as folders, loaded by the library alone."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import fedmerge
from fedmerge.architecture.from_library import names_of_inputs
from tests.end_to_end.helpers import Cli
from tests.hugging_face_zoo import (
    FAMILIES,
    Family,
    configured,
    loaded,
    nudged,
    outputs,
    saved,
    shuffled,
)

EQUAL = 1e-5  # absolute, of outputs around 1 in single precision
SLOW = ("RoBERTa", "DistilBERT", "Llama, untied", "Qwen 3", "Mistral", "BART", "ConvNeXt")


def families(*, slow: bool = True) -> list[Any]:
    marks = {name: [pytest.mark.slow] if name in SLOW and slow else [] for name in FAMILIES}
    return [pytest.param(name, marks=marks[name], id=name) for name in FAMILIES]


def inputs_of(folder: Path) -> dict[str, Tensor]:
    """Return inputs by the names of forward's arguments."""
    model = configured(folder)
    inputs = model.example_inputs()
    return dict(zip(names_of_inputs(model, len(inputs)), inputs, strict=True))


def difference(one: Path, other: Path, inputs: Mapping[str, Tensor]) -> float:
    """Return the largest difference between the outputs of two folders' models."""
    found, expected = outputs(one, inputs), outputs(other, inputs)
    assert found.isfinite().all()
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("name", families())
def test_shuffled_copies_merge_back_to_the_function(name: str, tmp_path: Path) -> None:
    one = saved(FAMILIES[name], tmp_path / "one", seed=1)
    other = shuffled(one, tmp_path / "other", seed=2)
    inputs = inputs_of(one)
    assert difference(one, other, inputs) < EQUAL  # it is the same function in another order
    fedmerge.match([one, other], output=tmp_path / "merged", max_growth=1, probe="none")
    assert difference(one, tmp_path / "merged", inputs) < EQUAL
    fedmerge.match([one, other], output=tmp_path / "average", method="average")
    assert difference(one, tmp_path / "average", inputs) > 1000 * EQUAL  # so order counts


@pytest.mark.parametrize("name", families())
def test_independent_models_grow_as_their_config_can_say(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    one, other = (saved(family, tmp_path / f"client-{k}", seed=k) for k in (1, 2))
    merge = fedmerge.match(
        [one, other], output=tmp_path / "grown", max_growth="none", match_threshold=1, probe="none"
    )
    config = merge.session.config
    assert config is not None
    said = {s.name: (s.width, merge.widths[s.groups[0]]) for s in config.said}
    grown = {name for name, (before, after) in said.items() if after == 2 * before}
    assert grown == family.says
    assert all(after == before for name, (before, after) in said.items() if name not in grown)
    for group in merge.groups:  # and nothing that no field says
        is_said = any(group.name in own.groups for own in config.said if own.name in grown)
        assert (group.width > max(group.client_widths)) == is_said
    inputs = inputs_of(one)
    built = outputs(tmp_path / "grown", inputs)  # from the new config.json
    resized = merge.to_module().eval()(**inputs).logits  # from the old one, brought to the widths
    assert (built - resized).abs().max() < EQUAL
    assert fedmerge.verify(tmp_path / "grown", [one, other]).ok


@pytest.mark.parametrize("name", families())
def test_a_shared_start_is_recognised(name: str, tmp_path: Path) -> None:
    base = saved(FAMILIES[name], tmp_path / "base", seed=1)
    tuned = [nudged(base, tmp_path / f"tuned-{k}", seed=k) for k in (2, 3)]
    assert fedmerge.match(tuned, probe="none").shares_start
    stranger = saved(FAMILIES[name], tmp_path / "stranger", seed=4)
    assert not fedmerge.match([base, stranger], probe="none").shares_start


@pytest.mark.parametrize("name", ["BERT", "T5"])
def test_what_clients_do_is_compared_by_default(name: str, tmp_path: Path, cli: Cli) -> None:
    one, other = (saved(FAMILIES[name], tmp_path / f"client-{k}", seed=k) for k in (1, 2))
    merged = tmp_path / "merged"
    fast = ("--set", "probe_count=64", "--effort", "fast", "--json")
    found = json.loads(cli.done("match", one, other, "-o", merged, *fast).out)
    assert found["quality"]["samples"] > 0
    assert found["growth"] > 1
    inputs = inputs_of(one)
    assert outputs(merged, inputs).isfinite().all()
    is_led = "client-1" in found["quality"]["chosen"]  # whose own outputs may be all there is
    assert is_led or difference(one, merged, inputs) > 1000 * EQUAL


def test_the_last_line_uploads_and_the_one_before_verifies(tmp_path: Path, cli: Cli) -> None:
    one = saved(FAMILIES["BERT"], tmp_path / "one", seed=1)
    other = shuffled(one, tmp_path / "other", seed=2)
    merged = tmp_path / "merged"
    told = cli.done("match", one, other, "-o", merged, "--set", "probe=none").out.splitlines()
    assert told[-1] == f"upload it with: hf upload YOUR-NAME/merged {merged}"
    assert told[-2] == f"fedmerge verify {merged} {one} {other}"
    checked = cli.done("verify", merged, one, other).out
    assert "recomputed from its 2 clients: equal" in checked
    assert "can't grow (no field of config.json says its width)" in "\n".join(told)


def test_a_card_tells_what_was_merged_and_its_command_does_it_again(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(FAMILIES["GPT-2"], Path("one"), seed=1)
    saved(FAMILIES["GPT-2"], Path("other"), seed=2)
    merge = fedmerge.match(["one", "other"], output="merged", probe="none", max_growth=1.2)
    card = Path("merged/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- merge\n- fedmerge\n---\n")
    assert all(source.sha256 in card for source in merge.sources)
    [command] = [line[2:] for line in card.splitlines() if line.startswith("$ ")]
    cli.done(*command.split()[1:])
    assert _bytes("merged") == _bytes("merged-again")


def test_the_command_on_a_card_has_the_base(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = saved(FAMILIES["GPT-2"], Path("base"), seed=1)
    clients = [nudged(base, Path(name), seed=k) for k, name in enumerate(("one", "other"), 2)]
    cli.done("match", *clients, "--base", base, "--set", "scale=0.5", "-o", "merged")
    [command] = re.findall(r"^\$ fedmerge (.*)$", Path("merged/README.md").read_text(), re.M)
    cli.done(*command.split())
    assert _bytes("merged") == _bytes("merged-again")
    cli.done("match", *clients, "--base", base, "-o", "whole")
    assert _bytes("merged") != _bytes("whole")


def _bytes(folder: str) -> bytes:
    return (Path(folder) / "model.safetensors").read_bytes()


def test_clients_of_other_widths_merge_into_one_config(tmp_path: Path) -> None:
    family = FAMILIES["ViT"]
    narrow: Family = replace(family, settings={**family.settings, "intermediate_size": 20})
    one = saved(narrow, tmp_path / "one", seed=1)
    other = saved(family, tmp_path / "other", seed=2)
    fedmerge.match([one, other], output=tmp_path / "merged", max_growth=1, probe="none")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["intermediate_size"] == 24
    assert outputs(tmp_path / "merged", inputs_of(one)).isfinite().all()


def test_an_ensemble_of_folders_becomes_a_program(tmp_path: Path, cli: Cli) -> None:
    one, other = (saved(FAMILIES["ViT"], tmp_path / f"client-{k}", seed=k) for k in (1, 2))
    program = tmp_path / "both.pt2"
    cli.done("match", one, other, "--method", "ensemble", "-o", program)
    inputs = inputs_of(one)
    wanted = (outputs(one, inputs) + outputs(other, inputs)) / 2
    found = torch.export.load(program).module()(*inputs.values())
    assert torch.allclose(found, wanted, atol=EQUAL)


def test_half_precision_stays_half(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for seed, folder in enumerate(folders):
        saved(FAMILIES["Llama, tied"], folder, seed=seed)
        _halve(folder)
    fedmerge.match(folders, output=tmp_path / "merged", probe="none", dtype="float32")
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "float32"
    merge = fedmerge.match(folders, output=tmp_path / "half", probe="none")
    assert {info.dtype for info in merge.tensors.values()} == {"float16"}
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "float16"


def _halve(folder: Path, dtype: torch.dtype = torch.float16) -> None:
    loaded(folder).to(dtype).save_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_merged_by_default_and_loads(
    dtype: torch.dtype, tmp_path: Path, cli: Cli
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for seed, folder in enumerate(folders):
        saved(FAMILIES["Llama, tied"], folder, seed=seed)
        _halve(folder, dtype)
    merged = tmp_path / "merged"
    done = cli.done("match", *folders, "-o", merged, "--set", "probe_count=64", "--json").json
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert {tensor.dtype for tensor in model.parameters()} == {dtype}
    assert sum(tensor.numel() for tensor in model.parameters()) == done["parameters"]
    assert all(tensor.isfinite().all() for tensor in model.parameters())
    assert done["quality"]["samples"] > 0


def resaved(family: str, folder: Path, **settings: Any) -> Path:
    """Save a family's model of other settings, and return its folder."""
    own = FAMILIES[family]
    return saved(replace(own, settings={**own.settings, **settings}), folder, seed=3)


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("BERT", {"vocab_size": 50}, "their config.json say vocab_size 41 and 50"),
        ("Llama, untied", {"tie_word_embeddings": True}, "tie_word_embeddings False and True"),
    ],
    ids=["vocabulary", "tied"],
)
def test_configs_that_do_not_fit_are_told(
    tmp_path: Path, cli: Cli, family: str, settings: dict[str, Any], says: str
) -> None:
    one = saved(FAMILIES[family], tmp_path / "one", seed=1)
    other = resaved(family, tmp_path / "other", **settings)
    out = tmp_path / "merged"
    cli.refused("match", one, other, "-o", out, "--set", "probe=none", code=3, says=[says])
    assert not out.exists()


def test_folders_of_the_hubs_cache_are_called_by_their_models(tmp_path: Path, cli: Cli) -> None:
    folders = []
    for seed, name in enumerate(("one", "two")):
        saved(FAMILIES["BERT"], tmp_path / "plain" / name, seed=seed)
        cache = tmp_path / f"models--me--{name}"
        snapshot = cache / "snapshots" / "0123abcd"
        snapshot.mkdir(parents=True)
        (cache / "blobs").mkdir()
        for file in (tmp_path / "plain" / name).iterdir():
            blob = cache / "blobs" / f"{name}-{file.name}"
            file.rename(blob)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
        folders.append(snapshot)
    out = tmp_path / "merged"
    done = cli.done("match", *folders, "-o", out, "--set", "probe=none", "--max-growth", "1")
    assert "2 clients (one, two)" in done.out
    assert not any(file.is_symlink() for file in out.iterdir())
    assert "recomputed from its 2 clients: equal" in cli.done("verify", out, *folders).out


def test_inspect_says_what_folders_are_merged_by(tmp_path: Path, cli: Cli) -> None:
    folder = saved(FAMILIES["BERT"], tmp_path / "a folder", seed=1)
    told = cli.done("inspect", folder).out
    assert "not mergeable from names alone" in told
    assert f"which merges go by: fedmerge plan '{folder}'" in told


def test_a_hub_folder_may_be_the_base(tmp_path: Path, cli: Cli) -> None:
    base = saved(FAMILIES["Llama, tied"], tmp_path / "base", seed=1)
    one, two = (nudged(base, tmp_path / name, seed=k) for k, name in enumerate(("one", "two")))
    out = tmp_path / "merged"
    done = cli.done("match", one, two, "--base", base, "-o", out, "--json").json
    assert done["base"]["missing"] == []
    assert done["quality"]["chosen"] == "base + 1 × mean change"
    inputs = inputs_of(one)
    assert outputs(out, inputs).isfinite().all()
    checked = cli.done("verify", out, one, two, "--base", base)
    assert "agree with the record" in checked.out
    other = saved(FAMILIES["Llama, tied"], tmp_path / "other", seed=9)
    cli.refused(
        *("match", one, two, "--base", other, "-o", tmp_path / "no"),
        code=3,
        says=["one is no fine-tune of other"],
    )


def test_experts_are_averaged_but_not_matched(tmp_path: Path, cli: Cli) -> None:
    settings = {"num_local_experts": 2, "hidden_size": 16, "intermediate_size": 24}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    family = Family("MixtralForCausalLM", "MixtralConfig", {**settings, "vocab_size": 41}, ())
    base = saved(family, tmp_path / "base", seed=1)
    one, two = (nudged(base, tmp_path / name, seed=k) for k, name in enumerate(("one", "two")))
    out = tmp_path / "merged"
    says = ["of several tensors of the file", "--method average"]
    cli.refused("match", one, two, "-o", out, code=3, says=says)
    cli.done("match", one, two, "--base", base, "--method", "average", "-o", out)
    tokens = {"input_ids": torch.arange(12).reshape(2, 6)}
    found, start = outputs(out, tokens), outputs(base, tokens)
    assert 0 < (found - start).abs().max() < (outputs(one, tokens) - start).abs().max()
