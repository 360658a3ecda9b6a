"""A record is data, maybe a stranger's: it decides nothing about trust, code, and places."""

from __future__ import annotations

import hashlib
import json
import random
import shlex
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmerge.merging import NEVER
from tests.digits import MODEL, save_clients
from tests.end_to_end.helpers import Cli, listing, load
from tests.end_to_end.retraining import make_scene
from tests.mutants import mutant

Record = dict[str, Any]

VALUES: dict[str, Any] = {  # for options whose value says what would happen
    "allow_global": ["pathlib.Path.touch"],
    "model": "evil.py:build",
    "output": "/tmp/else.pt",
    "plan": "plan.json",
}


@pytest.fixture
def merged(nets: list[Path], cli: Cli) -> Path:
    """A merge beside its clients."""
    output = nets[0].parent / "global.pt"
    cli.done("match", *nets, "-o", output)
    return output


def record_path(merged: Path) -> Path:
    return Path(f"{merged}.json")


def edit(merged: Path, change: Callable[[Record], object]) -> None:
    path = record_path(merged)
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")


def inside_safetensors(record: Path, place: Path) -> Path:
    """Write a record as the metadata of a safetensors file."""
    text = json.dumps({"__metadata__": {"fedmerge": record.read_text(encoding="utf-8")}}).encode()
    place.write_bytes(len(text).to_bytes(8, "little") + text)
    return place


def inside_index(record: Path, place: Path) -> Path:
    """Write a record as the metadata of a shard index."""
    index = {"metadata": {"fedmerge": json.loads(record.read_text())}, "weight_map": {"a": "b"}}
    place.write_text(json.dumps(index), encoding="utf-8")
    return place


@pytest.mark.parametrize(
    "part", ["options", *(pytest.param(p, marks=pytest.mark.slow) for p in ("rounds", "top"))]
)
def test_a_record_that_sets_what_only_a_command_line_may_is_refused(
    part: str, merged: Path, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    whole = record_path(merged).read_text(encoding="utf-8")
    own = {"plan", "frontier"} if part == "top" else set()  # names of a record's own parts
    for name in sorted(NEVER.keys() - own):
        record = json.loads(whole)
        places: dict[str, Record] = {
            "options": record["options"],
            "rounds": record.setdefault("retrain", {}).setdefault("options", {}),
            "top": record,
        }
        places[part][name] = VALUES.get(name, True)
        record_path(merged).write_text(json.dumps(record), encoding="utf-8")
        before, option = listing(tmp_path), f"--{name.replace('_', '-')}"
        for command in (
            ("verify", merged, *nets),
            ("match", "--config", record_path(merged), "-o", tmp_path / "again.pt"),
        ):
            refused = cli.refused(*command, code=4)
            assert f"sets {option}" in refused.err or f"sets --set {name}" in refused.err
        assert listing(tmp_path) == before
    for command in (
        ("plan", nets[0], "--config", record_path(merged)),
        ("compare", *nets, "--config", record_path(merged), "--model", "m.py:f", "--data", "d.npz"),
        ("retrain", "--config", record_path(merged), "--model", "m.py:f", "--shards", "s"),
        ("report", merged, "-o", tmp_path / "page.html"),
    ):
        cli.refused(*command, code=4, says=["sets " + option])


def test_a_plan_that_is_a_path_is_refused(merged: Path, tmp_path: Path, cli: Cli) -> None:
    edit(merged, lambda record: record.update(plan=str(tmp_path / "plan.json")))
    cli.refused("verify", merged, code=4, says=["sets --plan"])
    cli.refused("plan", "--config", record_path(merged), code=4, says=["sets --plan"])


@pytest.mark.parametrize("spelling", ["allow-global", "Allow_Global", "ALLOW-GLOBAL"])
def test_no_spelling_gets_past_the_list(spelling: str, merged: Path, cli: Cli) -> None:
    edit(merged, lambda record: record["options"].update({spelling: ["os.system"]}))
    cli.refused("verify", merged, code=4, says=["sets --allow-global"])


@pytest.mark.parametrize("hide", [inside_safetensors, inside_index, shutil.copy])
@pytest.mark.parametrize("name", ["own.yaml", "own.json", "own.txt", "own.safetensors", "own"])
def test_what_a_config_is_its_content_decides(
    hide: Callable[[Path, Path], Path], name: str, merged: Path, tmp_path: Path, cli: Cli
) -> None:
    """A record by another name is a record, and one that is harmless replays."""
    clients = sorted(merged.parent.glob("?.pt"))
    replay = ("match", *clients, "-o", tmp_path / "again.pt", "--config")
    harmless = hide(record_path(merged), tmp_path / name)
    cli.done(*replay, harmless)
    assert (tmp_path / "again.pt").read_bytes() == merged.read_bytes()
    (tmp_path / "again.pt").unlink()
    edit(merged, lambda record: record["options"].update(model="evil.py:build"))
    cli.refused(*replay, hide(record_path(merged), tmp_path / name), code=4, says=["--model"])
    assert not (tmp_path / "again.pt").exists()


def test_a_record_never_lets_a_pickle_run_code(merged: Path, nets: list[Path], cli: Cli) -> None:
    """The commands that `match` prints and that a record replays, on clients that were replaced."""
    mark = merged.parent / "mark"
    torch.save({**load(nets[0]), "extra": Payload(mark)}, nets[0])

    def change(record: Record) -> None:
        record["sources"][0]["sha256"] = hashlib.sha256(nets[0].read_bytes()).hexdigest()
        record["options"]["allow_global"] = ["pathlib.Path.touch", "pathlib.PosixPath"]

    edit(merged, change)
    cli.refused("verify", merged, *nets, code=4, says=["--allow-global"])
    again = ("match", "--config", record_path(merged), "-o", merged.parent / "again.pt")
    cli.refused(*again, code=4, says=["--allow-global"])
    edit(merged, lambda record: record["options"].pop("allow_global"))
    cli.refused("verify", merged, *nets, code=4, says=["asks for code"])
    cli.refused(*again, code=4, says=["asks for code"])
    assert not mark.exists()


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.mark,)


def test_records_hold_no_trust_and_an_empty_list_of_older_ones_is_harmless(
    merged: Path, nets: list[Path], cli: Cli
) -> None:
    assert "allow_global" not in json.loads(record_path(merged).read_text())["options"]
    edit(merged, lambda record: record["options"].update(allow_global=[]))
    cli.done("verify", merged, *nets)


def test_admitted_clients_are_verified_and_merged_again_if_they_are_admitted_again(
    nets: list[Path], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in nets[:2]:
        torch.save({"state_dict": load(path), "args": Namespace(lr=0.1)}, Path(path.name))
    admit = ("--allow-global", "argparse.Namespace")
    done = cli.done("match", "a.pt", "b.pt", "-o", "global.pt", *admit)
    assert done.last_line == f"fedmerge verify global.pt a.pt b.pt {' '.join(admit)}"
    printed = shlex.split(done.last_line)[1:]
    assert "recomputed from its 2 clients: equal" in cli.done(*printed).out
    again = ("match", "--config", "global.pt.json", "-o", "again.pt")
    cli.refused(
        *again, code=4, says=["--allow-global argparse.Namespace", "a record admits nothing"]
    )
    cli.refused(*printed[:4], code=4, says=["--allow-global argparse.Namespace"])
    cli.done(*again, *admit)
    assert Path("again.pt").read_bytes() == Path("global.pt").read_bytes()
    cli.refused("verify", "global.pt", *admit, code=2, says=["--allow-global", "clients' files"])


@pytest.mark.parametrize(
    "name",
    ["../a.pt", "/etc/passwd", "in/a.pt", "..", ".", "./a.pt", "/dev/zero", "a.pt/", "a\0.pt"],
)
def test_a_recorded_file_with_a_folder_is_refused(name: str, merged: Path, cli: Cli) -> None:
    edit(merged, lambda record: record["sources"][0].update(file=name))
    for command in (("verify", merged), ("plan", "--config", record_path(merged))):
        cli.refused(*command, code=4, says=["names the file", "without folders"])


def test_recorded_probes_with_a_folder_are_refused(tmp_path: Path, cli: Cli) -> None:
    clients, output = save_clients(tmp_path), tmp_path / "global.pt"
    cli.done("match", *clients, "--model", MODEL, "--set", "probe_count=50", "-o", output)
    edit(output, lambda record: record["probes"].update(data="../x.npz", source=None))
    cli.refused("verify", output, code=4, says=["'../x.npz'"])


def test_a_task_that_is_code_is_not_replayed(tmp_path: Path, cli: Cli) -> None:
    scene = make_scene(tmp_path)
    cli.done(*scene.command("g.pt", "--set", "init_epochs=1", clients=[]))
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    code = f"{tmp_path / 'evil.py'}:task"
    edit(tmp_path / "g.pt", lambda record: record["retrain"]["options"].update(task=code))
    again = scene.command("again.pt", "--config", str(tmp_path / "g.pt.json"), clients=[])
    cli.refused(*again, code=4, says=["--task", "evil.py:task"])
    assert not mark.exists()
    cli.done("verify", tmp_path / "g.pt")  # there it is a word like any other
    cli.done(*again, "--task", "classification")
    assert not mark.exists()


def test_a_file_that_is_named_twice_has_to_be_given(merged: Path, tmp_path: Path, cli: Cli) -> None:
    def change(record: Record) -> None:
        record["sources"][1] |= {"file": "a.pt", "sha256": record["sources"][0]["sha256"]}

    edit(merged, change)
    again = ("match", "--config", record_path(merged), "-o", tmp_path / "again.pt")
    cli.refused(*again, code=2, says=["names a.pt twice", "command line"])


@pytest.mark.parametrize(("kind", "text"), [("json", '{{"{}": true}}'), ("yaml", "{}: true\n")])
@pytest.mark.parametrize("name", ["allow_global", "allow-global", "force"])
def test_a_configuration_neither_admits_nor_overwrites(
    name: str, kind: str, text: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    config = tmp_path / f"own.{kind}"
    config.write_text(text.format(name))
    says = [f"--config own.{kind} sets --{name.replace('_', '-')}", "only the command line"]
    cli.refused("match", *nets, "-o", tmp_path / "g.pt", "--config", config, code=2, says=says)


def test_a_configuration_that_runs_code_is_said_to(tmp_path: Path, cli: Cli) -> None:
    clients = save_clients(tmp_path)
    (tmp_path / "own.yaml").write_text(f"model: {MODEL}\nassume-chain: true\n")
    command = ("plan", *clients, "--config", tmp_path / "own.yaml")
    assert cli.done(*command).err.startswith(
        f"note: --config own.yaml runs code: --model {MODEL}\n"
    )
    assert cli.done(*command, "-q").err == ""
    assert "runs code" not in cli.done(*command, "--model", MODEL).err
    (tmp_path / "own.yaml").write_text("assume-chain: true\n")
    assert "runs code" not in cli.done(*command).err


def test_code_for_data_and_tasks_is_said_to_run_too(tmp_path: Path, cli: Cli) -> None:
    scene = make_scene(tmp_path)
    (tmp_path / "own.json").write_text(
        json.dumps({"shards": scene.function, "data": str(scene.data), "passes": 1})
    )
    said = cli.done(
        *("retrain", *scene.clients, "--config", tmp_path / "own.json"),
        *("--model", scene.model, "--dry-run", "-o", tmp_path / "g.pt"),
    ).err
    assert f"note: --config own.json runs code: --shards {scene.function}\n" in said
    assert "--data" not in said


@pytest.mark.parametrize(
    "value",
    [
        *({"seed": "1"}, {"seed": 1.5}, {"seed": True}, {"seed": [1]}, {"seed": {"a": 1}}),
        *({"assume-chain": 1}, {"gamma": "x"}, {"clients": {"a": 1}}, {"keep": [["x"]]}),
        *({"max-growth": []}, {"class-counts": {"a": 1}}, {"client-weight": {"a": "x"}}),
        *({"output": "a\0b"}, {"plan": "a\0b"}, {"schema": 2}, {"config": "x"}, {"context": 1}),
    ],
    ids=str,
)
def test_a_configuration_of_other_types_is_a_usage_error(
    value: Record, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "own.json").write_text(json.dumps(value))
    command = ("match", *nets, "-o", tmp_path / "g.pt", "--config", tmp_path / "own.json")
    cli.refused(*command, code=2, says=["--config own.json"])
    assert not (tmp_path / "g.pt").exists()


def test_widths_of_a_record_are_believed_only_after_they_are_checked(
    merged: Path, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    for padding in (0, 10**12 - 5):
        wide = {"width": 10**12, "padding": padding}
        edit(merged, partial(_update_group, wide))
        assert cli("verify", merged, *nets).code == 1
        for command in (
            ("report", merged, "-o", tmp_path / "page.html"),
            ("retrain", merged, "--shards", "x.py:f", "--model", "x.py:f", "-o", tmp_path / "h.pt"),
        ):
            cli.refused(*command, code=1, says=["merge record is damaged"])


def test_messages_about_long_names_are_short(merged: Path, nets: list[Path], cli: Cli) -> None:
    name = "n" * 1_000_000
    edit(merged, lambda record: record["tensors"].update({name: "0" * 64}))
    told = cli("verify", merged, *nets)
    assert told.code == 1
    assert max(map(len, told.err.splitlines())) < 2100
    assert "tensor 'nnn" in told.err


def _update_group(changes: Record, record: Record) -> None:
    record["groups"][0] |= changes


def _commands(merged: Path, clients: list[Path], folder: Path) -> list[tuple[object, ...]]:
    record = merged if merged.suffix == ".json" else record_path(merged)
    return [
        ("verify", merged),
        ("verify", merged, *clients),
        ("inspect", merged),
        ("plan", "--config", record),
        ("match", "--config", record, "-o", folder / "o.pt", "--dry-run"),
        ("report", merged, "-o", folder / "r.html", "--force"),
    ]


@pytest.mark.parametrize("kind", ["files", "code", "rounds", "shards"])
@pytest.mark.slow
def test_mutated_records_end_in_one_line_and_a_code(
    kind: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    folder, clients = nets[0].parent, nets
    merged = folder / "global.pt"
    if kind == "files":
        cli.done("match", *nets, "-o", merged)
    elif kind == "shards":
        cli.done("match", *nets, "-o", folder / "g.safetensors", "--set", "shard_size=2KB")
        merged = folder / "g.safetensors.index.json"
    elif kind == "code":
        clients = save_clients(folder)
        code = ("--model", MODEL, "--set", "probe_count=50", "--frontier")
        cli.done("match", *clients, *code, "-o", merged)
    else:
        scene = make_scene(tmp_path)
        clients, merged = [], tmp_path / "global.pt"
        cli.done(*scene.command("global.pt", "--data", scene.data, clients=[]))
    place = merged if kind == "shards" else record_path(merged)
    whole = json.loads(place.read_text(encoding="utf-8"))
    rng = random.Random(kind)
    for number in range(15):
        place.write_text(json.dumps(mutant(whole, rng, changes=1 + number % 3)), encoding="utf-8")
        for command in _commands(merged, clients, tmp_path):
            done = cli(*command)
            assert done.code in (0, 1, 2, 3, 4)
            assert (done.code == 0) or "error: " in done.err or "difference: " in done.err
            assert all(len(line) < 2100 for line in done.err.splitlines())


@pytest.mark.parametrize("name", ["a plan", "class counts"])
@pytest.mark.slow
def test_mutated_plans_and_counts_end_in_one_line_and_a_code(
    name: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    file, output = tmp_path / "given.json", tmp_path / "o.pt"
    option = "--plan" if name == "a plan" else "--class-counts"
    whole: Any = {"a": [1, 2, 3, 4], "b": [4, 3, 2, 1], "c": [1, 0, 1, 0.5]}
    if name == "a plan":
        cli.done("plan", *nets, "-o", file)
        whole = json.loads(file.read_text())
    rng, codes = random.Random(name), set()
    for number in range(40):
        file.write_text(json.dumps(mutant(whole, rng, changes=1 + number % 2)))
        done = cli("match", *nets, option, file, "-o", output, "--force", "-q")
        codes.add(done.code)
        assert done.code in (0, 1, 2, 3)
        assert (done.code == 0) or done.err.startswith("error: ")
        assert all(len(line) < 2100 for line in done.err.splitlines())
    assert len(codes) > 1  # some were harmless


def test_a_merge_of_the_same_file_many_times_is_not_recomputed(
    merged: Path, nets: list[Path], cli: Cli
) -> None:
    def change(record: Record) -> None:
        first = record["sources"][0]
        record["sources"] = [{**first, "name": f"c{k}"} for k in range(1000)]
        own = record["assignments"]["a"]
        record["assignments"] = {f"c{k}": own for k in range(1000)}
        for group in record["groups"]:
            units = len(own[group["name"]])
            group |= {"client_widths": [units] * 1000, "similarities": []}

    edit(merged, change)
    outcome = cli("verify", merged, nets[0])
    assert outcome.code == 1
