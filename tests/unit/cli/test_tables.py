"""Tables as they are drawn in rooms of different size: nothing is broken or lost."""

from __future__ import annotations

import pytest

from fedmerge.cli import print_table

COLUMNS = ["round", "layer", "width", "local loss", "loss", "bits per character", "up", "missing"]
ROWS = [
    ["1", "rnn_l0", "120", "2.3898", "", "", "1,083.2 kB", ""],
    ["2", "last layer", "", "2.1123", "2.2001", "3.1741", "903.4 kB", ""],
]


def printed(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Return the lines of the table below its title, drawn on a terminal of a width."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    print_table("a title", COLUMNS, ROWS, is_drawn=True)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "a title"
    return lines


@pytest.mark.parametrize(("width", "is_heavy"), [(120, True), (80, True), (64, False)])
def test_a_drawn_table_fits_and_breaks_no_number(
    width: int,
    is_heavy: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = printed(width, capsys, monkeypatch)
    assert max(map(len, lines)) <= width
    assert ("┃" in lines[1]) == is_heavy
    assert all(cell in "\n".join(lines) for row in ROWS for cell in row if cell[:1].isdigit())
    assert "rnn_l0" in "\n".join(lines)
    assert any("character" in line for line in lines)


def test_a_table_that_does_not_fit_is_plain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(40, capsys, monkeypatch)
    assert lines[1].split() == ["1", "rnn_l0", "120", "2.3898", "1,083.2", "kB"]


def test_columns_with_nothing_in_them_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("t", ["a", "b", "c"], [["x", "", "1"], ["y", "", ""]], is_drawn=False)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        *(["a", "c"], ["x", "1"], ["y"])
    ]


def test_numbers_below_zero_stand_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("t", ["a", "pull"], [["x", "-0.62"], ["y", "1.00"]], is_drawn=False)
    assert capsys.readouterr().out.splitlines()[1:] == ["  a   pull", "  x  -0.62", "  y   1.00"]


def test_the_columns_of_no_rows_stay(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("t", ["a", "b"], [], is_drawn=False)
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", "b"]
