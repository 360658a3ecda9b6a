"""Models of transformers from a config.json: what is built, what is refused, what is never run."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedmerge
from fedmerge import ArchitectureError, ProbeOptions
from fedmerge.architecture.from_library import transformers_models
from fedmerge.probes import ProbedClients
from tests.hugging_face_zoo import FAMILIES, TOKENS, configured, loaded, outputs, saved, shuffled


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return saved(FAMILIES["BERT"], tmp_path / "bert", seed=1)


def changed(folder: Path, **fields: Any) -> Path:
    """Change fields of a folder's config.json."""
    place = folder / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **fields}))
    return folder


REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "quantised weights": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "the weights are quantised",
    ),
    "an unknown family": ({"model_type": "mystery"}, "knows no family 'mystery'"),
    "an unknown class": ({"architectures": ["Mystery"]}, "has no model 'Mystery'"),
    "a class that is no model": ({"architectures": ["Trainer"]}, "has no model 'Trainer'"),
    "a path as a class": ({"architectures": ["os.system"]}, "has no model 'os.system'"),
    "endless layers": ({"num_hidden_layers": 10**9}, "says 1,000,000,000 layers"),
    "endless width": ({"vocab_size": 10**11}, "describes a model of"),
    "other widths than the file's": ({"intermediate_size": 48}, "has another shape of"),
    "more layers than the file's": ({"num_hidden_layers": 3}, "has no 'bert.encoder.layer.2"),
    "what does not go together": ({"num_attention_heads": 3}, "can't build the model"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_configuration_is_refused_with(what: str, bert: Path) -> None:
    fields, problem = REFUSED[what]
    fedmerge.plan(bert)  # as it was, it is planned
    with pytest.raises(ArchitectureError, match=problem):
        fedmerge.plan(changed(bert, **fields))


def test_endless_inputs_are_refused(tmp_path: Path) -> None:
    folder = saved(FAMILIES["ResNet"], tmp_path / "resnet", seed=1)
    fedmerge.plan(folder)
    with pytest.raises(ArchitectureError, match="asks for inputs of 60,000,000,000 numbers"):
        fedmerge.plan(changed(folder, image_size=10**5))


def test_code_of_a_folder_is_refused_and_never_run(bert: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (bert / "modeling.py").write_text(f"open({str(ran)!r}, 'w')")
    changed(bert, auto_map={"AutoModelForMaskedLM": "modeling.Mine"})
    with pytest.raises(ArchitectureError, match="asks for code of its own") as caught:
        fedmerge.plan(bert)
    assert "`model`" in caught.value.hint
    assert not ran.exists()


def test_given_code_wins_over_the_folder_s_and_such_a_folder_keeps_its_widths(
    tmp_path: Path,
) -> None:
    built: list[int] = []

    def build() -> nn.Module:
        built.append(1)
        return Mine()

    folders = [tmp_path / "one", tmp_path / "other"]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        folder.mkdir()
        save_file(Mine().state_dict(), folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text("{}")
        (folder / "modeling.py").write_text("raise SystemExit")
        changed(folder, model_type="mine", auto_map={"AutoModel": "modeling.Mine"})
    options: dict[str, Any] = {"probe": "none", "match_threshold": 1, "max_growth": "none"}
    merge = fedmerge.match(folders, model=build, output=tmp_path / "merged", **options)
    assert built
    assert merge.growth == 1
    assert (tmp_path / "merged/modeling.py").read_text() == "raise SystemExit"
    alone = fedmerge.match(folders, model=build, output=tmp_path / "merged.safetensors", **options)
    assert alone.growth > 1.5  # a file need not be said by any config.json


class Mine(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def test_where_the_library_is_missing_it_is_named(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_models, "find_spec", lambda name: None)
    with pytest.raises(ArchitectureError, match="a model of transformers, which is not") as caught:
        fedmerge.plan(bert)
    assert caught.value.hint.startswith("pip install 'fedmerge[hf]'")


def test_nothing_is_fetched(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("a connection was tried")

    other = shuffled(bert, tmp_path / "other", seed=1)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    changed(bert, _attn_implementation="kernels-community/flash-attn", _name_or_path="a/b")
    fedmerge.match([bert, other], output=tmp_path / "merged", probe="none")
    constants = import_module("huggingface_hub.constants")
    assert constants.HF_HUB_OFFLINE is False  # afterwards, users may


def test_experts_that_the_loader_joins_are_refused(tmp_path: Path) -> None:
    library = import_module("transformers")
    config = library.MixtralConfig(**{**FAMILIES["Mistral"].settings, "num_local_experts": 2})
    library.MixtralForCausalLM(config).save_pretrained(tmp_path / "experts")
    with pytest.raises(ArchitectureError, match="of several tensors of the file"):
        fedmerge.plan(tmp_path / "experts")


def _without_prefix(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("transformer."): tensor for name, tensor in state.items()}


def _with_masks(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mask = torch.tril(torch.ones(1, 1, 32, 32))
    return {**state, "transformer.h.0.attn.bias": mask, "transformer.h.1.attn.bias": mask.clone()}


@pytest.mark.parametrize("written", [_without_prefix, _with_masks])
def test_files_of_older_versions_are_read_as_the_library_reads_them(
    written: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    one = saved(FAMILIES["GPT-2"], tmp_path / "one", seed=1)
    other = shuffled(one, tmp_path / "other", seed=2)
    inputs = {"input_ids": configured(one).example_inputs()[0]}
    expected = outputs(one, inputs)
    for folder in (one, other):
        state = written(load_file(folder / "model.safetensors"))
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    fedmerge.match([one, other], output=tmp_path / "merged", max_growth=1, probe="none")
    assert torch.allclose(outputs(tmp_path / "merged", inputs), expected, atol=1e-5)
    names = set(load_file(tmp_path / "merged/model.safetensors"))
    assert names == set(load_file(one / "model.safetensors"))
    assert fedmerge.verify(tmp_path / "merged", [one, other]).ok


@pytest.mark.parametrize("is_first", [True, False])
def test_folders_of_several_versions_are_merged_by_what_the_library_calls_their_tensors(
    is_first: bool, tmp_path: Path
) -> None:
    one = saved(FAMILIES["GPT-2"], tmp_path / "one", seed=1)
    other = shuffled(one, tmp_path / "other", seed=2)
    inputs = {"input_ids": configured(one).example_inputs()[0]}
    expected = outputs(one, inputs)
    state = _without_prefix(load_file(other / "model.safetensors"))
    save_file(state, other / "model.safetensors", {"format": "pt"})
    clients = [one, other] if is_first else [other, one]
    fedmerge.match(clients, output=tmp_path / "merged", max_growth=1, probe="none")
    assert torch.allclose(outputs(tmp_path / "merged", inputs), expected, atol=1e-5)
    names = set(load_file(tmp_path / "merged/model.safetensors"))
    assert names == set(load_file(clients[0] / "model.safetensors"))
    assert fedmerge.verify(tmp_path / "merged", clients[::-1]).ok


def test_a_pickled_file_holds_a_tied_tensor_under_all_of_its_names(tmp_path: Path) -> None:
    one = saved(FAMILIES["GPT-2"], tmp_path / "one", seed=1)
    other = shuffled(one, tmp_path / "other", seed=2)
    inputs = {"input_ids": configured(one).example_inputs()[0]}
    expected = outputs(one, inputs)
    for folder in (one, other):
        state = load_file(folder / "model.safetensors")
        state["lm_head.weight"] = state["transformer.wte.weight"]
        torch.save(state, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    fedmerge.match([one, other], output=tmp_path / "merged", max_growth=1, probe="none")
    assert torch.allclose(outputs(tmp_path / "merged", inputs), expected, atol=1e-5)


def test_a_file_with_a_tied_tensor_twice_is_refused(tmp_path: Path) -> None:
    folder = saved(FAMILIES["GPT-2"], tmp_path / "one", seed=1)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArchitectureError, match=r"holds 'lm_head.weight', which config.json ties"):
        fedmerge.plan(folder)


class Tied(nn.Module):
    """A model of the user's own with tied weights, of which a file has one name only."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 5)
        self.mid = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(torch.relu(self.mid(self.emb(tokens))))
        return result


@pytest.mark.parametrize("kept", ["emb.weight", "head.weight"])
def test_a_file_may_lack_further_names_of_tied_tensors(kept: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    state = {n: t for n, t in model.state_dict().items() if n.startswith("mid.") or n == kept}
    merge = fedmerge.match([state, state], model=Tied, probe="none", max_growth=1)
    assert torch.allclose(merge.state_dict()[kept], model.emb.weight)
    tokens = torch.arange(7)[None]
    assert torch.allclose(merge.to_module().eval()(tokens), model(tokens), atol=1e-6)
    lacking = {name: tensor for name, tensor in state.items() if name != kept}
    with pytest.raises(ArchitectureError, match="has no tensor"):
        fedmerge.match([lacking, lacking], model=Tied, probe="none")


def test_tokens_of_probes_are_the_vocabulary_s_and_not_positions(tmp_path: Path) -> None:
    model = configured(saved(FAMILIES["Whisper"], tmp_path / "whisper", seed=1))
    first = next(part for part in model.modules() if isinstance(part, nn.Embedding))
    clients = ProbedClients([model], model.example_inputs(), ProbeOptions(), seed=0, device="cpu")
    assert clients.tokens == TOKENS != first.num_embeddings


def test_a_module_of_a_merge_takes_the_library_s_keywords(bert: Path) -> None:
    module: Any = fedmerge.match([bert, bert], probe="none").to_module()
    tokens = configured(bert).example_inputs()[0]
    found = module.eval()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    expected = loaded(bert)(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert torch.allclose(found.logits, expected.logits, atol=1e-5)
    assert type(module).__name__ == "BertForMaskedLM"
