"""Numbers as people read them."""

from collections.abc import Sequence


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
    """Return the clients' widths: one number if they agree."""
    return str(clients[0]) if len(set(clients)) == 1 else ", ".join(map(str, clients))


def shape(lengths: Sequence[int]) -> str:
    """Return (20, 1, 5, 5) as 20×1×5×5."""
    return "×".join(map(str, lengths)) or "scalar"
