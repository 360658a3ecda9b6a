"""What options may be: each rule says whether a value is one, and what is expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[Any], bool]
Rule: TypeAlias = tuple[Check, str]  # and what is expected, for messages

LARGEST = 1e100  # of any number: sums and squares of such numbers stay finite


def number(low: float, high: float = LARGEST) -> Check:
    """Return whether a value is a number in a range, both ends included."""

    def check(value: Any) -> bool:
        return isinstance(value, int | float) and type(value) is not bool and low <= value <= high

    return check


def positive(value: Any) -> bool:
    """Return whether a value is a number above 0."""
    return number(0)(value) and value > 0


def whole(low: int, high: float = LARGEST) -> Check:
    """Return whether a value is a whole number in a range, both ends included."""
    return lambda value: type(value) is int and low <= value <= high


def one_of(*choices: str) -> Rule:
    """Return the rule that a value is one of these words."""
    return lambda value: value in choices, " or ".join(choices)
