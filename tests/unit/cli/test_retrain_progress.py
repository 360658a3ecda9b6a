"""The bar of a run: which round, who trains, and the latest loss."""

from __future__ import annotations

import pytest

from fedmerge.cli import Shown, Terminal
from fedmerge.federated import (
    ClientFailed,
    ClientFinished,
    ClientStarted,
    Event,
    RoundStarted,
    RunStarted,
)


def finished(client: str, loss: float) -> Event:
    return ClientFinished(2, client, loss, 30, 0.1, 1, 0, 0)


def test_the_bar_names_round_layer_clients_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    bars: list[tuple[str, float, int]] = []
    shown = Shown(Terminal(), lambda *bar: bars.append(bar))
    for event in (
        RunStarted("fedma", ("a", "b", "c"), rounds=6, resumed=1),
        RoundStarted(2, 1, "conv", "partial", 5),
        ClientStarted(2, "a"),
        ClientStarted(2, "b"),
        finished("b", 0.25),
        ClientFailed(2, "a", "lost", "gone", 1, is_last=False),
        ClientStarted(2, "a"),
        ClientFailed(2, "c", "lost", "no place", 0, is_last=True),
    ):
        shown.hear(event)
    assert bars == [
        ("round 2/6 (conv)", 3, 18),
        ("round 2/6 (conv), a trains", 3, 18),
        ("round 2/6 (conv), a, b train", 3, 18),
        ("round 2/6 (conv), a trains, b: loss 0.2500", 4, 18),
        ("round 2/6 (conv), a trains, b: loss 0.2500", 4, 18),
    ]
    assert capsys.readouterr().err.splitlines() == [
        "resumed after round 1 of 6",
        "warning: round 2: a is tried again (lost): gone",
        "warning: round 2: c is left out (lost): no place",
    ]
