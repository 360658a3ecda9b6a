"""Damaged work dirs: what was written, or one line; never another result, never a traceback."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedmerge
from fedmerge.errors import FedmergeError
from fedmerge.federated import (
    RUN_FILE,
    SEAL,
    STATE_FILE,
    Run,
    SavedState,
    WorkDir,
    read_sealed,
    read_sealed_text,
    state_to_file,
    write_sealed,
    write_sealed_text,
)
from fedmerge.values import Array
from tests.unit.federated.nets import code, save_clients, state_of, write_shards
from tests.unit.federated.runs import options_for, watched_run

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 10**12, 2**63, 10**40, 0.5, -1e300, "", "x", "../up", "n" * 10_000),
    *([], [0], [[0, 1], [1]], [None], {}, {"x": 1}, {"": None}),
)


@dataclass(frozen=True)
class Kept:
    """A run, its work dir after two of its rounds, and its state then."""

    run: Run
    folder: Path
    state: SavedState
    resume: Callable[[Path], bytes]
    whole: bytes


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("damage")
    states = {name: state_of("Residual", seed) for seed, name in enumerate("ab")}
    shards = write_shards(folder / "shards", "Residual", {"a": 1, "b": 2})
    clients, options = save_clients(folder, states), options_for(batch_size=8)

    def resume(place: Path) -> bytes:
        result = fedmerge.retrain(
            clients, shards, options, model=code("Residual"), work_dir=place, resume=True
        )
        result.write(place.with_suffix(".safetensors"), force=True)
        return place.with_suffix(".safetensors").read_bytes()

    whole = resume(folder / "done")
    run, saved, _ = watched_run(clients, shards, options, model=code("Residual"))
    place = folder / "work"
    shutil.copytree(folder / "done", place)
    WorkDir(place).save(run, saved[1])
    return Kept(run, place, saved[1], resume, whole)


@pytest.fixture
def place(kept: Kept, tmp_path: Path) -> Path:
    """A copy of the work dir, to be damaged."""
    return shutil.copytree(kept.folder, tmp_path / "work")


def loaded(kept: Kept, place: Path) -> SavedState | None:
    """Return the state that a run would go on with; a FedmergeError is the only other way."""
    try:
        return WorkDir(place).begin(kept.run, None)
    except FedmergeError as error:
        assert str(place) in error.problem  # noqa: PT017
        assert "\n" not in error.problem  # noqa: PT017
        return None


def said(run: Run, state: SavedState) -> tuple[str, dict[str, bytes]]:
    """Return all that a state is made of."""
    arrays, about = state_to_file(run, state)
    return json.dumps(about), {name: array.tobytes() for name, array in arrays.items()}


def damages(content: bytes, rng: random.Random) -> bytes:
    damaged, place = bytearray(content), rng.randrange(len(content))
    kind = rng.randrange(4)
    if kind < 2:
        damaged[place] ^= 1 << rng.randrange(8)
    elif kind == 2:
        damaged[place : place + 40] = rng.choice([b"\xff", b"\0"]) * 40
    else:
        del damaged[place:]
    return bytes(damaged)


def test_a_damaged_file_is_refused_or_changes_nothing(kept: Kept, place: Path) -> None:
    rng, refused = random.Random(3), 0
    expected = said(kept.run, kept.state)
    for path in sorted(place.iterdir()):
        whole = path.read_bytes()
        for _ in range(60):
            path.write_bytes(damages(whole, rng))
            state = loaded(kept, place)
            refused += state is None
            assert state is None or said(kept.run, state) == expected
        path.write_bytes(whole)
    assert refused > 200  # of 240; a matched file that no longer looks like one is none


def test_every_bit_of_a_state_counts(kept: Kept, place: Path) -> None:
    """Where a flip changes no value, as among the spaces after a header, nothing is refused."""
    path = place / STATE_FILE
    whole, rng = path.read_bytes(), random.Random(5)
    begin = 8 + int.from_bytes(whole[:8], "little")
    for offset in rng.sample(range(begin, len(whole)), 40):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(fedmerge.CheckpointError, match="it is not as it was written"):
            WorkDir(place).begin(kept.run, None)


@pytest.mark.parametrize("name", [RUN_FILE, STATE_FILE, "matched-1.safetensors"])
def test_a_file_that_is_gone_changes_no_result(name: str, kept: Kept, place: Path) -> None:
    (place / name).unlink()
    assert kept.resume(place) == kept.whole


def test_the_state_of_another_run_is_refused_also_without_its_run_file(
    kept: Kept, place: Path
) -> None:
    arrays, about = state_to_file(kept.run, kept.state)
    write_sealed(place / STATE_FILE, arrays, {**about, "run": "0" * 64})
    (place / RUN_FILE).unlink()
    with pytest.raises(
        fedmerge.CheckpointError, match=r"state\.safetensors: is damaged \(it is the"
    ):
        WorkDir(place).begin(kept.run, None)


def mutant(value: Any, rng: random.Random) -> Any:
    """Return a copy of a JSON value that differs at one place."""
    changed = json.loads(json.dumps(value))
    places = list(_places(changed))
    holder, key = rng.choice(places)
    if rng.random() < 0.2:
        del holder[key]
    elif rng.random() < 0.2 and isinstance(holder, list):
        holder.insert(key, holder[key])
    else:
        holder[key] = rng.choice(ODD)
    return changed


def _places(value: Any) -> Any:
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


@pytest.mark.slow
def test_a_file_that_proves_itself_but_fits_nothing_is_refused(kept: Kept, place: Path) -> None:
    """As if somebody had computed the digests anew; what can be used is, and does no harm."""
    rng, refused, survivors = random.Random(11), 0, []
    sealed = read_sealed(place / STATE_FILE, fail=FedmergeError)
    about = json.loads(sealed.about)
    run = read_sealed_text(place / RUN_FILE, dict[str, Any], fail=FedmergeError)
    del run[SEAL]
    for number in range(120):
        write_sealed(place / STATE_FILE, sealed.arrays, about)
        write_sealed_text(place / RUN_FILE, run)
        if number % 3:
            changed = mutant(about, rng)
            write_sealed(place / STATE_FILE, sealed.arrays, changed)
        else:
            write_sealed_text(place / RUN_FILE, mutant(run, rng))
        state = loaded(kept, place)
        refused += state is None
        if state is not None and said(kept.run, state) != said(kept.run, kept.state):
            survivors.append(shutil.copytree(place, place.with_name(f"survivor-{number}")))
    assert refused > 100
    for survivor in survivors[:3]:  # another loss of an earlier round, say
        kept.resume(survivor)


def _changed_arrays(arrays: dict[str, Array]) -> dict[str, dict[str, Array]]:
    first = next(iter(arrays))
    values = arrays[first]
    return {
        "gone": {n: a for n, a in arrays.items() if n != first},
        "another name": {f"{n}x" if n == first else n: a for n, a in arrays.items()},
        "more": {**arrays, "2/more": values},
        "another type": {**arrays, first: values.astype(np.int64)},
        "another shape": {**arrays, first: values[None]},
        "too small": {**arrays, first: values[:-1]},
    }


@pytest.mark.parametrize(
    "change", ["gone", "another name", "more", "another type", "another shape", "too small"]
)
def test_tensors_that_are_not_those_of_the_run_are_refused(
    change: str, kept: Kept, place: Path
) -> None:
    arrays, about = state_to_file(kept.run, kept.state)
    write_sealed(place / STATE_FILE, _changed_arrays(arrays)[change], about)
    with pytest.raises(fedmerge.CheckpointError, match=r"state\.safetensors: is damaged \('"):
        WorkDir(place).begin(kept.run, None)


def test_a_work_dir_is_used_by_one_run_at_a_time(kept: Kept, place: Path) -> None:
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    refused = pytest.raises(fedmerge.UsageError, match="work: another run is using it")
    with WorkDir(place).held(), refused:
        kept.resume(place)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert kept.resume(place) == kept.whole


def test_a_folder_that_was_made_for_nothing_is_gone_again(tmp_path: Path) -> None:
    with WorkDir(tmp_path / "a" / "b").held():
        assert (tmp_path / "a" / "b" / "run.lock").exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    with WorkDir(tmp_path / "a").held():
        pass
    assert (tmp_path / "a").is_dir()


@pytest.mark.parametrize(("path", "why"), [("file", "is a file"), ("file/work", "cannot be wri")])
def test_a_folder_that_can_not_be_is_told(path: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        pytest.raises(fedmerge.UsageError, match=f"{path}: {why}"),
        WorkDir(tmp_path / path).held(),
    ):
        pass
