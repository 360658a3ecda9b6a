"""A minute of damaged files, and every input that the corpus keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fuzz.__main__ import page_table
from benchmarks.fuzz.campaign import Counts, fuzz, fuzz_processes
from benchmarks.fuzz.coverage import CORPUS
from benchmarks.fuzz.seeds import Seed, make_seeds, read_all
from fedmerge.errors import FedmergeError

FILES = 1600  # mutants of checkpoints
OTHERS = 160  # of npz files, records, plans, work dirs, …
PROCESSES = 3


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Seed]:
    return make_seeds(tmp_path_factory.mktemp("seeds"))


def assert_kept(found: dict[str, Counts], total: int) -> None:
    assert sum(own.total for own in found.values()) == total
    broken = [line for own in found.values() for line in own.broken]
    assert not broken, "\n".join(broken)


@pytest.mark.slow
def test_damaged_checkpoints_keep_all_promises(seeds: list[Seed], tmp_path: Path) -> None:
    chosen = [seed for seed in seeds if seed.is_checkpoint]
    found = fuzz(chosen, FILES, seed=1, keep=tmp_path / "broken", folder=tmp_path)
    assert_kept(found, FILES)
    assert all(own.refused for own in found.values())
    assert found["hostile zip"].read < found["torch zip"].read  # negative control of mutations


@pytest.mark.slow
def test_other_damaged_files_keep_all_promises(seeds: list[Seed], tmp_path: Path) -> None:
    chosen = [seed for seed in seeds if not seed.is_checkpoint]
    found = fuzz(chosen, OTHERS, seed=1, keep=tmp_path / "broken", folder=tmp_path)
    assert_kept(found, OTHERS)
    assert all(own.refused for own in found.values())


@pytest.mark.slow
def test_damaged_files_keep_all_promises_as_processes(seeds: list[Seed], tmp_path: Path) -> None:
    assert_kept(fuzz_processes(seeds, PROCESSES, seed=1, keep=tmp_path / "broken"), PROCESSES)


def test_a_reader_that_breaks_a_promise_is_caught(seeds: list[Seed], tmp_path: Path) -> None:
    def trusting(path: Path) -> None:
        (path.parent / "canary").mkdir()

    def failing(path: Path) -> None:
        raise KeyError("not ours")

    for read, says in ((trusting, "something of the file ran"), (failing, "KeyError")):
        own = seeds[0]
        broken = Seed("broken", own.folder, own.file, own.mutations, read)
        found = fuzz([broken], 1, seed=1, keep=tmp_path / "broken", folder=tmp_path)
        assert says in found["broken"].broken[0]
    (seeds[0].folder / "canary").rmdir()
    assert "| checkpoints: broken | 1 | 0 | 0 | 1 |" in page_table({"checkpoints": found})


def outcome(path: Path) -> str:
    try:
        read_all(path)
    except FedmergeError as error:
        return error.problem
    return "read"


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_inputs_that_once_reached_new_code_are_read_or_refused(path: Path) -> None:
    said = outcome(path)
    assert said == "read" or path.name in said
    assert said.isprintable()
