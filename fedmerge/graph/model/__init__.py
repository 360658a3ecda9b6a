"""Plans from model code: run a model once, follow its units, check the plan by numbers."""

from fedmerge.graph.model.grow import probe_growth
from fedmerge.graph.model.inputs import deduce_inputs
from fedmerge.graph.model.load import load_factory
from fedmerge.graph.model.plan import plan_model, plan_walked
from fedmerge.graph.model.verify import verify_plan
from fedmerge.graph.model.walk import Walked, evaluating, walk_model

__all__ = [
    "Walked",
    "deduce_inputs",
    "evaluating",
    "load_factory",
    "plan_model",
    "plan_walked",
    "probe_growth",
    "verify_plan",
    "walk_model",
]
