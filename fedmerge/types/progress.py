"""How long work tells how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Told how far the work is."""

    def __call__(self, step: str, done: float, total: int) -> None:
        """Hear that `done` of `total` parts of a step are done."""


def silent(step: str, done: float, total: int) -> None:
    """Report progress to nobody."""
