"""Options of a run: checked at once, and the same after a journey through JSON."""

from __future__ import annotations

import json

import pytest

import fedmerge
from fedmerge.federated import changed_retrain_options, retrain_options, running_options


def test_options_come_back_from_json() -> None:
    options = fedmerge.RetrainOptions(
        method="fedprox",
        rounds=3,
        mu=0.5,
        init="independent",
        init_epochs=2,
        task="language-model",
        training=fedmerge.TrainSettings(optimizer="adam", learning_rate=0.3, clip_norm=1.5),
        preparation=fedmerge.Preparation((0.5, 0.25), (0.1, 0.2), channels_last=True),
    )
    values = json.loads(json.dumps(options.to_json()))
    assert retrain_options(values, options.matching) == options
    assert values["normalize"] == "0.5,0.25,0.1,0.2"


def test_defaults_follow_the_method_and_the_task() -> None:
    assert fedmerge.RetrainOptions().init == "independent"
    assert fedmerge.RetrainOptions(method="fedavg").init == "shared"
    assert fedmerge.RetrainOptions().settings.learning_rate == 0.01
    chars = fedmerge.RetrainOptions(task="language-model").settings
    assert (chars.learning_rate, chars.last_rate_factor) == (0.8, 1.0)
    given = retrain_options({"epochs": 2, "task": "language-model"}, fedmerge.MatchOptions())
    assert (given.settings.epochs, given.settings.learning_rate) == (2, 0.8)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("method", "match", "`method` is 'match', expected fedma, fedavg, fedprox or afl"),
        ("passes", 0, "`passes` is 0, expected a whole number from 1"),
        ("rounds", 1.5, r"`rounds` is 1\.5, expected a whole number from 1"),
        ("mu", -1, "`mu` is -1, expected a number from 0"),
        ("init", "same", "`init` is 'same', expected independent, shared or matched"),
        ("init_epochs", 0, "`init_epochs` is 0, expected a whole number from 1"),
    ],
)
def test_wrong_options_are_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(fedmerge.UsageError, match=expected):
        fedmerge.RetrainOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("engine", "mpi", "`engine` is 'mpi', expected local, processes or ray"),
        ("workers", 0, "`workers` is 0, expected a whole number from 1"),
        ("threads_per_client", 0, "`threads_per_client` is 0"),
        ("retries", -1, "`retries` is -1, expected a whole number from 0"),
        ("min_clients", 0, "`min_clients` is 0, expected a whole number from 1"),
        ("client_timeout", 0, "`client_timeout` is 0, expected a positive number of seconds"),
    ],
)
def test_wrong_ways_to_run_are_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(fedmerge.UsageError, match=expected):
        running_options({name: value})


def test_a_command_line_says_how_a_run_is_carried_out() -> None:
    given = {"engine": "processes", "workers": 3, "client_timeout": 7.0, "retries": None}
    running = running_options(given)
    assert (running.engine, running.workers) == ("processes", 3)
    assert running.policy == fedmerge.RetryPolicy(timeout=7.0)


def test_the_seed_by_keyword_is_that_of_the_run() -> None:
    """It once went to the settings of training, where every round replaces it."""
    options, _ = changed_retrain_options(None, None, {"seed": 7, "momentum": 0.5})
    assert (options.seed, options.settings.momentum) == (7, 0.5)
    with pytest.raises(fedmerge.UsageError, match="there is no option `proximal`"):
        changed_retrain_options(None, None, {"proximal": 0.1})
