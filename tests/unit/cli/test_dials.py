"""`--set`: typed, checked, and refused in one line; options that are gone say what to type."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedmerge.cli import COMMANDS, CONFIGURED, GONE, SET, dials_of, moved_option
from fedmerge.errors import UsageError

MATCH = COMMANDS["match"]


def dials(*assignments: str, command: str = "match", **configured: Any) -> dict[str, Any]:
    """Return what is set, without what nobody set."""
    context: Any = SimpleNamespace(meta={CONFIGURED: configured})
    own = COMMANDS[command]
    values = dials_of(own, context, assignments)
    assert values.keys() == own.dial_options.keys()
    assert context.meta[SET] == {text.partition("=")[0].replace("-", "_") for text in assignments}
    unset = {name: dial.unset for name, dial in own.dial_options.items()}
    return {name: value for name, value in values.items() if value != unset[name]}


@pytest.mark.parametrize(
    ("assignments", "values"),
    [
        ((), {}),
        (("gamma=2",), {"gamma": 2.0}),
        (("sweeps=3", "tie-breaker=0.5"), {"sweeps": 3, "tie_breaker": 0.5}),
        (("match_by_order=TRUE",), {"match_by_order": True}),
        (("state=1:1", "state=2:2"), {"state": ["1:1", "2:2"]}),
        (("gamma=1", "gamma=3"), {"gamma": 3.0}),
        (("frontier_plot=a=b.svg",), {"frontier_plot": Path("a=b.svg")}),
        (("lead=none",), {"lead": "none"}),
    ],
)
def test_dials_are_read_by_their_types(assignments: Sequence[str], values: object) -> None:
    assert dials(*assignments) == values


def test_the_command_line_wins_over_a_configuration() -> None:
    assert dials("gamma=2", gamma=5.0, sweeps=7) == {"gamma": 2.0, "sweeps": 7}


@pytest.mark.parametrize(
    ("assignment", "problem", "hint"),
    [
        ("sweeps=x", "`sweeps` is 'x', expected a whole number", ""),
        ("sweeps=1.5", "`sweeps` is '1.5', expected a whole number", ""),
        ("gamma=", "`gamma` is '', expected a number", ""),
        ("match_by_order=yes", "`match_by_order` is 'yes', expected true or false", ""),
        ("gamma", "--set is 'gamma', expected NAME=VALUE, e.g. gamma=2", ""),
        ("=2", "--set is '=2', expected NAME=VALUE, e.g. gamma=2", ""),
        ("gama=2", "`fedmerge match --set` knows no 'gama'", "did you mean gamma? there are "),
        ("zzz=2", "`fedmerge match --set` knows no 'zzz'", "there are augment, "),
        ("mu=2", "`fedmerge match --set` knows no 'mu'", "there are augment, "),
        (
            "max_growth=2",
            "--set max_growth: that is an option of its own",
            "use --max-growth 2",
        ),
    ],
)
def test_what_is_no_dial_is_refused_in_one_line(assignment: str, problem: str, hint: str) -> None:
    with pytest.raises(UsageError, match=r".") as caught:
        dials(assignment)
    assert caught.value.problem == problem
    assert caught.value.hint.startswith(hint)
    assert "\n" not in caught.value.hint


@pytest.mark.parametrize(
    ("typed", "arguments", "hint"),
    [
        ("--gamma", ["a.pt", "--gamma", "2"], "use --set gamma=2"),
        ("--gamma", ["a.pt", "--gamma=2"], "use --set gamma=2"),
        ("--probe-count", ["--probe-count"], "use --set probe_count=VALUE"),
        ("--match-by-order", ["--match-by-order", "b.pt"], "use --set match_by_order=true"),
        ("--signature", ["--signature", "both"], "leave it out"),
    ],
)
def test_an_option_that_moved_says_what_to_type(
    typed: str, arguments: list[str], hint: str
) -> None:
    moved = moved_option(MATCH, typed, arguments)
    assert moved is not None
    assert moved.hint == hint
    assert moved.problem.count(typed) == 1


@pytest.mark.parametrize("typed", ["--nothing", "--mu", "-x", "--max-growth"])
def test_what_never_was_an_option_is_left_to_the_parser(typed: str) -> None:
    assert moved_option(MATCH, typed, [typed]) is None


def test_what_is_gone_is_nowhere() -> None:
    names = {name.replace("_", "-") for command in COMMANDS.values() for name in command.names}
    assert not names & GONE.keys()
