"""Averages of any files of equal names and shapes: no plan, in their own dtype, piece by piece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fedmerge
from fedmerge.checkpoint import read_record, values_digest
from tests.end_to_end.helpers import APART, Cli, State, load
from tests.zoo import ZOO

PLANLESS = "blocks.0.attention.qkv.weight"  # names whose meaning nobody can tell
LONG = (1 << 18) + 5  # numbers: more than one piece


def strange(seed: int, dtype: torch.dtype = torch.float32) -> State:
    """Return tensors of a net that no file alone explains, with buffers."""
    rng = torch.Generator().manual_seed(seed)
    return {
        PLANLESS: torch.randn(12, 4, generator=rng).to(dtype),
        "relative_bias": torch.randn(2, 3, 2, generator=rng).to(dtype),
        "scale": torch.randn((), generator=rng).to(dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
        "long": torch.randn(LONG, generator=rng).to(dtype),
        "positions": torch.arange(5),
        "steps": torch.tensor(seed),
    }


def write(folder: Path, suffix: str, dtype: torch.dtype, count: int = 2) -> list[Path]:
    """Write such nets, and return their files."""
    files = []
    for seed in range(1, count + 1):
        files.append(folder / f"{'abc'[seed - 1]}{suffix}")
        if suffix == ".safetensors":
            save_file(strange(seed, dtype), files[-1])
        else:
            torch.save(strange(seed, dtype), files[-1])
    return files


def means(dtype: torch.dtype, weights: list[float]) -> State:
    """Return the weighted means in double precision, through single, in a dtype."""
    states = [strange(seed, dtype) for seed in range(1, len(weights) + 1)]
    return {
        name: (
            torch.stack([w * s[name].double() for w, s in zip(weights, states, strict=True)]).sum(0)
            / sum(weights)
        )
        .to(torch.promote_types(dtype, torch.float32))
        .to(dtype)
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_any_equal_files_are_averaged_in_their_own_dtype(
    dtype: torch.dtype, suffix: str, tmp_path: Path, cli: Cli
) -> None:
    files = write(tmp_path, suffix, dtype, 3)
    output = tmp_path / f"mean{suffix}"
    options = ("--method", "average", "--set", "client_weight=b=2")
    found = cli.done("match", *files, "-o", output, *options, "--json").json
    assert (found["groups"], found["growth"], found["warnings"]) == ([], 1, [])
    merged = load_file(output) if suffix == ".safetensors" else load(output)
    for name, expected in means(dtype, [1, 2, 1]).items():
        assert merged[name].dtype == expected.dtype
        assert torch.equal(merged[name], expected), name
    assert not torch.equal(merged["long"], means(dtype, [1, 1, 1])["long"])
    assert "equal" in cli.done("verify", output, *files).out


def test_without_an_average_such_files_are_refused(tmp_path: Path, cli: Cli) -> None:
    files = write(tmp_path, ".pt", torch.float32)
    cli.refused("match", *files, "-o", tmp_path / "m.pt", code=3)


def test_a_planned_average_has_the_same_numbers(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    """Pieces at equal places, and units placed one by one, are two ways to one mean."""
    average = ("--method", "average")
    cli.done("plan", nets[0], "-o", tmp_path / "plan.json")
    cli.done("match", *nets, "-o", tmp_path / "a.pt", *average)
    cli.done("match", *nets, "-o", tmp_path / "b.pt", *average, "--plan", tmp_path / "plan.json")
    merge = fedmerge.match(nets, method="average", plan=fedmerge.plan(nets))
    slow = {name: merge.averaged(name) for name in merge.plan.tensors}
    assert [g["name"] for g in read_record(tmp_path / "b.pt")["groups"]] != []
    assert read_record(tmp_path / "a.pt")["groups"] == []
    for name, expected in load(tmp_path / "a.pt").items():
        assert torch.equal(load(tmp_path / "b.pt")[name], expected)
        assert torch.equal(torch.from_numpy(slow[name]), expected)
    cli.done("match", *nets, "-o", tmp_path / "c.pt", *APART)
    assert (
        load(tmp_path / "c.pt")["fc1.weight"].shape != load(tmp_path / "a.pt")["fc1.weight"].shape
    )


def test_a_changed_average_is_found(tmp_path: Path, cli: Cli) -> None:
    files = write(tmp_path, ".pt", torch.float32)
    output = tmp_path / "mean.pt"
    cli.done("match", *files, "-o", output, "--method", "average")
    state = load(output)
    state["long"][-1] += 1
    torch.save(state, output)
    record = json.loads(Path(f"{output}.json").read_text())
    record["tensors"]["long"] = values_digest([state["long"]], "float32")
    Path(f"{output}.json").write_text(json.dumps(record))
    assert "agree" in cli.done("verify", output).out
    outcome = cli("verify", output, *files)
    assert (outcome.code, "'long' is not what its clients" in outcome.err) == (1, True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_their_client(
    bad: float, tmp_path: Path, cli: Cli
) -> None:
    files = write(tmp_path, ".pt", torch.float32)
    state = load(files[1])
    state["long"][LONG - 2] = bad
    torch.save(state, files[1])
    what = "1 NaN" if bad != bad else "1 infinite"
    command = ("match", *files, "-o", tmp_path / "m.pt", "--method", "average")
    cli.refused(*command, code=1, says=[f"b.pt: 'long' has {what} of {LONG:,} values"])
    assert not (tmp_path / "m.pt").exists()


def test_sums_that_fit_no_more_are_refused(tmp_path: Path, cli: Cli) -> None:
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in files:
        torch.save({"x": torch.full((3,), 70000.0)}, path)
    command = ("match", *files, "-o", tmp_path / "m.pt", "--method", "average")
    says = ["3 values of 'x' do not fit into float16"]
    cli.refused(*command, "--dtype", "float16", code=1, says=says)
    cli.done(*command)


def test_integer_buffers_are_the_first_clients(tmp_path: Path, cli: Cli) -> None:
    files = write(tmp_path, ".pt", torch.float32)
    state = load(files[1])
    state["positions"] = state["positions"] + 1
    torch.save(state, files[1])
    outcome = cli.done("match", *files, "-o", tmp_path / "m.pt", "--method", "average")
    assert "'positions' differs between the clients; the first one's is taken" in outcome.err
    merged = load(tmp_path / "m.pt")
    assert merged["positions"].tolist() == [0, 1, 2, 3, 4]
    assert merged["steps"].item() == 1


def test_kept_tensors_and_ties_stay(tmp_path: Path, cli: Cli) -> None:
    files = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for seed, path in enumerate(files, start=1):
        state = strange(seed)
        state["tied"] = state[PLANLESS]
        torch.save(state, path)
    cli.done(
        *("match", *files, "-o", tmp_path / "m.pt", "--method", "average", "--keep", "relative*")
    )
    merged = load(tmp_path / "m.pt")
    assert torch.equal(merged["relative_bias"], strange(1)["relative_bias"])
    assert merged["tied"].data_ptr() == merged[PLANLESS].data_ptr()
    assert torch.equal(merged["tied"], means(torch.float32, [1, 1])[PLANLESS])


def test_class_counts_still_need_a_plan(tmp_path: Path, cli: Cli) -> None:
    files = write(tmp_path, ".pt", torch.float32)
    (tmp_path / "counts.json").write_text('{"a": [1], "b": [2]}')
    cli.refused(
        *("match", *files, "-o", tmp_path / "m.pt", "--method", "average"),
        *("--class-counts", tmp_path / "counts.json"),
        code=3,
    )


def test_torch_files_are_checked_against_their_checksums(tmp_path: Path, cli: Cli) -> None:
    files = write(tmp_path, ".pt", torch.float32)
    content = bytearray(files[1].read_bytes())
    content[len(content) // 2] ^= 1  # in the middle of `long`
    files[1].write_bytes(content)
    command = ("match", *files, "-o", tmp_path / "m.pt", "--method", "average")
    cli.refused(*command, code=1, says=["its bytes contradict their checksum"])


def test_no_code_is_run_for_an_average(nets: list[Path], tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "net.py").write_text("raise SystemExit('this must not run')")
    command = ("match", *nets, "--model", tmp_path / "net.py:Net", "--method", "average")
    cli.done(*command, "-o", tmp_path / "g.pt", "--report", tmp_path / "page.html")
    assert "g.pt: 3 clients" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert cli(*command[:-2], "-o", tmp_path / "h.pt").code != 0


def test_nets_of_any_plan_average_without_one() -> None:
    states = [ZOO["mlp"].fresh(seed=seed).state_dict() for seed in (1, 2)]
    merge = fedmerge.match(states, method="average")
    assert merge.plan.groups == ()
    for name, value in merge.state_dict().items():
        assert torch.equal(value, (states[0][name] + states[1][name]) / 2)
