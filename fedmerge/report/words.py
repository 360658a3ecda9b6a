"""Numbers and names as the page shows them."""

from __future__ import annotations

from collections.abc import Sequence

from fedmerge.types.words import percent

MOST_LISTED = 6


def printable(text: str, most: int | None = None) -> str:
    """Return a name without control characters, its middle left out if it is too long.

    >>> printable("layer1.0.conv1.weight", 12)
    'layer1…eight'
    """
    shown = "".join(c if c.isprintable() else "�" for c in text)
    if most is None or len(shown) <= most:
        return shown
    tail = (most - 1) // 2
    return f"{shown[: most - 1 - tail]}…{shown[len(shown) - tail :]}"


def unbroken(text: str) -> str:
    """Return a sentence in which no line ends between a number and its sign.

    >>> unbroken("95 % of 1.5 × it") == "95\u00a0% of 1.5\u00a0× it"
    True
    """
    return text.replace(" %", "\u00a0%").replace(" ×", "\u00a0×")


def count(number: int) -> str:
    """Return 431080 as 431,080."""
    return f"{number:,}"


def widths(clients: Sequence[int]) -> str:
    """Return the clients' widths: one number if they agree, a range if they are many.

    >>> widths([8, 8]), widths([8, 9]), widths(range(1, 9))
    ('8', '8, 9', '1 to 8')
    """
    if len(set(clients)) == 1:
        return str(clients[0])
    if len(clients) > MOST_LISTED:
        return f"{min(clients)} to {max(clients)}"
    return ", ".join(map(str, clients))


def listed(names: Sequence[str], most: int = MOST_LISTED) -> str:
    """Return names with commas between them, the first `most` of them if they are more.

    >>> listed(["a", "b", "c", "d"], 2)
    'a, b and 2 more'
    """
    if len(names) <= most + 1:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def number(value: float | None, *, is_share: bool = False) -> str:
    """Return a measured number, or that there is none.

    >>> number(0.951, is_share=True), number(0.45678), number(None)
    ('95.1 %', '0.4568', 'not known')
    """
    if value is None:
        return "not known"
    return percent(value) if is_share else f"{value:.4f}"


def owner_ranges(clients: int) -> list[tuple[int, int]]:
    """Return numbers of owners in few ranges, alone and all of them by themselves.

    >>> owner_ranges(4), owner_ranges(16)
    ([(1, 1), (2, 2), (3, 3), (4, 4)], [(1, 1), (2, 3), (4, 7), (8, 15), (16, 16)])
    """
    if clients <= MOST_LISTED:
        return [(owners, owners) for owners in range(1, clients + 1)]
    starts = [1]
    while 2 * starts[-1] < clients:
        starts.append(2 * starts[-1])
    ends = [start - 1 for start in starts[1:]] + [clients - 1]
    return [*zip(starts, ends, strict=True), (clients, clients)]


def owner_label(low: int, high: int) -> str:
    """Return a range of owners in words.

    >>> owner_label(1, 1), owner_label(2, 3)
    ('1 client', '2–3 clients')
    """
    if low == high:
        return f"{low} client" if low == 1 else f"{low} clients"
    return f"{low}–{high} clients"
