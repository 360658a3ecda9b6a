from .chains import ChainOptions as ChainOptions, plan_chain as plan_chain
from .layers import classify as classify
from .model_code import ModelCode as ModelCode, plan_checked as plan_checked
from .plan_json import plan_from_json as plan_from_json, plan_to_json as plan_to_json
from .widths import (
    count_parameters as count_parameters,
    resize_module as resize_module,
    solve_widths as solve_widths,
)
from .couplings import keep_tensors as keep_tensors
from .tensor_names import load_checkpoint as load_checkpoint
