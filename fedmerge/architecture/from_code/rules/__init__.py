"""The table of rules: what each ATen op says of the axes that it reads and makes."""

from collections.abc import Mapping

from fedmerge.architecture.from_code.rules.arithmetic import (
    ALGEBRA_RULES,
    POINTWISE_RULES,
    is_pointwise,
    pointwise,
)
from fedmerge.architecture.from_code.rules.attention import ATTENTION_RULES
from fedmerge.architecture.from_code.rules.indexing import INDEXING_RULES
from fedmerge.architecture.from_code.rules.norm import NORM_RULES
from fedmerge.architecture.from_code.rules.recurrent import RECURRENT_RULES
from fedmerge.architecture.from_code.rules.reduce import REDUCE_RULES
from fedmerge.architecture.from_code.rules.shape import SHAPE_RULES, regroup
from fedmerge.architecture.from_code.rules.windows import CONV_RULES, POOLING_RULES
from fedmerge.architecture.from_code.trace import Rule

RULES: Mapping[str, Rule] = {
    **POINTWISE_RULES,
    **ALGEBRA_RULES,
    **CONV_RULES,
    **NORM_RULES,
    **SHAPE_RULES,
    **INDEXING_RULES,
    **POOLING_RULES,
    **REDUCE_RULES,
    **ATTENTION_RULES,
    **RECURRENT_RULES,
}

__all__ = ["RULES", "is_pointwise", "pointwise", "regroup"]
