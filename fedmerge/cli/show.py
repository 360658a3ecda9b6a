"""Numbers as people read them."""

from collections.abc import Sequence

MOST_LISTED = 8


def count(number: int) -> str:
    """Return 431080 as 431,080."""
    return f"{number:,}"


def percent(share: float) -> str:
    """Return 0.954 as 95 %."""
    return f"{100 * share:.0f} %"


def megabytes(size: int) -> str:
    """Return a size in bytes as MB."""
    return f"{size / 1e6:,.1f} MB"


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
