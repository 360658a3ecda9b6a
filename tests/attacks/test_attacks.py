"""No file of a stranger runs anything, ends in a traceback, or costs more than it may."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from benchmarks.fuzz.children import WarmProcess
from benchmarks.fuzz.promises import allowed_cost, broken_promises
from tests.attacks import (
    data_files,
    further,
    legacy_files,
    modules,
    pickles,
    places,
    programs,
    repeated_work,
    safetensors,
    scripts,
    tables,
    texts,
    zips,
)
from tests.attacks.attack import ATTACKS

KINDS = (
    data_files,
    further,
    legacy_files,
    modules,
    pickles,
    places,
    programs,
    repeated_work,
    safetensors,
    scripts,
    tables,
    texts,
    zips,
)

BUSY = 2  # CPU seconds of cores that other work shares count half; `make fuzz` is strict
# What costs seconds, close to the most that is allowed: `make test` has smaller ones of each kind.
COSTLY = {
    "as_many_tensors_as_are_allowed",
    "as_many_tensors_as_are_allowed_in_modules",
    "fifty_thousand_tensors",
    "tensors_named_by_numbers",
    "a_graph_that_keeps_all_it_makes",
    "examples_that_show_the_same_numbers",
    "many_records",
    "one_record_as_many_weights",
    "an array of a huge shape, stored",
    "a_graph_of_long_lists",
    "a loop without end",
    "many_state_dicts",
    "a_graph_of_a_hundred_thousand_ops",
    "floats",
    "many_models",
    "too_many_records",
    "shards_that_make_many_tensors_of_little",
    "many_averaged_copies",
    "many_storages",
    "modules_that_double",
    "two_numbers_far_apart",
    "code_that_inflates",
    "calls of a class with many arguments",
    "many_parameters",
    "one_shard_by_many_names",
    "dictionaries of one entry",
    "counts of a million classes",
    "many_lines",
    "records_with_very_long_names",
    "a loop of long lists",
    "a record that is there twice",
    "an array of a huge shape, compressed",
    "tensors_of_many_layers",
    "tensors_that_could_be_averages",
    "a_graph_within_graphs",
    "--config of very many names",
    "as_many_names_of_the_greatest_length",
    "clients_of_very_many_single_numbers",
    "weights_that_are_one_archive_with_a_large_directory",
}


def test_costly_attacks_are_attacks() -> None:
    assert ATTACKS.keys() >= COSTLY


def _case(name: str) -> ParameterSet:
    return pytest.param(name, marks=[pytest.mark.slow] if name in COSTLY else [])


@pytest.mark.parametrize("name", [_case(name) for name in ATTACKS])
def test_no_attack_breaks_a_promise(name: str, warm: WarmProcess, tmp_path: Path) -> None:
    command = shlex.split(ATTACKS[name].build(tmp_path))
    promised = allowed_cost(tmp_path)
    allowed = replace(promised, seconds=BUSY * promised.seconds)
    ran = warm.run(command, tmp_path)
    assert broken_promises(ran, ATTACKS[name].codes, allowed, tmp_path) == []
