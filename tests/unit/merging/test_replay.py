"""The closed list of what a record replays, and that every option is on one side of it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from fedmerge.cli import Command, configurable
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from fedmerge.federated import RetrainOptions
from fedmerge.merging import (
    NEVER,
    REPLAYED,
    REPLAYED_PROBES,
    REPLAYED_ROUNDS,
    MatchOptions,
    check_says_no_more,
    file_beside,
)


def test_the_list_is_this_one() -> None:
    """Whoever adds to it has to say so here."""
    assert {
        *("method", "preset", "match_threshold", "max_growth", "max_params"),
        *("merge_units", "lead", "drop_outliers", "scale", "regularisation"),
        *("effort", "gamma", "sigma", "sigma0", "sweeps", "refine", "seed"),
        *("solver", "tie_breaker", "client_weight", "class_counts", "keep", "dtype"),
        *("match_by_order", "flatten", "assume_chain", "key", "weights"),
    } == REPLAYED
    assert {
        *("method", "passes", "rounds", "mu", "init", "init_epochs", "task", "optimizer"),
        *("learning_rate", "momentum", "weight_decay", "epochs", "batch_size", "clip_norm"),
        *("mixed_precision", "partial_weight_decay", "last_rate_factor", "last_epochs_factor"),
        *("last_weight_decay", "normalize", "channels_last", "held_out", "no_class_counts"),
        *("x_key", "y_key", "classes", "optimizer_args", "scheduler", "scheduler_args"),
        *("accumulate", "patience", "weight_rate"),
    } == REPLAYED_ROUNDS


def test_the_list_is_what_options_and_runs_write() -> None:
    assert {field.name for field in fields(MatchOptions)} - REPLAYED == {"allow_global"}
    assert RetrainOptions().to_json().keys() == REPLAYED_ROUNDS


@pytest.mark.parametrize("command", configurable(), ids=lambda command: command.name)
def test_every_option_of_a_command_is_on_one_side(command: Command) -> None:
    replayed = REPLAYED | REPLAYED_ROUNDS | REPLAYED_PROBES.keys()
    assert not replayed & NEVER.keys()
    assert command.names - replayed - NEVER.keys() - {"set"} == {"help", "help_all"}


@pytest.mark.parametrize("value", [None, []])
def test_what_has_no_value_is_not_set(value: object) -> None:
    check_says_no_more({"options": {"allow_global": value}}, source="a")


@pytest.mark.parametrize("value", [False, True, 0, "", "x", ["x"], {}, [[]]])
def test_any_other_value_is_refused(value: object) -> None:
    with pytest.raises(UnsafeCheckpointError, match="a: refused, its merge record sets `force`"):
        check_says_no_more({"options": {"force": value}}, source="a")


def test_unknown_options_are_damage_and_unknown_parts_are_passed_over() -> None:
    check_says_no_more({"later": 1, "retrain": {"later": 1}}, source="a")
    with pytest.raises(CheckpointError, match="there is no option 'later'"):
        check_says_no_more({"options": {"later": 1}}, source="a")


@pytest.mark.parametrize("name", ["a.pt", "..a", "a b.pt", ".hidden", "é.pt"])
def test_names_without_folders_are_names(name: str) -> None:
    assert file_beside(name, source="a") == name


@pytest.mark.parametrize("name", ["", ".", "..", "/", "/a", "a/b", "a/", "./a", "../a", "a\0"])
def test_everything_else_is_none(name: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match="expected a name without folders"):
        file_beside(name, source="a")
