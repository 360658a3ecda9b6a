"""`verify` finds every difference between a merged file, its record and its clients."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.helpers import APART, Cli, Outcome, listing, load, save, save_all
from tests.zoo import ZOO

Record = dict[str, Any]


@pytest.fixture
def merged(nets: list[Path], tmp_path: Path, cli: Cli) -> Path:
    """A merge in which conv1's units 0-4 belong to a, 5-9 to b and 10-14 to c."""
    cli.done("match", *nets, "-o", tmp_path / "global.pt", *APART)
    return tmp_path / "global.pt"


def differs(cli: Cli, *arguments: object, says: list[str]) -> Outcome:
    """Run a verification that must find a difference and say which."""
    outcome = cli("verify", *arguments)
    assert outcome.code == 1, outcome
    assert "Traceback" not in outcome.err
    for phrase in says:
        assert phrase in outcome.err, outcome.err
    return outcome


def edit(merged: Path, change: Callable[[Record], object]) -> None:
    path = Path(f"{merged}.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    before = copy.deepcopy(record)
    change(record)
    assert record != before
    path.write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "options",
    [(), APART, ("--method", "average"), ("--set", "client_weight=a=2"), ("--dtype", "float16")],
    ids=lambda value: " ".join(value) or "default",
)
def test_a_fresh_merge_agrees_with_its_record_and_clients(
    options: tuple[str, ...], suffix: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = tmp_path / f"global{suffix}"
    cli.done("match", *nets, "-o", output, *options)
    before = listing(tmp_path)
    alone = cli.done("verify", output)
    assert "8 tensors and all assignments agree" in alone.out
    assert "not recomputed" in alone.out
    assert "recomputed from its 3 clients: equal" in cli.done("verify", output, *nets).out
    found = cli.done("verify", output, *nets[::-1], "--json").json
    agreed = {"ok": True, "tensors": 8, "recomputed": 3, "fitted": 0, "differences": []}
    assert found == {"schema": 1, **agreed}
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["vgg with batch norm", "gru, 2 layers, both directions"])
def test_norms_buffers_and_padded_layers_are_recomputed(
    name: str, tmp_path: Path, cli: Cli
) -> None:
    states = [dict(ZOO[name].fresh(seed).state_dict()) for seed in range(3)]
    files = save_all(states, tmp_path)
    cli.done("match", *files, "-o", tmp_path / "global.pt", "--max-growth", "none")
    cli.done("verify", tmp_path / "global.pt", *files)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("name", ["conv2.weight", "fc2.bias"])
def test_one_damaged_byte_of_a_tensor_is_found(
    name: str, suffix: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    output = tmp_path / f"global{suffix}"
    cli.done("match", *nets, "-o", output)
    content = bytearray(output.read_bytes())
    place = content.index(load(output)[name].numpy().tobytes())
    content[place] ^= 1
    output.write_bytes(content)
    if suffix == ".pt":  # its records have checksums, which are the first to tell
        cli.refused("verify", output, *nets, code=1, says=["contradict their checksum"])
        return
    differs(cli, output, says=[f"tensor '{name}'"])
    found = cli("verify", output, *nets, "--json")
    assert found.code == 1
    assert found.json["ok"] is False
    assert [name in text for text in found.json["differences"]] == [True]


def test_a_truncated_file_is_refused(merged: Path, nets: list[Path], cli: Cli) -> None:
    merged.write_bytes(merged.read_bytes()[:-100])
    cli.refused("verify", merged, *nets, code=1, says=["global.pt", "truncated"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("fc2.bias"), ["'fc2.bias'", "not in the file"]),
        (lambda s: s.update({"fc9.bias": torch.ones(3)}), ["'fc9.bias'", "not in the record"]),
        (lambda s: s.update({"fc2.bias": s["fc2.bias"].float()}), ["'fc2.bias'"]),
        (lambda s: s.update({"conv1.bias": s["conv1.bias"][:9]}), ["'conv1.bias'"]),
    ],
    ids=["missing", "added", "dtype", "narrower"],
)
def test_changed_tensors_are_named(
    change: Callable[[dict[str, torch.Tensor]], object], says: list[str], merged: Path, cli: Cli
) -> None:
    state = load(merged)
    change(state)
    save(state, merged)
    differs(cli, merged, says=says)


def _assign(client: str, group: str, units: Callable[[list[int]], Sequence[float]]) -> Any:
    def change(record: Record) -> None:
        record["assignments"][client][group] = units(record["assignments"][client][group])

    return change


EDITS: dict[str, tuple[Callable[[Record], object], list[str]]] = {
    "duplicate": (
        _assign("b", "conv1", lambda u: [u[0], u[0], *u[2:]]),
        ["b's assignment of group 'conv1'", "same global unit"],
    ),
    "above the range": (
        _assign("c", "fc1", lambda u: [27, *u[1:]]),
        ["c's assignment of group 'fc1'", "range"],
    ),
    "below the range": (_assign("a", "fc1", lambda u: [-1, *u[1:]]), ["a's", "'fc1'", "range"]),
    "uncovered": (
        _assign("a", "conv1", lambda u: [5, *u[1:]]),
        ["global unit 0 of group 'conv1' belongs to no client"],
    ),
    "empty": (_assign("a", "conv1", lambda u: []), ["a's assignment of group 'conv1'"]),
    "too short": (_assign("a", "conv1", lambda u: u[1:]), ["conv1"]),
    "no whole numbers": (_assign("a", "conv1", lambda u: [0.5, *u[1:]]), ["record", "`float`"]),
    "client missing": (lambda r: r["assignments"].pop("b"), ["clients"]),
    "group missing": (lambda r: r["assignments"]["b"].pop("fc1"), ["b's", "'fc1'", "missing"]),
    "width": (lambda r: r["groups"][0].update(width=16), ["'conv1'", "16", "15"]),
    "group unrecorded": (lambda r: r["groups"].pop(0), ["conv1"]),
    "hash": (lambda r: r["tensors"].update({"fc1.bias": "0" * 64}), ["'fc1.bias'"]),
    "tensor unrecorded": (lambda r: r["tensors"].pop("fc1.bias"), ["'fc1.bias'"]),
    "plan": (lambda r: r["plan"]["tensors"].update({"fc1.bias": ["conv1"]}), ["'fc1.bias'"]),
    "plan damaged": (lambda r: r["plan"].update(tensors=3), ["record"]),
    "option unknown": (lambda r: r["options"].update(magic=1), ["record", "magic"]),
    "option invalid": (lambda r: r["options"].update(gamma=-1), ["record", "--gamma"]),
    "format": (lambda r: r.update(format=99), ["format", "99"]),
    "sources damaged": (lambda r: r.update(sources=[1]), ["record"]),
    "part missing": (lambda r: r.pop("assignments"), ["record", "assignments"]),
}


@pytest.mark.parametrize("name", [name for name in EDITS if name != "too short"])
def test_an_edited_record_is_found_without_the_clients(name: str, merged: Path, cli: Cli) -> None:
    change, says = EDITS[name]
    edit(merged, change)
    differs(cli, merged, says=says)


@pytest.mark.parametrize("name", list(EDITS))
def test_an_edited_record_is_found_with_the_clients(
    name: str, merged: Path, nets: list[Path], cli: Cli
) -> None:
    change, says = EDITS[name]
    edit(merged, change)
    differs(cli, merged, *nets, says=says)


def _swap_hashes(record: Record) -> None:
    first, second, *_ = record["sources"]
    first["sha256"], second["sha256"] = second["sha256"], first["sha256"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_assign("a", "conv1", lambda u: u[::-1]), ["conv1.weight", "assignments"]),
        (_assign("a", "conv1", lambda u: [*u, 5]), ["conv1"]),
        (lambda r: r["assignments"]["a"].update(other=[0]), ["other"]),
        (lambda r: r["options"]["client_weight"].update(a=2.0), ["fc2"]),
        (lambda r: r["options"]["client_weight"].update(zebra=2.0), ["zebra"]),
        (lambda r: r["options"].update(class_counts={"a": [1]}), ["class-counts"]),
        (lambda r: r["options"].update(keep=["fc2.*"]), ["fc1", "options"]),
        (lambda r: r["options"].update(keep=["zebra"]), ["zebra"]),
        (lambda r: r["options"].update(dtype="float32"), ["conv1.weight"]),
        (lambda r: r["plan"]["tensors"].pop("fc2.bias"), ["fc2.bias"]),
        (_swap_hashes, ["conv1"]),
    ],
    ids=[
        *("order", "too long", "other group", "weights", "unknown client", "counts", "keep"),
        *("keep unknown", "dtype", "plan", "sources"),
    ],
)
def test_an_edit_that_only_the_clients_show_is_found_with_them(
    change: Callable[[Record], object], says: list[str], merged: Path, nets: list[Path], cli: Cli
) -> None:
    edit(merged, change)
    differs(cli, merged, *nets, says=says)


def test_without_the_clients_another_order_of_units_goes_unnoticed(merged: Path, cli: Cli) -> None:
    edit(merged, _assign("a", "conv1", lambda u: u[::-1]))
    assert "not recomputed" in cli.done("verify", merged).out


def test_a_wrong_client_is_named(merged: Path, nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    wrong = save(dict(ZOO["lenet"].fresh(99).state_dict()), tmp_path / "wrong.pt")
    says = ["wrong.pt is none of the recorded clients", "client c (c.pt) is not among"]
    differs(cli, merged, *nets[:2], wrong, says=says)


def test_a_client_changed_since_is_named(merged: Path, nets: list[Path], cli: Cli) -> None:
    save({name: tensor + 1 for name, tensor in load(nets[1]).items()}, nets[1])
    differs(cli, merged, *nets, says=["b.pt is none of", "client b (b.pt)"])


def test_a_missing_client_is_named(merged: Path, nets: list[Path], cli: Cli) -> None:
    outcome = differs(cli, merged, *nets[:2], says=["client c (c.pt) is not among"])
    assert "recomputed from" not in outcome.out
    found = cli("verify", merged, *nets[:2], "--json").json
    assert found["ok"] is False
    assert found["recomputed"] == 0


def test_a_moved_and_renamed_client_is_still_the_same(
    merged: Path, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    moved = [path.rename(tmp_path / f"renamed-{path.name}") for path in nets]
    cli.done("verify", merged, *moved)


@pytest.mark.parametrize("record", [None, "", "{", "[]", "\udcff"])
def test_a_file_without_a_readable_record_is_refused(
    record: str | None, merged: Path, nets: list[Path], cli: Cli
) -> None:
    path = Path(f"{merged}.json")
    if record is None:
        path.unlink()
    else:
        path.write_text(record, encoding="utf-8", errors="surrogateescape")
    cli.refused("verify", merged, *nets, code=1, says=["record"] if record != "\udcff" else [])


def test_a_client_has_no_record_to_verify(nets: list[Path], cli: Cli) -> None:
    cli.refused("verify", nets[0], code=1, says=["a.pt", "no merge record"])
