"""States on disk: complete, equal to what was saved, and refused where they are another run's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmerge
from fedmerge.federated import STATE_FILE, WorkDir, first_difference
from tests.unit.federated.nets import code, save_clients, state_of, write_shards
from tests.unit.federated.runs import options_for, watched_run


@pytest.fixture
def clients(tmp_path: Path) -> tuple[list[Path], Path]:
    states = {name: state_of("Residual", seed) for seed, name in enumerate("ab")}
    shards = write_shards(tmp_path / "shards", "Residual", {"a": 1, "b": 2})
    return save_clients(tmp_path, states), shards


def test_a_saved_state_is_read_as_it_was(clients: tuple[list[Path], Path], tmp_path: Path) -> None:
    run, states, _ = watched_run(*clients, options_for(), model=code("Residual"))
    work_dir = WorkDir(tmp_path / "work")
    with work_dir.held():
        assert work_dir.begin(run, None) is None
        for state in states:
            work_dir.save(run, state)
            found = work_dir.load(run)
            assert found is not None
            assert found.rounds == state.rounds
            assert found.federation.groups == state.federation.groups
            pairs = zip(found.federation.locals, state.federation.locals, strict=True)
            for one, other in pairs:
                assert list(one.arrays) == list(other.arrays)
                for name, array in other.arrays.items():
                    assert one.arrays[name].dtype == array.dtype
                    assert np.array_equal(one.arrays[name], array)
            assert found.federation.widths == state.federation.widths
            assert set(found.federation.fixed) == set(state.federation.fixed)


@pytest.mark.parametrize("method", ["fedma", "fedavg", "afl"])
def test_a_run_goes_on_after_any_round_to_the_same_bytes(
    method: Any, clients: tuple[list[Path], Path], tmp_path: Path
) -> None:
    more = {"passes": 2} if method == "fedma" else {"rounds": 3}
    options = options_for(batch_size=8, method=method, **more)
    whole = fedmerge.retrain(*clients, options, model=code("Residual"), work_dir=tmp_path / "w")
    whole.write(tmp_path / "whole.safetensors")
    run, states, _ = watched_run(*clients, options, model=code("Residual"))
    for number, state in enumerate(states):
        work_dir = WorkDir(tmp_path / f"work-{number}")
        with work_dir.held():
            work_dir.begin(run, None)
            work_dir.save(run, state)
        result = fedmerge.retrain(
            *clients, options, model=code("Residual"), work_dir=work_dir.path, resume=True
        )
        result.write(tmp_path / f"{number}.safetensors")
        expected = (tmp_path / "whole.safetensors").read_bytes()
        assert (tmp_path / f"{number}.safetensors").read_bytes() == expected


def test_another_run_is_refused_by_its_first_difference(
    clients: tuple[list[Path], Path], tmp_path: Path
) -> None:
    paths, shards = clients
    place = tmp_path / "work"
    fedmerge.retrain(paths, shards, options_for(), model=code("Residual"), work_dir=place)
    for options, difference in (
        (options_for(epochs=2), "epochs is 2, was 1"),
        (options_for(passes=2), "passes is 2, was 1"),
        (options_for(matching=fedmerge.MatchOptions(seed=3)), "seed is 3, was 0"),
    ):
        with pytest.raises(fedmerge.UsageError, match=f"holds another run: {difference}"):
            fedmerge.retrain(
                paths, shards, options, model=code("Residual"), work_dir=place, resume=True
            )
    write_shards(shards, "Residual", {"b": 7})
    with pytest.raises(fedmerge.UsageError, match="another run: the shards of b are not the same"):
        fedmerge.retrain(
            paths, shards, options_for(), model=code("Residual"), work_dir=place, resume=True
        )


def test_a_folder_with_something_in_it_is_refused_without_resume(
    clients: tuple[list[Path], Path], tmp_path: Path
) -> None:
    place = tmp_path / "work"
    place.mkdir()
    (place / "note.txt").write_text("mine")
    with pytest.raises(fedmerge.UsageError, match="work: is not empty"):
        fedmerge.retrain(*clients, options_for(), model=code("Residual"), work_dir=place)
    assert [path.name for path in place.iterdir()] == ["note.txt"]


def test_resume_starts_from_the_beginning_where_nothing_began(
    clients: tuple[list[Path], Path], tmp_path: Path
) -> None:
    result = fedmerge.retrain(
        *clients, options_for(), model=code("Residual"), work_dir=tmp_path / "new", resume=True
    )
    assert len(result.rounds) == 4


def test_a_damaged_state_is_said_to_be_one(
    clients: tuple[list[Path], Path], tmp_path: Path
) -> None:
    place = tmp_path / "work"
    fedmerge.retrain(*clients, options_for(), model=code("Residual"), work_dir=place)
    state = place / STATE_FILE
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(fedmerge.CheckpointError, match=r"state\.safetensors: is damaged"):
        fedmerge.retrain(
            *clients, options_for(), model=code("Residual"), work_dir=place, resume=True
        )


def test_differences_are_named_from_outside_in() -> None:
    model = {"name": "CNN", "arguments": {}, "sha256": "7"}
    files = {"clients": {"a": "0", "b": "1"}, "shards": {"a": "2", "b": "3"}, "data": None}
    saved = {"options": {"epochs": 1}, "model": model, **files}
    assert first_difference(saved, saved) is None
    for changes, difference in (
        ({"options": {"epochs": 2}, "model": {}, "data": "1"}, "epochs is 2, was 1"),
        ({"model": {**model, "name": "MLP"}, "clients": {}}, "`model` is MLP, was CNN"),
        ({"model": {**model, "sha256": "8"}}, "the code of `model` is another one"),
        ({"clients": {"a": "0", "b": "9"}}, "the models of b are not the same"),
        ({"shards": {"a": "4", "c": "3"}}, "c is new among the shards"),
        ({"shards": {"a": "4"}}, "b is gone among the shards"),
        ({"data": "1"}, "`data` is now given"),
    ):
        assert first_difference({**saved, **changes}, saved) == difference
    with_data = {**saved, "data": "1"}
    assert first_difference(saved, with_data) == "`data` is not given"
    assert first_difference({**saved, "data": "2"}, with_data) == "`data` is another one"
