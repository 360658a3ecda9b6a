"""Match the hidden units of several clients, given as (units, features) matrices."""

from fedmerge.matching.search import keep_apart, match_units
from fedmerge.matching.values import (
    GroupMatching,
    Prior,
    SearchOptions,
    TooWide,
    UnitFeatures,
    prior_at_threshold,
)

__all__ = [
    "GroupMatching",
    "Prior",
    "SearchOptions",
    "TooWide",
    "UnitFeatures",
    "keep_apart",
    "match_units",
    "prior_at_threshold",
]
