"""What is refused, with which code and words, and that nothing is left behind."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.end_to_end.helpers import (
    TIGHT,
    Cli,
    State,
    independent,
    listing,
    load,
    process,
    record_of,
    save,
    save_all,
)
from tests.end_to_end.malice import Payload, save_legacy, save_old_raw, save_raw, save_zip
from tests.zoo import ZOO


def refused(cli: Cli, folder: Path, *arguments: object, code: int, says: list[str]) -> str:
    """Run a command that must fail and change nothing in the folder; return its stderr."""
    before = listing(folder)
    outcome = cli.refused(*arguments, code=code, says=says)
    assert listing(folder) == before
    return outcome.err


# Outputs


@pytest.mark.parametrize("existing", ["global.pt", "global.pt.json"])
def test_an_existing_output_or_record_is_not_overwritten(
    existing: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / existing).write_text("mine")
    command = ("match", *nets, "-o", tmp_path / "global.pt")
    refused(cli, tmp_path, *command, code=2, says=[existing, "--force"])
    cli.done(*command, "--force")
    assert record_of(tmp_path / "global.pt")["sources"][0]["file"] == "a.pt"
    assert load(tmp_path / "global.pt")["conv1.weight"].ndim == 4


def test_the_existing_output_is_noticed_before_any_file_is_read(tmp_path: Path, cli: Cli) -> None:
    for name in ("a.pt", "b.pt", "global.pt"):
        (tmp_path / name).write_text("no checkpoint")
    command = ("match", tmp_path / "a.pt", tmp_path / "b.pt", "-o", tmp_path / "global.pt")
    refused(cli, tmp_path, *command, code=2, says=["global.pt", "--force"])


@pytest.mark.parametrize("disguise", ["itself", "dotted", "symlink", "hardlink", "folder link"])
@pytest.mark.parametrize("command", ["match", "convert", "plan"])
def test_an_input_is_never_the_output_even_with_force(
    command: str, disguise: str, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    target = nets[0].parent / "out.pt"
    if disguise == "itself":
        target = nets[0]
    elif disguise == "dotted":
        target = nets[0].parent / ".." / "in" / "a.pt"
    elif disguise == "symlink":
        target.symlink_to(nets[0])
    elif disguise == "hardlink":
        os.link(nets[0], target)
    else:
        (tmp_path / "link").symlink_to(nets[0].parent)
        target = tmp_path / "link" / "a.pt"
    inputs = nets[:1] if command == "convert" else nets
    refused(cli, tmp_path, *(command, *inputs, "-o", target, "--force"), code=2, says=["input"])


def test_an_output_within_a_folder_of_clients_is_not_an_input_of_the_next_run(
    nets: list[Path], cli: Cli
) -> None:
    folder = nets[0].parent
    cli.done("match", folder, "-o", folder / "global.pt")
    first = (folder / "global.pt").read_bytes()
    cli.done("match", folder, "-o", folder / "global.pt", "--force")
    assert (folder / "global.pt").read_bytes() == first
    cli.done("verify", folder / "global.pt", folder)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("global.zip", [".safetensors"]),
        ("global", [".pt"]),
        ("absent/global.pt", ["folder"]),
        ("in", [".pt"]),
    ],
)
def test_an_output_that_cannot_be_written_is_noticed_before_any_work(
    output: str, says: list[str], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    refused(cli, tmp_path, "match", *nets, "-o", tmp_path / output, code=2, says=says)


def test_plan_and_convert_overwrite_only_when_told(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    for command, name in (("plan", "plan.json"), ("convert", "plain.pt")):
        (tmp_path / name).write_text("mine")
        refused(
            cli,
            tmp_path,
            *(command, nets[0], "-o", tmp_path / name),
            code=2,
            says=[name, "--force"],
        )
        cli.done(command, nets[0], "-o", tmp_path / name, "--force")
        assert (tmp_path / name).read_bytes() != b"mine"


def test_a_failed_merge_leaves_the_earlier_result_untouched(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    """The NaN stands in the last tensor, which is read when the others are already written."""
    cli.done("match", *nets, "-o", tmp_path / "global.pt")
    state = load(nets[1])
    state["fc2.bias"][2] = float("nan")
    save(state, nets[1])
    refused(
        cli,
        tmp_path,
        *("match", *nets, "-o", tmp_path / "global.pt", "--force"),
        code=1,
        says=["b.pt", "'fc2.bias'", "1 NaN"],
    )


# Arguments


@pytest.mark.parametrize("given", ["file", "folder", "glob"])
def test_fewer_than_two_clients_are_too_few(given: str, tmp_path: Path, cli: Cli) -> None:
    folder = tmp_path / "in"
    save_all(independent("mlp", 1), folder)
    argument = {"file": folder / "a.pt", "folder": folder, "glob": folder / "*.pt"}[given]
    command = ("match", argument, "-o", tmp_path / "global.pt")
    refused(cli, tmp_path, *command, code=2, says=["two"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--set", "match_threshold=0"], ["--set match_threshold"]),
        (["--set", "match_threshold=1.5"], ["--set match_threshold"]),
        (["--set", "match_threshold=nan"], ["--set match_threshold"]),
        (["--set", "match_threshold=half"], ["--set match_threshold"]),
        (["--max-growth", "0.9"], ["--max-growth", "from 1"]),
        (["--max-growth", "much"], ["--max-growth", "none"]),
        (["--max-growth", "nan"], ["--max-growth"]),
        (["--set", "gamma=0"], ["--set gamma"]),
        (["--set", "gamma=inf"], ["--set gamma"]),
        (["--set", "sigma=-1", "--set", "sigma0=1"], ["--set sigma"]),
        (["--set", "sweeps=-1"], ["--set sweeps"]),
        (["--seed", "-1"], ["--seed"]),
        (["--seed", "1.5"], ["--seed"]),
        (["--set", "solver=magic"], ["--set solver", "scipy"]),
        (["--method", "fedavg"], ["--method", "average"]),
        (["--set", "preset=thesis"], ["--set preset", "paper"]),
        (["--dtype", "int8"], ["--dtype", "bfloat16"]),
        (["--set", "weights=mean"], ["--set weights", "ema"]),
        (["--set", "flatten=0"], ["--set flatten"]),
        (["--set", "tie_breaker=2"], ["--set tie_breaker"]),
        (["--device", "abacus"], ["--device", "cpu"]),
        (["--set", "threads=0"], ["--set threads"]),
        (["--set", "client_weight=a"], ["--set client_weight", "NAME=W"]),
        (["--set", "client_weight=a=x"], ["--set client_weight", "NAME=W"]),
        (["--set", "client_weight=a=0"], ["--set client_weight"]),
        (["--set", "client_weight=a=-2"], ["--set client_weight"]),
        (["--set", "client_weight=z=2"], ["--set client_weight", "'z'", "a, b, c"]),
        (["--keep", "head.*"], ["--keep", "head.*"]),
        (["--set", "sigma=1"], ["--set sigma0"]),
        (["--set", "sigma0=1"], ["--set sigma"]),
        (
            ["--set", "sigma=1", "--set", "sigma0=1", "--set", "match_threshold=0.5"],
            ["--set match_threshold"],
        ),
        (["--set", "sigma=1", "--set", "sigma0=1", "--max-growth", "1.5"], ["--max-growth"]),
        (
            ["--set", "preset=paper", "--set", "match_threshold=0.5"],
            ["--set match_threshold", "preset=paper"],
        ),
        (["--set", "preset=paper", "--max-growth", "2"], ["--max-growth", "paper"]),
        (["--class-counts", "absent.json"], ["--class-counts"]),
        (["--class-counts", "{"], ["--class-counts"]),
        (["--class-counts", '{"a": 3}'], ["--class-counts"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_options_that_make_no_sense_are_usage_errors(
    options: list[str], says: list[str], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    command = ("match", *nets, "-o", tmp_path / "global.pt", *options)
    refused(cli, tmp_path, *command, code=2, says=says)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({"a": [1, 2, 3, 4], "b": [1, 2, 3, 4]}, ["a, b"]),
        ({"a": [1] * 4, "b": [1] * 4, "c": [1] * 4, "d": [1] * 4}, ["d"]),
        ({"a": [1] * 3, "b": [1] * 3, "c": [1] * 3}, ["3", "4"]),
        ({"a": [1] * 4, "b": [1] * 4, "c": [1] * 5}, ["5"]),
        ({"a": [1] * 4, "b": [1] * 4, "c": [1, 2, -3, 4]}, ["negative"]),
        ({"a": [1] * 4, "b": [1] * 4, "c": [1, 2, "3", 4]}, ["count per class"]),
        ([[1, 2, 3, 4]], ["count per class"]),
    ],
    ids=["client missing", "client unknown", "too few", "uneven", "negative", "text", "list"],
)
def test_class_counts_that_do_not_fit_are_usage_errors(
    counts: object, says: list[str], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "counts.json").write_text(json.dumps(counts))
    refused(
        cli,
        tmp_path,
        *("match", *nets, "-o", tmp_path / "global.pt"),
        *("--class-counts", tmp_path / "counts.json"),
        code=2,
        says=["--class-counts", *says],
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [(["--set", "client_weight=z=2"], ["'z'"]), (["--class-counts", '{"z": [1]}'], ["z"])],
    ids=["weights", "counts"],
)
def test_a_dry_run_finds_the_same_usage_errors(
    options: list[str], says: list[str], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    command = ("match", *nets, "-o", tmp_path / "global.pt", "--dry-run", *options)
    refused(cli, tmp_path, *command, code=2, says=says)


@pytest.mark.parametrize(
    ("text", "code"),
    [(None, (2, 3)), ("{", (2, 3)), ("[]", (3,)), ('{"tensors": {"conv1.weight": [1]}}', (3,))],
    ids=["absent", "no JSON", "no object", "wrong axes"],
)
def test_a_plan_that_cannot_be_used_is_refused(
    text: str | None, code: tuple[int, ...], nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    outcome = cli("match", *nets, "-o", tmp_path / "g.pt", "--plan", tmp_path / "plan.json")
    assert outcome.code in code
    assert outcome.err.startswith("error: ")
    assert not (tmp_path / "g.pt").exists()


def test_a_plan_typed_as_broken_json_is_an_error_and_no_crash(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    outcome = cli("match", *nets, "-o", tmp_path / "global.pt", "--plan", '{"tensors": ')
    assert outcome.code in (2, 3)
    assert outcome.err.startswith("error: ")


# Architectures


def lenet(**changes: torch.Tensor | None) -> State:
    state = dict(ZOO["lenet"].fresh(5).state_dict())
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del state[key]
        else:
            state[key] = tensor
    return state


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conv2__weight": torch.ones(6, 5, 5, 5)}, ["'conv2.weight'", "3", "5"]),
        ({"fc2__weight": torch.ones(7, 9), "fc2__bias": torch.ones(7)}, ["'fc2.weight'", "7", "4"]),
        ({"conv1__weight": torch.ones(5, 3, 3, 3)}, ["'conv1.weight'", "axis 1"]),
        ({"conv1__bias": torch.ones(5, 1)}, ["'conv1.bias'"]),
        ({"fc1__weight": torch.ones(9, 54)}, ["'fc1.weight'", "54", "24"]),
        ({"fc2__bias": None}, ["'fc2.bias'", "has no tensor"]),
        ({"fc3__bias": torch.ones(3)}, ["extra tensor 'fc3.bias'"]),
    ],
    ids=["kernel", "classes", "input", "axes", "flatten", "missing", "extra"],
)
def test_clients_of_different_architectures_are_refused_with_the_first_difference(
    changes: dict[str, torch.Tensor | None],
    says: list[str],
    nets: list[Path],
    tmp_path: Path,
    cli: Cli,
) -> None:
    other = save(lenet(**{k: t if t is None else t.double() for k, t in changes.items()}),
                 tmp_path / "other.pt")  # fmt: skip
    command = ("match", nets[0], other, "-o", tmp_path / "global.pt")
    refused(cli, tmp_path, *command, code=3, says=["other", *says])


def residual() -> State:
    torch.manual_seed(0)
    return {
        "conv1.weight": torch.randn(8, 3, 3, 3),
        "layer1.0.conv1.weight": torch.randn(8, 8, 3, 3),
        "layer1.0.downsample.0.weight": torch.randn(8, 8, 1, 1),
        "fc.weight": torch.randn(4, 8),
    }


def equal_widths() -> State:
    torch.manual_seed(0)
    names = {"alpha": (6, 5), "beta": (6, 6), "gamma": (6, 6), "delta": (3, 6)}
    return {f"{name}.weight": torch.randn(shape) for name, shape in names.items()}


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (residual(), ["downsample", "--model"]),
        (equal_widths(), ["skip", "--assume-chain", "--model"]),
        ({"blocks.qkv.weight": torch.ones(6, 2)}, ["qkv", "--model"]),
        ({"strange.tensor": torch.ones(6, 2)}, ["'strange.tensor'", "--model"]),
        ({"fc1.weight_g": torch.ones(6, 1), "fc1.weight_v": torch.ones(6, 2)}, ["fc1.weight_g"]),
        (
            {"conv1.weight": torch.ones(4, 1, 3, 3), "fc1.weight": torch.ones(3, 24)},
            ["fc1", "6", "--set flatten", "--model"],
        ),
        (
            {"conv1.weight": torch.ones(8, 3, 3, 3), "conv2.weight": torch.ones(8, 1, 3, 3)},
            ["conv2.weight", "--model"],
        ),
        ({"y.weight": torch.ones(5, 5), "x.weight": torch.ones(5, 5)}, ["y.weight", "--model"]),
    ],
    ids=[
        *("residual", "equal widths", "attention", "unknown leaf", "parametrised", "flatten"),
        *("depthwise", "embedding or linear"),
    ],
)
def test_nets_that_are_no_plain_chain_are_refused_with_a_way_out(
    state: State, says: list[str], tmp_path: Path, cli: Cli
) -> None:
    files = save_all([state, state], tmp_path)
    command = ("match", *files, "-o", tmp_path / "global.pt")
    refused(cli, tmp_path, *command, code=3, says=says)


def test_names_that_differ_are_refused_and_the_hint_works(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    state = load(nets[1])
    save({f"net_{name}": tensor for name, tensor in state.items()}, tmp_path / "other.pt")
    command = ("match", nets[0], tmp_path / "other.pt", "-o", tmp_path / "global.pt")
    says = ["other", "'conv1.weight'", "'net_conv1.weight'", "--set match_by_order=true"]
    refused(cli, tmp_path, *command, code=3, says=says)
    cli.done(*command, "--set", "match_by_order=true")
    cli.done("match", *nets[:2], "-o", tmp_path / "same.pt")
    followed, same = load(tmp_path / "global.pt"), load(tmp_path / "same.pt")
    assert list(followed) == list(same)
    assert all(torch.equal(followed[name], same[name]) for name in same)
    cli.done("verify", tmp_path / "global.pt", nets[0], tmp_path / "other.pt")


def test_by_order_is_not_offered_where_shapes_differ(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    state = {f"net_{name}": tensor for name, tensor in load(nets[1]).items()}
    state["net_fc2.bias"] = torch.ones(7)
    save(state, tmp_path / "other.pt")
    command = ("match", nets[0], tmp_path / "other.pt", "-o", tmp_path / "global.pt")
    for extra in ((), ("--set", "match_by_order=true")):
        err = refused(cli, tmp_path, *command, *extra, code=3, says=["'net_conv1.weight'"])
        assert "match_by_order" not in err


def test_mixed_dtypes_are_refused_and_the_hint_works(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    half = {name: tensor.half() for name, tensor in load(nets[1]).items()}
    files = [nets[0], save(half, tmp_path / "half.pt")]
    command = ("match", *files, "-o", tmp_path / "global.pt")
    refused(cli, tmp_path, *command, code=3, says=["half", "float16", "float64", "--dtype"])
    cli.done(*command, "--dtype", "float32")
    assert {t.dtype for t in load(tmp_path / "global.pt").values()} == {torch.float32}
    cli.done("verify", tmp_path / "global.pt", *files)


def test_a_dtype_too_small_for_the_values_is_refused(tmp_path: Path, cli: Cli) -> None:
    states = [{k: 1e6 * t for k, t in s.items()} for s in independent("mlp", 2)]
    files = save_all(states, tmp_path)
    command = ("match", *files, "-o", tmp_path / "global.pt", "--dtype", "float16")
    refused(cli, tmp_path, *command, code=1, says=["float16", "--dtype"])


# Unsafe files


@pytest.mark.parametrize("save_payload", [save_zip, save_legacy, save_raw, save_old_raw])
@pytest.mark.parametrize("command", ["match", "inspect", "plan", "convert", "verify"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    save_payload: Callable[[Payload, Path], None],
    command: str,
    nets: list[Path],
    tmp_path: Path,
    cli: Cli,
) -> None:
    evil, mark = tmp_path / "evil.pt", tmp_path / "ran"
    save_payload(Payload(mark), evil)
    before = listing(tmp_path)
    arguments: dict[str, list[str | Path]] = {
        "match": [nets[0], evil, "-o", tmp_path / "global.pt"],
        "inspect": [nets[0], evil],
        "plan": [evil],
        "convert": [evil, "-o", tmp_path / "plain.pt"],
        "verify": [evil],
    }
    outcome = cli(command, *arguments[command])
    assert outcome.code == 4
    said = outcome.out if command == "inspect" else outcome.err
    assert "evil.pt" in said
    assert "pathlib" in said
    assert "Traceback" not in outcome.err
    assert listing(tmp_path) == before
    if save_payload is save_zip:
        torch.load(evil, weights_only=False)
        assert mark.exists(), "the payload would have run"


def test_a_real_process_refuses_a_malicious_file(nets: list[Path], tmp_path: Path) -> None:
    save_zip(Payload(tmp_path / "ran"), tmp_path / "evil.pt")
    outcome = process("match", nets[0], "evil.pt", "-o", "global.pt", cwd=tmp_path)
    assert outcome.code == 4
    assert {path.name for path in tmp_path.iterdir()} == {"in", "evil.pt"}


def test_a_class_that_is_allowed_by_name_is_admitted(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    from argparse import Namespace

    torch.save({"state_dict": load(nets[1]), "args": Namespace(lr=0.1)}, tmp_path / "b.ckpt")
    command = ("match", nets[0], tmp_path / "b.ckpt", "-o", tmp_path / "global.pt")
    err = refused(cli, tmp_path, *command, code=4, says=["argparse.Namespace"])
    assert "--allow-global argparse.Namespace" in err
    cli.done(*command, "--allow-global", "argparse.Namespace")
    verify = ("verify", tmp_path / "global.pt", nets[0], tmp_path / "b.ckpt")
    cli.refused(*verify, code=4, says=["--allow-global argparse.Namespace"])
    cli.done(*verify, "--allow-global", "argparse.Namespace")


def test_a_pickled_module_that_asks_for_more_is_refused_with_a_recipe(
    nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net.options = argparse.Namespace(lr=0.1)  # type: ignore[assignment]
    torch.save(net, tmp_path / "module.pt")
    refused(
        cli,
        tmp_path,
        *("match", nets[0], tmp_path / "module.pt", "-o", tmp_path / "g.pt"),
        code=4,
        says=["module.pt", "argparse.Namespace", "state_dict()"],
    )


# Unusable files


def _truncated(state: State, path: Path) -> None:
    save(state, path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _text(content: bytes) -> Callable[[State, Path], None]:
    return lambda _, path: (path.write_bytes(content), None)[1]


def _spoilt(name: str, value: float) -> Callable[[State, Path], None]:
    def write(state: State, path: Path) -> None:
        state[name].view(-1)[1] = value
        save(state, path)

    return write


def _optimizer(state: State, path: Path) -> None:
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    weights.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.save(optimizer.state_dict(), path)


UNUSABLE: dict[str, tuple[str, Callable[[State, Path], None], list[str]]] = {
    "truncated zip": ("x.pt", _truncated, ["truncated"]),
    "truncated safetensors": ("x.safetensors", _truncated, ["truncated"]),
    "empty": ("x.pt", _text(b""), ["empty"]),
    "LFS pointer": (
        "x.pt",
        _text(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"),
        ["LFS", "git lfs pull"],
    ),
    "web page": ("x.pt", _text(b"<!DOCTYPE html><html></html>"), ["web page"]),
    "text": ("x.pt", _text(b"hello"), ["not a checkpoint"]),
    "noise": ("x.pt", _text(bytes(range(255, 0, -1)) * 9), ["not a checkpoint"]),
    "optimizer only": ("x.pt", _optimizer, ["optimizer"]),
    "integers only": ("x.pt", lambda _, p: torch.save({"a": torch.ones(2).int()}, p), ["float"]),
    "no tensors": ("x.pt", lambda _, p: torch.save({"epoch": 3}, p), ["no state dict"]),
    "NaN": ("x.pt", _spoilt("conv1.weight", float("nan")), ["'conv1.weight'", "1 NaN", "45"]),
    "infinity": ("x.safetensors", _spoilt("fc2.bias", float("-inf")), ["'fc2.bias'", "1 infinite"]),
    "absent": ("x.pt", lambda _, p: None, ["no such file"]),
    "folder": ("x.pt", lambda _, p: p.mkdir(), ["folder"]),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", list(UNUSABLE))
def test_an_unusable_file_is_named_with_the_reason(
    kind: str, place: int, nets: list[Path], tmp_path: Path, cli: Cli
) -> None:
    name, write, says = UNUSABLE[kind]
    bad = tmp_path / name
    write(load(nets[1]), bad)
    clients = [nets[0]]
    clients.insert(place, bad)
    command = ("match", *clients, "-o", tmp_path / "global.pt")
    err = refused(cli, tmp_path, *command, code=1, says=says)
    assert name in next(line for line in err.splitlines() if line.startswith("error: "))


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_named(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    nets[1].chmod(0)
    outcome = cli.refused("match", *nets, "-o", tmp_path / "g.pt", code=1, says=["b.pt"])
    nets[1].chmod(0o644)
    assert "Permission" in outcome.err


def test_a_merge_of_weights_near_zero_is_still_exact(tmp_path: Path, cli: Cli) -> None:
    """All-zero layers are odd but no error."""
    states = independent("mlp", 2)
    for state in states:
        state["2.weight"].zero_()
        state["2.bias"].zero_()
    cli.done("match", *save_all(states, tmp_path), "-o", tmp_path / "global.pt")
    assert float(load(tmp_path / "global.pt")["2.weight"].abs().max()) < TIGHT
