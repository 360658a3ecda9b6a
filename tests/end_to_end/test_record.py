"""The merge record: what it holds, that reruns give the same bytes, and that it replays a run."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from fedmerge import __version__
from tests.digits import MODEL, save_clients
from tests.end_to_end.helpers import Cli, independent, listing, load, record_of, save_all
from tests.zoo import ZOO

SUFFIXES = pytest.mark.parametrize("suffix", [".pt", ".safetensors"])


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def written_bytes(output: Path) -> list[bytes]:
    """Return the bytes of a written model and of the record beside it, if any."""
    record = Path(f"{output}.json")
    return [output.read_bytes(), *([record.read_bytes()] if record.exists() else [])]


@SUFFIXES
def test_the_record_says_what_was_merged_and_how(
    suffix: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = tmp_path / f"global{suffix}"
    cli.done("match", *nets, "-o", output, "--seed", "3", "--max-growth", "2")
    record, model = record_of(output), load(output)
    assert record["fedmerge"] == __version__
    assert record["options"]["seed"] == 3
    assert record["options"]["max_growth"] == 2
    assert record["options"]["match_threshold"] == 0.5
    assert record["sources"] == [
        {
            "name": path.stem,
            "file": path.name,
            "sha256": sha256(path.read_bytes()),
            "size": path.stat().st_size,
        }
        for path in nets
    ]
    assert record["plan"]["tensors"]["conv2.bias"] == ["conv2"]
    assert record["tensors"] == {
        name: sha256(tensor.contiguous().numpy().tobytes()) for name, tensor in model.items()
    }
    assert record["warnings"] == []
    widths = {group["name"]: group for group in record["groups"]}
    assert widths["conv1"]["client_widths"] == [5, 5, 5]
    assert widths["conv1"]["width"] == len(model["conv1.bias"])
    assert 0 <= widths["fc1"]["match_rate"] <= 1
    for name in "abc":
        assert len(set(record["assignments"][name]["fc1"])) == 9
    assert Path(f"{output}.json").exists() == (suffix == ".pt")


@SUFFIXES
def test_the_record_holds_no_folders_output_names_or_times(
    suffix: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = tmp_path / f"speaking-name{suffix}"
    counts, plan = tmp_path / "my-counts.json", tmp_path / "my-plan.json"
    counts.write_text(json.dumps({"a": [1, 2, 3, 4], "b": [4, 3, 2, 1], "c": [1, 1, 1, 1]}))
    cli.done("plan", *nets, "-o", plan)
    cli.done(
        *("match", *nets, nets[0], "-o", output, "--set", "threads=1", "-v", "--device", "cpu"),
        *("--plan", plan, "--set", "client_weight=a=2"),
    )
    text = json.dumps(record_of(output))
    assert '"a.pt"' in text
    for unwanted in (str(tmp_path), tmp_path.name, "speaking-name", "my-plan", "/in/"):
        assert unwanted not in text
    keys = set(re.findall(r'"(\w+)":', text))
    assert keys & {"time", "date", "seconds", "device", "threads", "verbose", "output"} == set()
    assert re.search(r"20\d\d-\d\d-\d\d", text) is None


@SUFFIXES
def test_reruns_give_the_same_bytes_under_any_name_and_folder(
    suffix: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    elsewhere = tmp_path / "else" / "where"
    shutil.copytree(nets[0].parent, elsewhere)
    first, second = tmp_path / f"global{suffix}", elsewhere / f"a-rather-longer-name{suffix}"
    cli.done("match", *nets, "-o", first, "--set", "threads=1")
    cli.done("match", *(elsewhere / path.name for path in nets), "-o", second, "-q")
    assert written_bytes(first) == written_bytes(second)


@SUFFIXES
@pytest.mark.parametrize(
    "options",
    [("--seed", "1"), ("--set", "gamma=0.9"), ("--max-growth", "2"), ("--dtype", "float32")],
)
def test_another_option_gives_another_record(
    suffix: str, options: tuple[str, str], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    first, second = tmp_path / f"first{suffix}", tmp_path / f"second{suffix}"
    cli.done("match", *nets, "-o", first)
    cli.done("match", *nets, "-o", second, *options)
    assert record_of(first)["options"] != record_of(second)["options"]
    assert first.read_bytes() != second.read_bytes() or suffix == ".pt"


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".safetensors"])
def test_inputs_are_never_touched(suffix: str, nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in nets}
    cli.done("match", *nets, "-o", tmp_path / f"global{suffix}")
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in nets} == before
    names = {f"global{suffix}"} | (set() if suffix == ".safetensors" else {f"global{suffix}.json"})
    assert set(os.listdir(tmp_path)) == {"in", *names}  # noqa: PTH208


OPTIONS = (
    *("--seed", "5", "--set", "gamma=0.8", "--max-growth", "1.8", "--set", "client_weight=b=2.5"),
    *("--keep", "fc2.*", "--dtype", "float32", "--set", "solver=scipy", "--set", "sweeps=4"),
)


@SUFFIXES
@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        (),
        ("--set", "preset=paper"),
        ("--set", "sigma=0.2", "--set", "sigma0=0.1"),
        ("--set", "match_threshold=1", "--max-growth", "none"),
        ("--method", "average"),
    ],
    ids=["many options", "defaults", "paper", "variances", "apart", "average"],
)
def test_a_record_replays_its_run_to_the_same_bytes(
    suffix: str, options: tuple[str, ...], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    """The clients are found beside the record."""
    output = nets[0].parent / f"global{suffix}"
    cli.done("match", *nets, "-o", output, *options)
    record = output if suffix == ".safetensors" else Path(f"{output}.json")
    again = tmp_path / f"again{suffix}"
    cli.done("match", "--config", record, "-o", again)
    assert written_bytes(again) == written_bytes(output)


def test_a_record_replays_on_clients_that_moved(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    cli.done("match", *nets, "-o", tmp_path / "global.pt", *OPTIONS)
    moved = shutil.copytree(nets[0].parent, tmp_path / "moved")
    files = [moved / path.name for path in nets]
    cli.done("match", *files, "--config", tmp_path / "global.pt.json", "-o", tmp_path / "again.pt")
    assert written_bytes(tmp_path / "again.pt") == written_bytes(tmp_path / "global.pt")


def test_a_record_replays_class_counts(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({"a": [1, 2, 3, 4], "b": [4, 3, 2, 1], "c": [1, 0, 1, 0.5]}))
    output = nets[0].parent / "global.pt"
    cli.done("match", *nets, "-o", output, "--class-counts", counts)
    counts.unlink()
    cli.done("match", "--config", f"{output}.json", "-o", tmp_path / "again.pt")
    assert written_bytes(tmp_path / "again.pt") == written_bytes(output)


def test_a_record_of_a_merge_with_code_has_the_threshold_that_was_used(
    tmp_path: Path, cli: Cli
) -> None:
    """Within a size budget, units are compared by what they do, with a threshold or none."""
    clients, output, again = save_clients(tmp_path), tmp_path / "global.pt", tmp_path / "again.pt"
    code = ("--model", MODEL, "--set", "probe_count=100")
    cli.done("match", *clients, *code, "-o", output)
    record = record_of(output)
    assert [len(group["leaders"]) == group["width"] for group in record["groups"]] == [True]
    assert record["options"]["match_threshold"] is None
    cli.done("match", "--config", f"{output}.json", *code, "-o", again)
    assert record_of(again)["tensors"] == record["tensors"]
    means = ("--set", "merge_units=mean", "--force")
    cli.done("match", "--config", f"{output}.json", *code, *means, "-o", again)
    matched = record_of(again)
    assert matched["tensors"] != record["tensors"]
    assert [group["threshold"] for group in matched["groups"]] == [0.95]
    assert matched["options"]["match_threshold"] == 0.95
    other = ("--set", "match_threshold=0.3", "--force")
    cli.done("match", "--config", f"{output}.json", *code, *other, "-o", again)
    assert record_of(again)["tensors"] not in (record["tensors"], matched["tensors"])


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_configuration_file_means_the_same_as_the_options(
    suffix: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    values = {
        "seed": 5,
        "gamma": 0.8,
        "max-growth": 1.8,
        "client-weight": {"b": 2.5},
        "keep": ["fc2.*"],
        "dtype": "float32",
        "solver": "scipy",
        "sweeps": 4,
    }
    config = tmp_path / f"options{suffix}"
    config.write_text(
        json.dumps(values)
        if suffix == ".json"
        else "seed: 5\ngamma: 0.8\nmax-growth: 1.8\nclient-weight: {b: 2.5}\nkeep: ['fc2.*']\n"
        "dtype: float32\nsolver: scipy\nsweeps: 4\n"
    )
    cli.done("match", *nets, "-o", tmp_path / "typed.pt", *OPTIONS)
    cli.done("match", *nets, "-o", tmp_path / "configured.pt", "--config", config)
    cli.done("match", *nets, "-o", tmp_path / "default.pt")
    assert written_bytes(tmp_path / "configured.pt") == written_bytes(tmp_path / "typed.pt")
    assert written_bytes(tmp_path / "configured.pt") != written_bytes(tmp_path / "default.pt")


def test_the_growth_none_of_a_yaml_file_is_understood(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "options.yaml").write_text("match-threshold: 1\nmax-growth: none\n")
    cli.done("match", *nets, "-o", tmp_path / "g.pt", "--config", tmp_path / "options.yaml")
    assert load(tmp_path / "g.pt")["conv1.bias"].shape == (15,)


def test_the_command_line_wins_over_the_configuration(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "options.yaml").write_text("seed: 5\ngamma: 0.8\noutput: nowhere/else.pt\n")
    output = tmp_path / "global.pt"
    cli.done(
        "match", *nets, "--config", tmp_path / "options.yaml", "--set", "gamma=0.9", "-o", output
    )
    options = record_of(output)["options"]
    assert (options["seed"], options["gamma"]) == (5, 0.9)


@pytest.mark.parametrize(
    "extra", [("--set", "gamma=0.9"), ("--seed", "7"), ("--set", "match_threshold=0.3")]
)
def test_the_command_line_wins_over_a_record(
    extra: tuple[str, str], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = nets[0].parent / "global.pt"
    cli.done("match", *nets, "-o", output)
    cli.done("match", "--config", f"{output}.json", "-o", tmp_path / "other.pt", *extra)
    cli.done("match", *nets, "-o", tmp_path / "typed.pt", *extra)
    assert written_bytes(tmp_path / "other.pt") == written_bytes(tmp_path / "typed.pt")
    assert written_bytes(tmp_path / "other.pt") != written_bytes(output)


@pytest.mark.parametrize(
    ("text", "switch"), [("json: true", "--json"), ("quiet: true", "-q"), ("dry-run: true", "")]
)
def test_a_configuration_may_hold_switches_too(
    text: str, switch: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "options.yaml").write_text(text)
    arguments = ("match", *nets, "-o", tmp_path / "global.pt")
    outcome = cli.done(*arguments, "--config", tmp_path / "options.yaml")
    if switch == "--json":
        assert outcome.json["clients"] == ["a", "b", "c"]
    elif switch == "-q":
        assert outcome.out == outcome.err == ""
    assert (tmp_path / "global.pt").exists() == bool(switch)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("o.yaml", "sede: 5", ["o.yaml", "sede"]),
        ("o.json", '{"options": {"seed": 5}}', ["o.json", "options"]),
        ("o.yaml", "seed: many", ["seed"]),
        ("o.yaml", "seed: [1, 2]", ["seed"]),
        ("o.yaml", "seed: {a: 1}", ["seed"]),
        ("o.yaml", "gamma: -1", ["--set gamma"]),
        ("o.yaml", "client-weight: 3", ["--set client_weight is '3'"]),
        ("o.yaml", "class-counts: [1, 2]", ["class-counts"]),
        ("o.yaml", "seed: [", ["o.yaml"]),
        ("o.json", "{", ["o.json"]),
        ("o.yaml", "- seed", ["o.yaml"]),
        ("o.yaml", "5: 6", ["o.yaml"]),
        ("o.yaml", "", ["o.yaml"]),
        ("missing.yaml", None, ["missing.yaml"]),
    ],
)
def test_a_configuration_that_makes_no_sense_is_a_usage_error(
    name: str, text: str | None, says: list[str], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    before = listing(tmp_path)
    cli.refused(
        *("match", *nets, "-o", tmp_path / "global.pt", "--config", tmp_path / name),
        code=2,
        says=says,
    )
    assert listing(tmp_path) == before


def test_a_single_pattern_in_a_configuration_is_one_pattern(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "options.yaml").write_text("keep: fc2.*\n")
    cli.done("match", *nets, "-o", tmp_path / "g.pt", "--config", tmp_path / "options.yaml")
    assert record_of(tmp_path / "g.pt")["options"]["keep"] == ["fc2.*"]


@pytest.mark.parametrize(
    "damage",
    [
        {"sources": 3},
        {"sources": [{"file": "a.pt"}, {}]},
        {"options": []},
        {"plan": {"tensors": {"x": [True]}}},
        {"plan": 7},
        {"sources": [{"file": "../../outside.pt"}, {"file": "b.pt"}]},
    ],
    ids=["sources", "no file", "options", "layout", "plan", "outside"],
)
def test_a_damaged_record_is_refused_as_a_configuration(
    damage: dict[str, object], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = nets[0].parent / "global.pt"
    cli.done("match", *nets, "-o", output)
    record = Path(f"{output}.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), **damage}))
    outcome = cli("match", "--config", record, "-o", tmp_path / "again.pt")
    assert outcome.code in (1, 2, 3)
    assert outcome.err.splitlines()[0].startswith("error: ")
    assert not (tmp_path / "again.pt").exists()


def test_replaying_notices_clients_that_changed_since(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = nets[0].parent / "global.pt"
    cli.done("match", *nets, "-o", output)
    save_all([dict(ZOO["lenet"].fresh(77).state_dict())], nets[0].parent)
    outcome = cli("match", "--config", f"{output}.json", "-o", tmp_path / "again.pt")
    assert outcome.code or "a.pt" in outcome.err


def test_replaying_repeated_stems_takes_no_file_for_another(tmp_path: Path, cli: Cli) -> None:
    """A record holds no folders, so that it can't tell one x.pt from the other."""
    states = independent("mlp", 2)
    files = [*save_all(states[:1], tmp_path / "one"), *save_all(states[1:], tmp_path / "two")]
    output = tmp_path / "one" / "global.pt"
    cli.done("match", *files, "-o", output)
    cli.done("match", *files, "--config", f"{output}.json", "-o", tmp_path / "again.pt")
    assert written_bytes(tmp_path / "again.pt") == written_bytes(output)
    outcome = cli("match", "--config", f"{output}.json", "-o", tmp_path / "wrong.pt")
    assert outcome.code or "a-2" in outcome.err
