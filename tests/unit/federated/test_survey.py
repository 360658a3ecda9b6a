"""Runs whose data only clients can open."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmerge
from fedmerge.engines import LocalEngine, Outcome, Task
from fedmerge.training import Shard, evaluate, find_task, read_shard
from fedmerge.user_code import derived_seed
from tests.unit.federated.nets import code, deep_mlp, save_clients, state_of, write_shards
from tests.unit.federated.runs import options_for

METHODS = ("fedma", "fedavg", "fedprox")


class Sites(LocalEngine):
    """An engine whose clients' data are there while one of their tasks runs, and never else."""

    def __init__(self, clients: Iterable[str], vault: Path, place: Path) -> None:
        super().__init__(tuple(clients))
        self._vault, self._place = vault, place
        self.opened: list[str] = []

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        for task in tasks:
            shutil.copytree(self._vault / task.client, self._place / task.client)
            try:
                [outcome] = super().run([task], timeout=timeout)
            finally:
                shutil.rmtree(self._place / task.client)
            self.opened.append(task.id)
            yield outcome


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """Return a folder of all data, and the empty one at which the clients find theirs."""
    shards = write_shards(tmp_path / "shards", "deep_mlp", {"a": 1, "b": 2, "c": 3})
    for name in "abc":
        (tmp_path / "vault" / name).mkdir(parents=True)
        (shards / f"{name}.npz").rename(tmp_path / "vault" / name / "data.npz")
    (tmp_path / "sites").mkdir()
    return tmp_path / "vault", tmp_path / "sites"


def sited(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, output: Path, **changes: Any
) -> tuple[fedmerge.Retrained, Sites]:
    """Run three clients whose data are out of the server's reach."""
    clients = {name: state_of("deep_mlp", seed) for seed, name in enumerate("abc")}
    sites = Sites("abc", *places)
    monkeypatch.setattr(fedmerge.Running, "start_engine", lambda running, names: sites)
    done = fedmerge.retrain(
        clients,
        str(places[1] / "{client}" / "data.npz"),
        options_for(**changes),
        model=code("deep_mlp"),
        output=output,
    )
    return done, sites


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_run_needs_no_data_on_the_server(
    method: str, places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, sites = sited(
        places, monkeypatch, tmp_path / "g.pt", method=method, rounds=3, batch_size=8
    )
    assert not list(places[1].iterdir())
    assert sites.opened[:3] == ["look/a", "look/b", "look/c"]
    assert sites.opened[-3:] == ["3/a", "3/b", "3/c"]
    assert [entry.samples for entry in done.shards] == [24, 24, 24]
    assert not done.missing


def test_the_record_names_no_place_of_a_clients_data(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sited(places, monkeypatch, tmp_path / "g.pt")
    text = (tmp_path / "g.pt.json").read_text()
    for part in ("sites", "data.npz", "vault", str(tmp_path)):
        assert part not in text
    shards = json.loads(text)["retrain"]["shards"]
    assert [set(entry) for entry in shards] == [{"client", "sha256", "samples", "class_counts"}] * 3


def test_the_same_data_within_reach_give_the_same_model(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sited(places, monkeypatch, tmp_path / "far.pt", batch_size=8)
    monkeypatch.undo()
    near = tmp_path / "near"
    near.mkdir()
    for name in "abc":
        shutil.copy(places[0] / name / "data.npz", near / f"{name}.npz")
    clients = {name: state_of("deep_mlp", seed) for seed, name in enumerate("abc")}
    for seed, name in ((0, "same.pt"), (1, "other.pt")):
        options = options_for(batch_size=8, matching=fedmerge.MatchOptions(seed=seed))
        fedmerge.retrain(clients, near, options, model=code("deep_mlp"), output=tmp_path / name)
    far = (tmp_path / "far.pt").read_bytes()
    assert (tmp_path / "same.pt").read_bytes() == far
    assert (tmp_path / "other.pt").read_bytes() != far


def test_class_counts_stay_with_the_clients_if_asked(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, _ = sited(places, monkeypatch, tmp_path / "told.pt")
    kept, _ = sited(places, monkeypatch, tmp_path / "kept.pt", no_class_counts=True)
    assert [entry.class_counts for entry in kept.shards] == [None] * 3
    assert all(entry.class_counts is not None for entry in told.shards)
    assert not any("last layer is averaged by client weights" in w for w in kept.warnings)
    assert not np.array_equal(told.arrays["4.bias"], kept.arrays["4.bias"])
    assert np.array_equal(told.arrays["0.bias"], kept.arrays["0.bias"])


LOADING = """
import os, signal
from pathlib import Path
import numpy as np

HERE = Path(__file__).parent

def load(client):
    if str(os.getpid()) == (HERE / "server").read_text():
        raise RuntimeError("the server looks at the data of " + client)
    if client == "b" and not (HERE / "tried").exists():
        (HERE / "tried").touch()
        TROUBLE()
    with np.load(HERE / "shards" / (client + ".npz")) as shard:
        return shard["x"], shard["y"]
"""
TROUBLES = {
    "app": "def TROUBLE(): raise RuntimeError('no data today')",
    "lost": "def TROUBLE(): os.kill(os.getpid(), signal.SIGKILL)",
    "timeout": "import time\ndef TROUBLE(): time.sleep(1000)",
}


@pytest.mark.parametrize("status", TROUBLES)
def test_who_hangs_or_crashes_in_its_first_trial_joins_later(status: str, tmp_path: Path) -> None:
    (tmp_path / "server").write_text(str(os.getpid()))
    (tmp_path / "data.py").write_text(LOADING + TROUBLES[status])
    write_shards(tmp_path / "shards", "deep_mlp", {"a": 1, "b": 2, "c": 3})
    states = {name: state_of("deep_mlp", seed) for seed, name in enumerate("abc")}
    prepared: list[fedmerge.federated.Run] = []
    done = fedmerge.retrain(
        save_clients(tmp_path, states),
        f"{tmp_path / 'data.py'}:load",
        options_for(),
        model=code("deep_mlp"),
        running=fedmerge.Running(
            engine="processes",
            workers=1,
            device="cpu",
            policy=fedmerge.RetryPolicy(retries=0, timeout=20 if status == "timeout" else None),
        ),
        prepared=prepared.append,
    )
    assert [entry.samples for entry in done.shards] == [24, None, 24]
    assert not done.missing
    assert any("b could not be tried before the first round" in w for w in done.warnings)
    assert any(note.startswith("b could not be tried, ") for note in prepared[0].notes)
    with pytest.raises(fedmerge.TrainingError, match="the server looks at the data of a"):
        fedmerge.retrain(  # in the server's own process
            save_clients(tmp_path, states),
            f"{tmp_path / 'data.py'}:load",
            options_for(),
            model=code("deep_mlp"),
        )


def test_a_run_goes_on_with_what_it_was_told_at_its_start(tmp_path: Path) -> None:
    """Client b is away at the start and there on resumption, or the other way round."""
    states = {name: state_of("deep_mlp", seed) for seed, name in enumerate("abc")}
    (tmp_path / "server").write_text("")
    (tmp_path / "data.py").write_text(LOADING + TROUBLES["app"])
    write_shards(tmp_path / "shards", "deep_mlp", {"a": 1, "b": 2, "c": 3})
    finals = []
    for first, second in (("away", "there"), ("there", "away")):
        steps = {
            "away": lambda: (tmp_path / "tried").unlink(missing_ok=True),
            "there": lambda: None,
        }
        (tmp_path / "tried").touch()
        for number, which in enumerate((first, second)):
            steps[which]()
            options = options_for(method="fedavg", rounds=2)
            done = fedmerge.retrain(
                save_clients(tmp_path, states),
                f"{tmp_path / 'data.py'}:load",
                options,
                model=code("deep_mlp"),
                running=fedmerge.Running(policy=fedmerge.RetryPolicy(retries=0)),
                work_dir=tmp_path / first,
                resume=bool(number),
                output=tmp_path / f"{first}.pt",
            )
            finals.append([entry.samples for entry in done.shards])
    assert finals == [[24, None, 24]] * 2 + [[24] * 3] * 2


def test_what_clients_hold_out_measures_global_models_and_trains_none(
    places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, sites = sited(
        places, monkeypatch, tmp_path / "g.pt", method="fedavg", rounds=2, held_out=0.25
    )
    assert [entry.samples for entry in done.shards] == [18, 18, 18]
    assert sites.opened[-3:] == [f"evaluation/{name}" for name in "abc"]
    model = fedmerge.load_model(deep_mlp, done)
    parts = []
    for name in "abc":
        shard = read_shard(places[0] / name / "data.npz", client=name)
        parts.append(shard.split(0.25, derived_seed(0, "held out", name)))
    held = [evaluate(model, part, find_task("classification")) for _, part in parts]
    found = done.rounds[-1].metrics
    assert found is not None
    expected = np.mean([e.metrics["accuracy"] for e in held])
    assert found["held_out_accuracy"] == pytest.approx(expected, abs=1e-12)
    trained = [evaluate(model, part, find_task("classification")) for part, _ in parts]
    of_training = np.mean([e.metrics["accuracy"] for e in trained])
    assert found["held_out_accuracy"] != pytest.approx(of_training, abs=1e-3)
    whole, _ = sited(places, monkeypatch, tmp_path / "w.pt", method="fedavg", rounds=2)
    assert whole.rounds[-1].metrics is None
    assert not np.array_equal(whole.arrays["0.bias"], done.arrays["0.bias"])


def test_parts_of_a_shard_are_disjoint_and_whole() -> None:
    shard = Shard("a", np.arange(10.0), np.arange(10))
    trained, held = shard.split(0.3, seed=1)
    assert (len(trained), len(held)) == (7, 3)
    assert sorted([*trained.y, *held.y]) == list(range(10))
    assert held.y.tolist() != shard.split(0.3, seed=2)[1].y.tolist()
    with pytest.raises(fedmerge.TrainingError, match="a: one sample, nothing can be held out"):
        Shard("a", np.arange(1.0), np.arange(1)).split(0.3, seed=1)
