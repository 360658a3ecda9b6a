"""What people are told: the progress of a long step, names and numbers."""

from collections.abc import Sequence
from typing import Protocol


class Progress(Protocol):
    """Told how far the work is."""

    def __call__(self, step: str, done: float, total: int) -> None:
        """Hear that `done` of `total` parts of a step are done."""


def silent(step: str, done: float, total: int) -> None:
    """Report progress to nobody."""


AVERAGE = "element-wise average"  # the merge for which nothing is matched
BY_WEIGHTS = "matched by weights"  # the merge for which nothing is run
IN_PLACE = "average, fit in place"  # its layers, to what the clients' give on probes
AVERAGES = (AVERAGE, BY_WEIGHTS)  # of clients that share their initial weights


def client_name(name: str) -> str:
    """Return what a client is called among the ways to merge."""
    return f"client {name}"


def listed(names: Sequence[str], most: int) -> str:
    """Return names with commas between them, the first `most` of them if they are more.

    >>> listed(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"


def percent(share: float) -> str:
    """Return a share in words.

    >>> percent(0.9876)
    '98.8 %'
    """
    return f"{100 * share:.1f} %"


MOST_LISTED = 8
MOST_ROWS = 40  # of a table with a row per client


def count(number: int) -> str:
    """Return 431080 as 431,080."""
    return f"{number:,}"


def whole_percent(share: float) -> str:
    """Return 0.954 as 95 %."""
    return f"{100 * share:.0f} %"


def megabytes(size: int) -> str:
    """Return a size in bytes as MB."""
    return f"{size / 1e6:,.1f} MB"


def memory(size: int) -> str:
    """Return a size in bytes as MB, of small ones two digits.

    >>> memory(27_400), memory(314), memory(15_700_000)
    ('0.027 MB', '0.00031 MB', '15.7 MB')
    """
    millions = size / 1e6
    return f"{millions:,.1f} MB" if millions >= 1 else f"{millions:.2g} MB"


def traffic(size: int) -> str:
    """Return a size in bytes in the unit that suits it.

    >>> traffic(1280), traffic(93408), traffic(1_500_000)
    ('1.3 kB', '93.4 kB', '1.5 MB')
    """
    return f"{size / 1e3:.1f} kB" if size < 1e6 else megabytes(size)


def duration(seconds: float) -> str:
    """Return 5025 as 1 h 23 min.

    >>> duration(42.3), duration(200), duration(5025)
    ('42 s', '3 min 20 s', '1 h 23 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def widths(clients: Sequence[int]) -> str:
    """Return the clients' widths: one number if they agree, a range if they are many."""
    if len(set(clients)) == 1:
        return str(clients[0])
    if len(clients) > MOST_LISTED:
        return f"{min(clients)} to {max(clients)}"
    return ", ".join(map(str, clients))


def shape(lengths: Sequence[int]) -> str:
    """Return (20, 1, 5, 5) as 20×1×5×5."""
    return "×".join(map(str, lengths)) or "scalar"


def shortened(rows: Sequence[Sequence[str]], most: int = MOST_ROWS) -> list[Sequence[str]]:
    """Return the rows of a table, those in the middle told as one if they are more than `most`.

    >>> shortened([["a", "1"], ["b", "2"], ["c", "3"], ["d", "4"], ["e", "5"]], most=4)
    [['a', '1'], ['b', '2'], ['… 2 more', ''], ['e', '5']]
    """
    if len(rows) <= most:
        return list(rows)
    first, last = most // 2, most - most // 2 - 1  # and one line for the others
    told = [f"… {len(rows) - first - last:,} more", *[""] * (len(rows[0]) - 1)]
    return [*rows[:first], told, *rows[len(rows) - last :]]
