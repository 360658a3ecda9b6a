"""A merge as a folder: which files are in it, and what is said of those that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fedmerge
from fedmerge import UsageError
from fedmerge.checkpoint import ModelFolder
from fedmerge.report import merged_folders
from tests.hugging_face_zoo import FAMILIES, configured, nudged, outputs, saved, shuffled

TOGETHER = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"model_max_length": 32}',
    "generation_config.json": '{"eos_token_id": 2}',
    "additional_chat_templates/short.jinja": "{{ messages }}",
}
ALONE = {  # what belongs to a training run, or is code
    "optimizer.pt": "", "trainer_state.json": "{}", "training_args.bin": "", "README.md": "mine",
    "modeling.py": "raise SystemExit", ".git/config": "", "events.out.tfevents.1": "",
}  # fmt: skip

PROCESSOR = "preprocessor_config.json"
FITTED: dict[str, Any] = {"merge_units": "fit-in-place", "probe_count": 64}


@pytest.fixture
def clients(tmp_path: Path) -> list[Path]:
    one = saved(FAMILIES["GPT-2"], tmp_path / "one", seed=1)
    folders = [one, shuffled(one, tmp_path / "other", seed=2)]
    for folder in folders:
        for name, text in {**TOGETHER, **ALONE}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    return folders


def files_in(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


def test_a_merged_folder_has_what_belongs_to_the_model(clients: list[Path], tmp_path: Path) -> None:
    before = {path: path.read_bytes() for c in clients for path in c.rglob("*") if path.is_file()}
    merge = fedmerge.match(clients, output=tmp_path / "merged", probe="none", max_growth=1)
    written = {"config.json", "model.safetensors", "README.md", *TOGETHER}
    assert files_in(tmp_path / "merged") == written
    for name, text in TOGETHER.items():
        assert (tmp_path / "merged" / name).read_text() == text
    assert not any("folders differ" in warning for warning in merge.warnings)
    same = json.loads((clients[0] / "config.json").read_text())
    assert json.loads((tmp_path / "merged/config.json").read_text()) == same
    assert {path: path.read_bytes() for path in before} == before


def test_files_that_differ_are_the_first_client_s_with_a_warning(
    clients: list[Path], tmp_path: Path
) -> None:
    (clients[1] / "tokenizer.json").write_text('{"other": 1}')
    (clients[1] / "tokenizer_config.json").unlink()
    merge = fedmerge.match(clients, output=tmp_path / "merged", probe="none", max_growth=1)
    [warning] = [warning for warning in merge.warnings if "folders differ" in warning]
    assert warning == (
        "the clients' folders differ in tokenizer.json, tokenizer_config.json; "
        "the first one's is taken"
    )
    assert (tmp_path / "merged/tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("family", "field", "values"),
    [("ViT", "image_mean", ([0.5] * 3, [0.4] * 3)), ("Whisper", "hop_length", (160, 80))],
)
def test_processors_go_along(
    family: str, field: str, values: tuple[object, object], tmp_path: Path
) -> None:
    """How pictures and sounds become inputs is the first client's, told where others differ."""
    one = saved(FAMILIES[family], tmp_path / "one", seed=1)
    other = nudged(one, tmp_path / "other", seed=2)
    for folder, value in zip((one, other), values, strict=True):
        (folder / PROCESSOR).write_text(json.dumps({field: value}))
    merge = fedmerge.match([one, other], output=tmp_path / "merged", method="average")
    assert (tmp_path / "merged" / PROCESSOR).read_bytes() == (one / PROCESSOR).read_bytes()
    differ = f"the clients' folders differ in {PROCESSOR}; the first one's is taken"
    assert differ in merge.warnings
    (other / PROCESSOR).write_bytes((one / PROCESSOR).read_bytes())
    again = fedmerge.match([one, other], output=tmp_path / "again", method="average")
    assert (tmp_path / "again" / PROCESSOR).is_file()
    assert differ not in again.warnings


@pytest.mark.parametrize(
    ("has_base", "options", "way"),
    [
        (False, {"probe": "none", "max_growth": 1}, "matches their hidden units before it merges"),
        (False, {"method": "average"}, "averages them element by element"),
        (True, {"method": "average"}, "adds 1 × their mean change to base"),
        (True, {"method": "average", "scale": 0.5}, "adds 0.5 × their mean change to base"),
        (False, FITTED, "fits every layer to their mean outputs, each unit where it is"),
        (True, FITTED, "fits every layer to their mean outputs, each unit where it is"),
    ],
)
def test_a_card_says_what_was_done(
    has_base: bool, options: dict[str, Any], way: str, tmp_path: Path
) -> None:
    base = saved(FAMILIES["GPT-2"], tmp_path / "base", seed=1)
    copies = shuffled if options.get("probe") == "none" else nudged
    clients = [copies(base, tmp_path / name, seed=k) for k, name in enumerate("ab", 2)]
    given: dict[str, Any] = {**options, **({"base": base} if has_base else {})}
    fedmerge.match(clients, output=tmp_path / "merged", **given)
    card = (tmp_path / "merged/README.md").read_text()
    assert f"by fedmerge {fedmerge.__version__}, which {way}" in card
    assert ("--base base" in card) == has_base
    assert "| matched |\n|---|---|---|---|\n\n" not in card  # no table of nothing


def test_an_average_of_what_shares_a_start_is_called_one(tmp_path: Path) -> None:
    base = saved(FAMILIES["GPT-2"], tmp_path / "base", seed=1)
    clients = [nudged(base, tmp_path / name, seed=k) for k, name in enumerate("ab", 2)]
    fedmerge.match(clients, output=tmp_path / "merged", probe="none")
    assert "which averages them element by element" in (tmp_path / "merged/README.md").read_text()


def test_files_that_a_folder_only_links_to_are_not_passed_on(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "1", tmp_path / "hub" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("of this machine")
    (blobs / "a").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to(blobs / "a")
    (snapshot / "vocab.txt").write_text("a")
    (snapshot / "special_tokens_map.json").symlink_to(tmp_path / "secret")
    assert list(ModelFolder(snapshot, {}).companions) == ["tokenizer.json", "vocab.txt"]


def test_large_weights_become_shards_that_the_library_loads(
    clients: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {"input_ids": configured(clients[0]).example_inputs()[0]}
    monkeypatch.setattr(merged_folders, "LARGEST_FILE", 10_000)
    fedmerge.match(clients, output=tmp_path / "merged", probe="none", max_growth=1)
    shards = sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors"))
    assert len(shards) > 1
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    expected = outputs(clients[0], inputs)
    assert torch.allclose(outputs(tmp_path / "merged", inputs), expected, atol=1e-5)
    assert fedmerge.verify(tmp_path / "merged", clients).ok
    by_hand = tmp_path / "by-hand"
    fedmerge.match(clients, output=by_hand, probe="none", max_growth=1, shard_size="1GB")
    assert (by_hand / "model.safetensors").exists()


def test_a_folder_is_written_once(clients: list[Path], tmp_path: Path) -> None:
    merged = tmp_path / "merged"
    fedmerge.match(clients, output=merged, method="average")
    with pytest.raises(UsageError, match="exists already"):
        fedmerge.match(clients, output=merged, method="average")
    fedmerge.match(clients, output=merged, method="average", force=True)
    with pytest.raises(UsageError, match="the output is also an input"):
        fedmerge.match(clients, output=clients[1], method="average", force=True)


def test_a_changed_weight_is_noticed(clients: list[Path], tmp_path: Path) -> None:
    from safetensors import safe_open

    merged = tmp_path / "merged"
    fedmerge.match(clients, output=merged, probe="none", max_growth=1)
    assert fedmerge.verify(merged, clients).ok
    with safe_open(merged / "model.safetensors", "pt") as file:
        metadata = file.metadata()
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state["transformer.ln_f.bias"] += 1
    save_file(state, merged / "model.safetensors", metadata)
    [difference] = fedmerge.verify(merged).differences
    assert "'transformer.ln_f.bias' differs" in difference


def test_only_clients_that_are_folders_become_one(tmp_path: Path) -> None:
    for seed, name in enumerate(("a.pt", "b.pt")):
        torch.manual_seed(seed)
        torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / name)
    with pytest.raises(UsageError, match="cannot write a file of this kind"):
        fedmerge.match([tmp_path / "a.pt", tmp_path / "b.pt"], output=tmp_path / "merged")


def test_folders_may_become_a_file(clients: list[Path], tmp_path: Path) -> None:
    merge = fedmerge.match(clients, output=tmp_path / "m.safetensors", probe="none", max_growth=2)
    assert (tmp_path / "m.safetensors").is_file()
    config = merge.session.config
    assert config is not None  # it grows as a folder would, so that it can become one
    assert [said.name for said in config.said] == ["n_inner"]
