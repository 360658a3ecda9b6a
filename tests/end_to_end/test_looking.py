"""`inspect`, `plan`, `convert` and `--dry-run`: looking before merging."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end.helpers import APART, Cli, independent, listing, load, save, save_all
from tests.end_to_end.malice import Payload, save_zip
from tests.zoo import ZOO

# inspect


def test_inspect_shows_container_place_tensors_and_layers(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    state = {f"model.{name}": tensor for name, tensor in load(nets[0]).items()}
    torch.save({"epoch": 1, "state_dict": state, "optimizer_states": [{}]}, tmp_path / "x.ckpt")
    out = cli.done("inspect", tmp_path / "x.ckpt").out
    for phrase in ("x.ckpt", "torch zip", "'state_dict'", "8 tensors", "591 parameters", "lenet"):
        assert phrase in out
    row = next(line.split() for line in out.splitlines() if "conv2.weight" in line)
    assert row == ["conv2.weight", "6×5×3×3", "float64", "conv"]


def test_inspect_as_json_tells_the_same(nets: list[Path], cli: Cli) -> None:
    (file,) = cli.done("inspect", nets[0], "--json").json["files"]
    assert file["container"] == "torch zip"
    assert file["architecture"] == "lenet"
    assert file["tensors"]["fc1.weight"] == {"shape": [9, 24], "dtype": "float64"}
    assert file["layers"] == {"conv1": "conv", "conv2": "conv", "fc1": "linear", "fc2": "linear"}
    assert (file["difference"], file["not_mergeable"], file["location"]) == (None, None, "")


def test_inspect_says_that_equal_files_agree(nets: list[Path], cli: Cli) -> None:
    assert "the 3 files have the same names, shapes and dtypes" in cli.done("inspect", *nets).out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"conv2.weight": torch.ones(6, 5, 5, 5)}, ["'conv2.weight'", "6×5×5×5", "6×5×3×3"]),
        ({"fc2.bias": torch.ones(4).half()}, ["'fc2.bias'", "float16", "float64"]),
        ({"fc9.bias": torch.ones(4)}, ["'fc9.bias'", "extra tensor"]),
    ],
    ids=["shape", "dtype", "name"],
)
def test_inspect_shows_the_first_difference(
    change: dict[str, torch.Tensor], says: list[str], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    other = save({**load(nets[1]), **change}, tmp_path / "other.pt")
    out = cli.done("inspect", nets[0], other).out
    line = next(line for line in out.splitlines() if "difference" in line)
    assert "other.pt" in line
    for phrase in says:
        assert phrase in line
    assert "same names" not in out


def test_inspect_shows_all_files_also_where_one_is_refused(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "empty.pt").write_bytes(b"")
    save_zip(Payload(tmp_path / "ran"), tmp_path / "evil.pt")
    outcome = cli("inspect", tmp_path / "empty.pt", nets[0], tmp_path / "evil.pt", nets[1])
    assert outcome.code == 1
    assert "empty.pt: refused" in outcome.out
    assert "evil.pt: refused" in outcome.out
    assert "the 2 files have the same names" in outcome.out
    assert outcome.out.count("591 parameters") == 2
    assert cli("inspect", tmp_path / "evil.pt", tmp_path / "empty.pt").code == 4
    files = cli("inspect", nets[0], tmp_path / "evil.pt", "--json").json["files"]
    assert files[1]["refused"]["exit_code"] == 4
    assert "refused" not in files[0]
    assert not (tmp_path / "ran").exists()


def test_inspect_says_why_a_net_is_not_mergeable(tmp_path: Path, cli: Cli) -> None:
    save({"layer1.0.downsample.0.weight": torch.ones(3, 3)}, tmp_path / "x.pt")
    out = cli.done("inspect", tmp_path / "x.pt").out
    assert "downsample" in out
    assert "--model" in out


def test_inspect_names_tied_tensors(tmp_path: Path, cli: Cli) -> None:
    save_all([dict(ZOO["char-lstm, tied"].fresh(1).state_dict())], tmp_path)
    assert "tied: 'decoder.weight' is 'encoder.weight'" in cli.done("inspect", tmp_path).out


# plan


def test_plan_shows_groups_widths_and_axes(nets: list[Path], cli: Cli) -> None:
    out = cli.done("plan", *nets).out
    rows = {line.split()[0]: line for line in out.splitlines()[2:]}
    assert "lenet: 3 groups" in out
    assert rows["conv2"].split()[1:3] == ["6", "yes"]
    assert "conv2.weight[0], conv2.bias[0], fc1.weight[1]" in rows["conv2"]


def test_plan_says_what_cannot_grow_and_what_stays_equally_wide(tmp_path: Path, cli: Cli) -> None:
    save_all(independent("mlp with layer norm", 1), tmp_path / "norm")
    save_all(independent("lstm, 2 layers", 1), tmp_path / "lstm")
    assert "would see the added units" in cli.done("plan", tmp_path / "norm").out
    out = cli.done("plan", tmp_path / "lstm").out
    assert "equally wide: rnn_l0, rnn_l1" in out


def test_the_written_plan_is_the_printed_one(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    printed = cli.done("plan", *nets, "--json", "-o", tmp_path / "plan.json").json
    assert json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")) == printed
    assert printed["tensors"]["fc1.weight"] == ["fc1", {"prod": ["conv2", 4]}]


@pytest.mark.parametrize(
    "name", ["lenet", "vgg with batch norm", "gru, 2 layers, both directions", "char-lstm, tied"]
)
def test_a_plan_given_back_gives_the_same_bytes(name: str, tmp_path: Path, cli: Cli) -> None:
    files = save_all(independent(name, 2), tmp_path)
    cli.done("plan", *files, "-o", tmp_path / "plan.json")
    cli.done("match", *files, "-o", tmp_path / "read.pt")
    cli.done("match", *files, "-o", tmp_path / "given.pt", "--plan", tmp_path / "plan.json")
    assert (tmp_path / "read.pt").read_bytes() == (tmp_path / "given.pt").read_bytes()
    assert (tmp_path / "read.pt.json").read_bytes() == (tmp_path / "given.pt.json").read_bytes()


def test_a_plan_by_hand_opens_what_names_alone_do_not(tmp_path: Path, cli: Cli) -> None:
    """A residual net of 5 channels: the skip ties both layers' units."""
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        shapes = {"stem": (5, 3), "block.shortcut": (5, 5), "head": (2, 5)}
        states.append({f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()})
    order = torch.tensor([3, 1, 4, 0, 2])
    states[1] = {
        "stem.weight": states[0]["stem.weight"][order],
        "block.shortcut.weight": states[0]["block.shortcut.weight"][order][:, order],
        "head.weight": states[0]["head.weight"][:, order],
    }
    files = save_all(states, tmp_path)
    plan = {
        "tensors": {
            "stem.weight": ["g", 3],
            "block.shortcut.weight": ["g", "g"],
            "head.weight": [2, "g"],
        }
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    command = ("match", *files, "-o", tmp_path / "global.pt")
    cli.refused(*command, code=3, says=["shortcut", "--plan"])
    cli.done(*command, "--plan", tmp_path / "plan.json")
    merged = load(tmp_path / "global.pt")
    assert all(torch.allclose(merged[name], states[0][name]) for name in merged)
    cli.done("verify", tmp_path / "global.pt", *files)


# convert


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_convert_writes_the_plain_state_dict(
    suffix: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    state = load(nets[0])
    content = {
        "epoch": 3,
        "state_dict": {f"module._orig_mod.{name}": tensor for name, tensor in state.items()},
        "optimizer_states": [{"state": {}, "param_groups": []}],
    }
    torch.save(content, tmp_path / "last.ckpt")
    outcome = cli.done("convert", tmp_path / "last.ckpt", "-o", tmp_path / f"plain{suffix}")
    assert "optimizer states ignored" in outcome.err
    plain = load(tmp_path / f"plain{suffix}")
    assert set(plain) == set(state)
    assert all(torch.equal(plain[name], state[name]) for name in state)
    summary = cli.done(
        "convert", tmp_path / "last.ckpt", "-o", tmp_path / f"again{suffix}", "--json"
    ).json
    assert (summary["location"], summary["tensors"]) == ("state_dict", 8)


def test_converted_safetensors_merge_as_the_originals_do(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    files = [tmp_path / f"{path.stem}.safetensors" for path in nets]
    for path, file in zip(nets, files, strict=True):
        cli.done("convert", path, "-o", file)
    cli.done("match", *nets, "-o", tmp_path / "one.pt")
    cli.done("match", *files, "-o", tmp_path / "two.pt")
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_convert_changes_floats_only_where_a_dtype_is_asked_for(tmp_path: Path, cli: Cli) -> None:
    (file,) = save_all(independent("mlp with batch norm", 1), tmp_path)
    cli.done("convert", file, "-o", tmp_path / "half.safetensors", "--dtype", "bfloat16")
    state, half = load(file), load(tmp_path / "half.safetensors")
    assert half["1.num_batches_tracked"].dtype == torch.int64
    assert torch.equal(half["0.weight"], state["0.weight"].bfloat16())
    assert {t.dtype for n, t in half.items() if "tracked" not in n} == {torch.bfloat16}


def test_convert_keeps_ties_in_torch_files(tmp_path: Path, cli: Cli) -> None:
    save_all([dict(ZOO["char-lstm, tied"].fresh(1).state_dict())], tmp_path)
    cli.done("convert", tmp_path / "a.pt", "-o", tmp_path / "plain.pt")
    plain = load(tmp_path / "plain.pt")
    assert plain["decoder.weight"].data_ptr() == plain["encoder.weight"].data_ptr()


@pytest.mark.parametrize("command", ["convert", "match"])
def test_several_state_dicts_need_a_key(
    command: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    generators = [load(path) for path in nets[:2]]
    files = []
    for number, state in enumerate(generators):
        files.append(tmp_path / f"gan-{number}.pt")
        torch.save({"nets": {"G": state, "D": {"w.weight": torch.ones(2, 2)}}}, files[-1])
    inputs = files[:1] if command == "convert" else files
    arguments = (command, *inputs, "-o", tmp_path / "out.pt")
    cli.refused(*arguments, code=1, says=["gan-0.pt", "'nets.G'", "'nets.D'", "--key"])
    cli.refused(*arguments, "--key", "nets.X", code=1, says=["'nets.X'", "'nets.G'"])
    cli.done(*arguments, "--key", "nets.G")
    cli.done(command, *nets[: len(inputs)], "-o", tmp_path / "plain.pt")
    assert (tmp_path / "out.pt").read_bytes() == (tmp_path / "plain.pt").read_bytes()
    if command == "match":
        cli.done("verify", tmp_path / "out.pt", *files)


def test_weights_chooses_the_trained_or_the_averaged_copy(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    raw, ema = load(nets[0]), load(nets[1])
    torch.save({"model": raw, "model_ema": ema}, tmp_path / "both.pt")
    torch.save({"ema": ema}, tmp_path / "ema.pt")
    chosen = {}
    for weights in ("raw", "ema"):
        output = tmp_path / f"{weights}-only.pt"
        cli.done("convert", tmp_path / "both.pt", "-o", output, "--weights", weights)
        chosen[weights] = load(output)
    assert all(torch.equal(chosen["raw"][name], raw[name]) for name in raw)
    assert all(torch.equal(chosen["ema"][name], ema[name]) for name in ema)
    command = ("match", tmp_path / "both.pt", tmp_path / "ema.pt", "-o", tmp_path / "global.pt")
    cli.refused(*command, code=1, says=["ema", "--set weights=ema"])
    cli.done(*command, "--set", "weights=ema")
    merged = load(tmp_path / "global.pt")
    assert all(torch.allclose(merged[name], ema[name], rtol=0, atol=1e-12) for name in ema)
    cli.done("verify", tmp_path / "global.pt", tmp_path / "both.pt", tmp_path / "ema.pt")


# dry run


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--max-growth", "none"),
        ("--max-growth", "1"),
        ("--max-growth", "2.5", "--set", "match_threshold=0.8"),
        APART,
        ("--method", "average"),
        ("--set", "preset=paper"),
        ("--keep", "*.bias"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("name", ["lenet", "lstm, 2 layers", "mlp with layer norm"])
def test_a_dry_run_writes_nothing_and_its_range_holds_the_result(
    name: str, options: tuple[str, ...], tmp_path: Path, cli: Cli
) -> None:
    if name == "lstm, 2 layers" and "--keep" in options:
        options = ("--keep", "fc.*")
    files = save_all(independent(name, 3), tmp_path)
    before = listing(tmp_path)
    command = ("match", *files, "-o", tmp_path / "global.pt", *options)
    prediction = cli.done(*command, "--dry-run", "--json").json
    assert listing(tmp_path) == before
    summary = cli.done(*command, "--json").json
    size = sum(t.numel() for t in load(tmp_path / "global.pt").values() if t.is_floating_point())
    assert summary["parameters"] == size
    assert prediction["fewest_parameters"] <= size <= prediction["most_parameters"]
    ranges = {group["name"]: group for group in prediction["groups"]}
    for group in summary["groups"]:
        expected = ranges[group["name"]]
        assert expected["narrowest"] <= group["width"] <= expected["widest"]
    assert prediction["read"] == sum(path.stat().st_size for path in files)


def test_a_dry_run_shows_groups_memory_and_rounds(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    out = cli.done("match", *nets, "-o", tmp_path / "global.pt", "--dry-run").out
    row = next(line.split() for line in out.splitlines() if "conv2" in line)
    assert row == ["conv2", "6", "6", "to", "18"]
    for phrase in ("parameters: 591 to 886", "memory", "rounds"):
        assert phrase in out
