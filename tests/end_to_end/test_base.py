"""Fine-tunes of a base model that is given: what they changed of it is merged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmerge
from fedmerge.checkpoint import read_record
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.values import Float64Array
from tests.end_to_end.helpers import Cli, State, load

FLOAT32 = 1e-6  # of numbers near 1, added in double precision and stored in single
NET = """
from torch import nn


def build():
    layers = (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    return nn.Sequential(*layers)
"""


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    return nn.Sequential(*layers)


def fine_tuned(base: State, seed: int, *, without: str = "nothing", size: float = 0.02) -> State:
    """Return a base with small changes of all tensors but those whose names begin so."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: value
        if name.startswith(without)
        else value + size * torch.randn(value.shape, generator=rng)
        for name, value in base.items()
    }


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Write a base, a client that leaves its last layer as it is, and one that changes all."""
    base = net(0).state_dict()
    states = {
        "base": base,
        "a": fine_tuned(base, 1, without="4."),
        "b": fine_tuned(base, 2),
        "other": net(9).state_dict(),
    }
    for name, state in states.items():
        torch.save(state, tmp_path / f"{name}.pt")
    (tmp_path / "net.py").write_text(NET)
    return [tmp_path / f"{name}.pt" for name in states]


def test_the_whole_mean_change_is_the_average(files: list[Path]) -> None:
    base, a, b, _ = files
    merged = fedmerge.match([a, b], base=base).state_dict()
    mean = fedmerge.match([a, b], method="average").state_dict()
    for name, value in merged.items():
        torch.testing.assert_close(value, mean[name], rtol=0, atol=FLOAT32)
    twice = fedmerge.match([a, b], base=base, scale=2).state_dict()
    for name, start in load(base).items():
        torch.testing.assert_close(
            twice[name] - start, 2 * (mean[name] - start), rtol=0, atol=4 * FLOAT32
        )
        assert not torch.allclose(twice[name], mean[name], rtol=0, atol=FLOAT32)


def test_clients_count_by_their_weights(files: list[Path]) -> None:
    base, a, b, _ = files
    merged = fedmerge.match([a, b], base=base, client_weight={"a": 3}).state_dict()
    one, two = load(a), load(b)
    expected = (3 * one["0.weight"] + two["0.weight"]) / 4
    torch.testing.assert_close(merged["0.weight"], expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("dials", [(), ("--method", "average"), ("--set", "scale=0.5")])
def test_merges_of_changes_are_recomputed_from_base_and_clients(
    cli: Cli, files: list[Path], tmp_path: Path, dials: tuple[str, ...]
) -> None:
    base, a, b, other = files
    out = tmp_path / "m.pt"
    done = cli.done("match", a, b, "--base", base, *dials, "-o", out)
    assert f"fedmerge verify {out} {a} {b} --base {base}" in done.out
    assert "recomputed from its 2 clients: equal" in cli.done(*done.last_line.split()[1:]).out
    says = ["merge is of what its clients changed of base", "--base"]
    cli.refused("verify", out, a, b, code=2, says=says)
    cli.refused("verify", out, a, b, "--base", other, code=2, says=["not the recorded base model"])
    state = torch.load(out)
    state["0.bias"][0] += 1
    record = json.loads(Path(f"{out}.json").read_text())
    changed = tmp_path / "changed.pt"
    torch.save(state, changed)
    Path(f"{changed}.json").write_text(json.dumps(record))
    differs = cli("verify", changed, a, b, "--base", base)
    assert differs.code == 1
    assert "'0.bias' differs" in differs.err


def test_a_mean_change_that_works_is_kept(cli: Cli, files: list[Path], tmp_path: Path) -> None:
    base, a, b, _ = files
    out = tmp_path / "m.pt"
    given = ("--base", base, "--model", f"{tmp_path}/net.py:build", "--json")
    found = cli.done("match", a, b, *given, "-o", out).json
    assert set(found["quality"]["candidates"]) == {"base + 1 × mean change"}
    assert found["base"]["scale"] == 1
    one = cli.done("match", a, b, *given, "--set", "scale=1.5", "-o", out, "--force").json
    assert one["quality"]["chosen"] == "base + 1.5 × mean change"
    assert one["base"]["scale"] == 1.5
    fit = cli.done(
        "match", a, b, *given, "--set", "merge_units=fit-in-place", "-o", out, "--force"
    ).json
    assert fit["quality"]["chosen"] == "average, fit in place"
    assert fit["base"]["scale"] is None
    distances = [own["quality"]["agreement"]["distance"] for own in (fit, found, one)]
    assert distances == sorted(distances)


def test_where_it_does_not_work_the_nearest_to_the_ensemble_is_chosen(
    cli: Cli, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, a, b, _ = files
    out, again = tmp_path / "m.pt", tmp_path / "again.pt"
    given = ("--base", base, "--model", f"{tmp_path}/net.py:build", "--json")
    monkeypatch.setattr("fedmerge.merging.fine_tunes.works", lambda *_, **__: False)
    found = cli.done("match", a, b, *given, "-o", out).json
    tried = found["quality"]["candidates"]
    scales = ("0.25", "0.5", "0.75", "1", "1.25")
    expected = [f"base + {scale} × mean change" for scale in scales]
    assert set(tried) == {"average, fit in place", *expected}
    chosen = found["quality"]["chosen"]
    assert tried[chosen]["distance"] == min(own["distance"] for own in tried.values())
    cli.done("match", a, b, *given, "--config", f"{out}.json", "-o", again)
    assert again.read_bytes() == out.read_bytes()


def numbers(state: State, axes: int = 1) -> Float64Array:
    """Return all numbers of the tensors that have so many axes."""
    return np.concatenate(
        [value.double().numpy().ravel() for value in state.values() if value.dim() >= axes]
    )


def test_what_clients_changed_is_told(cli: Cli, files: list[Path], tmp_path: Path) -> None:
    base, a, b, _ = files
    found = cli.done("match", a, b, "--base", base, "-o", tmp_path / "m.pt", "--json").json["base"]
    whole = [numbers(load(file)) for file in (base, a, b)]
    assert found["partial"] == pytest.approx(
        np.mean((whole[1] == whole[0]) != (whole[2] == whole[0]))
    )
    states = [numbers(load(file), axes=2) for file in (base, a, b)]
    one, two = (own - states[0] for own in states[1:])
    lengths = [np.linalg.norm(own) for own in (states[0], one, two)]
    assert found["changes"] == pytest.approx(
        {"a": lengths[1] / lengths[0], "b": lengths[2] / lengths[0]}
    )
    assert found["cosine"] == pytest.approx(one @ two / lengths[1] / lengths[2])
    assert found["name"] == "base"


def test_bases_that_do_not_fit_are_refused(files: list[Path]) -> None:
    base, a, b, other = files
    with pytest.raises(ArchitectureError, match=r"a is no fine-tune of other: .* 1\.[34]\d times"):
        fedmerge.match([a, b], base=other)
    scales = {"norm.weight": torch.full((64,), 100.0)}  # which every net has alike
    nets = [load(file) | scales for file in (a, b, other)]
    with pytest.raises(ArchitectureError, match=r"client-1 is no fine-tune of base"):
        fedmerge.match(nets[:2], base=nets[2])
    deeper = {f"body.{name}": value for name, value in load(base).items()}
    small = {"0.weight": load(base)["0.weight"]}
    with pytest.raises(ArchitectureError, match=r"base: is no base of a: 5 of 6 tensors"):
        fedmerge.match([a, b], base=small)
    with pytest.raises(ArchitectureError, match=r"is no base of a: 6 of 6"):
        fedmerge.match([a, b], base=deeper)
    with pytest.raises(UsageError, match=r"`base` is 4 files, expected one"):
        fedmerge.match([a, b], base=a.parent)
    with pytest.raises(UsageError, match=r"`scale` says nothing without `base`"):
        fedmerge.match([a, b], scale=1.5)


@pytest.mark.parametrize(
    "said",
    [{"lead": "a"}, {"max_growth": 2}, {"method": "ensemble"}, {"match_threshold": 0.5}],
    ids=lambda said: next(iter(said)),
)
def test_options_of_matching_exclude_a_base(files: list[Path], said: dict[str, Any]) -> None:
    base, a, b, _ = files
    with pytest.raises(UsageError, match=r"and `base` exclude each other"):
        fedmerge.match([a, b], base=base, **said)


def test_heads_that_a_base_lacks_are_averaged(files: list[Path]) -> None:
    base, _, _, _ = files
    start = load(base)
    bare = {name: value for name, value in start.items() if not name.startswith("4.")}
    whole = {f"body.{name}": value for name, value in bare.items()}
    heads = [{"head.weight": torch.randn(5, 32)} for _ in range(2)]
    clients = [fine_tuned(whole, seed) | head for seed, head in enumerate(heads)]
    merge = fedmerge.match(clients, base=bare, scale=2)
    assert any("base has no 'head.weight'" in warning for warning in merge.warnings)
    merged = merge.state_dict()
    mean = (heads[0]["head.weight"] + heads[1]["head.weight"]) / 2
    torch.testing.assert_close(merged["head.weight"], mean, rtol=0, atol=FLOAT32)
    name = "body.0.weight"
    expected = clients[0][name] + clients[1][name] - whole[name]
    torch.testing.assert_close(merged[name], expected, rtol=0, atol=FLOAT32)


def test_who_changes_biases_alone_is_not_the_base(files: list[Path]) -> None:
    base, _, b, _ = files
    start = load(base)
    shifted = start | {"0.bias": start["0.bias"] + 0.1}
    merge = fedmerge.match([shifted, load(b)], base=base)
    assert not any("itself" in warning for warning in merge.warnings)
    expected = (shifted["0.bias"] + load(b)["0.bias"]) / 2
    torch.testing.assert_close(merge.state_dict()["0.bias"], expected, rtol=0, atol=FLOAT32)


def test_a_client_that_is_the_base_is_told(files: list[Path]) -> None:
    base, _, b, _ = files
    merge = fedmerge.match({"same": base, "b": b}, base=base)
    assert any("same is base itself" in warning for warning in merge.warnings)
    expected = (load(base)["0.weight"] + load(b)["0.weight"]) / 2
    torch.testing.assert_close(merge.state_dict()["0.weight"], expected, rtol=0, atol=FLOAT32)


def test_the_record_names_the_base(files: list[Path], tmp_path: Path) -> None:
    base, a, b, _ = files
    fedmerge.match([a, b], base=base, output=tmp_path / "m.pt")
    record = read_record(tmp_path / "m.pt")
    digest = hashlib.sha256(base.read_bytes()).hexdigest()
    found = record["base_model"]
    assert (found["name"], found["file"], found["sha256"]) == ("base", "base.pt", digest)
    assert record["options"]["scale"] == 1
