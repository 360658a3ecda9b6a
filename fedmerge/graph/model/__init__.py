"""Plans from model code: run a model once, follow its units, check the plan by numbers."""

from fedmerge.graph.model.dispatch import is_compiler_loaded
from fedmerge.graph.model.grow import probe_growth
from fedmerge.graph.model.inputs import deduce_inputs
from fedmerge.graph.model.load import load_factory
from fedmerge.graph.model.modules import evaluating
from fedmerge.graph.model.plan import plan_model, plan_walked
from fedmerge.graph.model.program import ExportedProgram, program_inputs
from fedmerge.graph.model.verify import pin_misfits, verify_plan
from fedmerge.graph.model.walk import Walked, walk_model
from fedmerge.graph.model.ways import Way, Ways, ways_of

__all__ = [
    "ExportedProgram",
    "Walked",
    "Way",
    "Ways",
    "deduce_inputs",
    "evaluating",
    "is_compiler_loaded",
    "load_factory",
    "pin_misfits",
    "plan_model",
    "plan_walked",
    "probe_growth",
    "program_inputs",
    "verify_plan",
    "walk_model",
    "ways_of",
]
