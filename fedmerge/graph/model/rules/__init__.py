"""The table of rules: what each ATen op says of the axes that it reads and makes."""

from collections.abc import Mapping

from fedmerge.graph.model.call import Rule
from fedmerge.graph.model.rules.algebra import ALGEBRA_RULES
from fedmerge.graph.model.rules.attention import ATTENTION_RULES
from fedmerge.graph.model.rules.conv import CONV_RULES
from fedmerge.graph.model.rules.indexing import INDEXING_RULES
from fedmerge.graph.model.rules.norm import NORM_RULES
from fedmerge.graph.model.rules.pointwise import POINTWISE_RULES, is_pointwise, pointwise
from fedmerge.graph.model.rules.pooling import POOLING_RULES
from fedmerge.graph.model.rules.recurrent import RECURRENT_RULES
from fedmerge.graph.model.rules.reduce import REDUCE_RULES
from fedmerge.graph.model.rules.shape import SHAPE_RULES

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

__all__ = ["RULES", "is_pointwise", "pointwise"]
