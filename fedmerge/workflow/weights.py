"""Merges of clients by their weights alone: nothing is run."""

from __future__ import annotations

from dataclasses import replace

from fedmerge.types.progress import Progress
from fedmerge.workflow.layers import solve
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.prepared import Prepared, line_up, merge_of, problem_of
from fedmerge.workflow.starts import in_place


def merge_by_weights(
    prepared: Prepared, options: MatchOptions, *, device: str, progress: Progress
) -> Merge:
    """Match every group by weights; clients of one start that stayed there are averaged instead."""
    solution = solve(problem_of(prepared, options, device=device), progress)
    merge = replace(merge_of(prepared, options, solution), in_place=in_place(solution.matchings))
    if merge.stays_in_place and merge.growth > 1 and _leaves_units_open(prepared, options):
        average = merge_of(prepared, options, line_up(prepared), is_compared=False)
        return replace(average, in_place=merge.in_place)
    return merge


def _leaves_units_open(prepared: Prepared, options: MatchOptions) -> bool:
    """Return whether units may be averaged by their places: the user did not say how to match."""
    said = (options.preset, options.match_threshold, options.gamma, options.sigma, options.lead)
    is_said = any(wish is not None for wish in said)
    return options.method == "fedma" and not is_said and prepared.is_equally_wide
