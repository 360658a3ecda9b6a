"""`shard_size`: an output in several files, which every command takes for one model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedmerge
from tests.end_to_end.helpers import APART, Cli, listing
from tests.end_to_end.retraining import make_scene


def sharded(cli: Cli, nets: list[Path], folder: Path, *options: str) -> Path:
    """Merge into a file and into shards of the same stem; return the index of the latter."""
    folder.mkdir()
    cli.done("match", *nets, "-o", folder.parent / "whole.safetensors", *options)
    cli.done(
        "match", *nets, "-o", folder / "global.safetensors", "--set", "shard_size=1KB", *options
    )
    return folder / "global.safetensors.index.json"


@pytest.mark.parametrize("options", [(), APART], ids=["default", "apart"])
def test_shards_hold_what_one_file_would(
    options: tuple[str, ...], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    index = sharded(cli, nets, tmp_path / "out", *options)
    whole = load_file(tmp_path / "whole.safetensors")
    files = sorted(index.parent.glob("global-*-of-*.safetensors"))
    parts = [load_file(path) for path in files]
    assert len(files) > 1
    assert sum(map(len, parts)) == len(whole)
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(tensor, whole[name])
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 1000


def test_every_command_takes_the_index_for_the_model(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    index = sharded(cli, nets, tmp_path / "out", "--max-growth", "1")
    verified = cli.done("verify", index, *nets)
    assert f"recomputed from its {len(nets)} clients: equal" in verified.out
    assert "sharded safetensors" in cli.done("inspect", index).out
    again = cli.done("match", index, tmp_path / "whole.safetensors", "-o", tmp_path / "g.pt")
    assert "100 %" in again.out  # the same net twice
    replayed = tmp_path / "replayed.safetensors"
    cli.done("match", *nets, "--config", index, "-o", replayed)
    assert replayed.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    cli.done("convert", index, "-o", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    whole = load_file(tmp_path / "whole.safetensors")
    assert {name: tensor.tolist() for name, tensor in plain.items()} == {
        name: tensor.tolist() for name, tensor in whole.items()
    }


def test_a_changed_byte_in_a_shard_is_found(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    index = sharded(cli, nets, tmp_path / "out")
    cli.done("verify", index)
    for shard in sorted(index.parent.glob("global-*-of-*.safetensors")):
        content = shard.read_bytes()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        outcome = cli("verify", index)
        assert outcome.code == 1
        assert "differs from its recorded SHA-256" in outcome.err
        shard.write_bytes(content)
    cli.done("verify", index)


def test_json_names_the_index_and_the_last_line_verifies_it(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = tmp_path / "g.safetensors"
    shown = cli.done("match", *nets, "-o", output, "--set", "shard_size=2GB")
    assert shown.last_line.startswith(f"fedmerge verify {output}.index.json ")
    assert f"wrote {output}.index.json and the shards that it names" in shown.out
    again = cli.done("match", *nets, "-o", output, "--set", "shard_size=1KB", "--force", "--json")
    assert again.json["output"] == f"{output}.index.json"
    assert not (tmp_path / "g-00001-of-00001.safetensors").exists()
    assert not output.exists()
    converted = cli.done(
        "convert", nets[0], "-o", tmp_path / "c.safetensors", "--shard-size", "1KB", "--json"
    )
    assert converted.json["output"] == f"{tmp_path / 'c.safetensors'}.index.json"


@pytest.mark.parametrize(
    ("output", "size", "says"),
    [
        ("g.pt", "1GB", "writes safetensors only"),
        ("g.safetensors", "much", " is 'much'"),
        ("g.safetensors", "0", " is '0'"),
    ],
)
@pytest.mark.parametrize(
    ("command", "option"),
    [("match", ("--set", "shard_size=")), ("convert", ("--shard-size", ""))],
    ids=["match", "convert"],
)
def test_what_can_not_be_sharded_is_refused_before_any_work(
    command: str,
    option: tuple[str, str],
    output: str,
    size: str,
    says: str,
    nets: list[Path],
    tmp_path: Path,
    cli: Cli,
) -> None:
    before = listing(tmp_path)
    sources = nets if command == "match" else nets[:1]
    outcome = cli(command, *sources, "-o", tmp_path / output, option[0], option[1] + size)
    assert outcome.code == 2
    assert says in outcome.err
    assert listing(tmp_path) == before


def test_an_earlier_output_of_either_kind_needs_force(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = tmp_path / "g.safetensors"
    cli.done("match", *nets, "-o", output)
    outcome = cli("match", *nets, "-o", output, "--set", "shard_size=1KB")
    assert (outcome.code, "g.safetensors: exists already" in outcome.err) == (2, True)
    cli.done("match", *nets, "-o", output, "--set", "shard_size=1KB", "--force")
    outcome = cli("match", *nets, "-o", output, "--set", "shard_size=1GB")
    assert (outcome.code, "g.safetensors.index.json: exists already" in outcome.err) == (2, True)


def test_the_index_may_not_be_overwritten_by_a_merge_of_itself(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    index = sharded(cli, nets, tmp_path / "out", "--max-growth", "1")
    output = tmp_path / "out" / "global.safetensors"
    outcome = cli("match", index, nets[0], "-o", output, "--set", "shard_size=1KB", "--force")
    assert outcome.code == 2
    assert "the output is also an input" in outcome.err


def test_the_api_writes_shards_and_loads_them(nets: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "g.safetensors"
    merge = fedmerge.match(nets, output=output, shard_size="1KB")
    index = tmp_path / "g.safetensors.index.json"
    assert fedmerge.verify(index, nets).ok
    assert merge.write(tmp_path / "h.safetensors", shard_size=500) == tmp_path / (
        "h.safetensors.index.json"
    )
    with pytest.raises(fedmerge.UsageError, match="`shard_size` is 'x'"):
        merge.write(tmp_path / "i.safetensors", shard_size="x")
    assert merge.write(tmp_path / "i.safetensors") == tmp_path / "i.safetensors"
    converted = fedmerge.convert(index, tmp_path / "c.safetensors", shard_size=700)
    assert list(converted.tensors) == list(merge.tensors)


def test_a_retrained_model_is_written_in_shards_too(tmp_path: Path, cli: Cli) -> None:
    scene = make_scene(tmp_path)
    cli.done(*scene.command("whole.safetensors"))
    command = scene.command("g.safetensors", "--set", "shard_size=100B")
    shown = cli.done(*command)
    index = tmp_path / "g.safetensors.index.json"
    assert shown.last_line == f"fedmerge verify {index}"
    assert f"wrote {index} and the shards that it names" in shown.out
    parts = [load_file(path) for path in sorted(tmp_path.glob("g-*-of-*.safetensors"))]
    whole = load_file(tmp_path / "whole.safetensors")
    assert len(parts) > 1
    found = {name: tensor.tolist() for part in parts for name, tensor in part.items()}
    assert found == {name: tensor.tolist() for name, tensor in whole.items()}
    cli.done("verify", index)
    cli.done(*command, "--resume")  # its own output is no overwrite
    refused = cli.refused(*command, "--work-dir", tmp_path / "other", code=2)
    assert f"{index}: exists already" in refused.err
    cli.done(*scene.command("next.pt", clients=[index]))
    pt = scene.command("g.pt", "--set", "shard_size=1KB")
    cli.refused(*pt, code=2, says=["--set shard_size writes safetensors only"])
