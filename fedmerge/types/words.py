"""Names and numbers in sentences."""

from collections.abc import Sequence

AVERAGE = "element-wise average"  # the merge for which nothing is matched
BY_WEIGHTS = "matched by weights"  # the merge for which nothing is run
AVERAGES = (AVERAGE, BY_WEIGHTS)  # of clients that share their initial weights


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
