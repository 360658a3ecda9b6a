"""From an architecture to a plan: which axis of which tensor carries which units."""

from fedmerge.graph.chain import ChainOptions, plan_chain
from fedmerge.graph.keep import keep_tensors
from fedmerge.graph.layers import classify
from fedmerge.graph.plan_json import plan_from_json, plan_to_json
from fedmerge.graph.widths import count_parameters, solve_widths

__all__ = [
    "ChainOptions",
    "classify",
    "count_parameters",
    "keep_tensors",
    "plan_chain",
    "plan_from_json",
    "plan_to_json",
    "solve_widths",
]
