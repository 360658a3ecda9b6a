"""What a tensor does in a model: which axis it produces, and whether it makes or scales units."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from fedmerge.types.layouts import Layout, groups_in
from fedmerge.types.plans import Role, TensorPlan

_POINTWISE: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU,
)  # fmt: skip
_RECURRENT: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.RNNCellBase)


def tensor_plan(
    axes: tuple[Layout, ...], uses: Counter[str], owner: nn.Module, leaf: str
) -> TensorPlan:
    """Return a tensor's plan from its layouts, how ops used it, and the layer that owns it."""
    if isinstance(owner, _POINTWISE):
        return TensorPlan(axes, role="pointwise")
    if isinstance(owner, _RECURRENT):
        return TensorPlan(axes, role="recurrent" if "_hh" in leaf else "weight")
    plan = TensorPlan(axes, _out_axis(axes, uses), _role(uses))
    feeds_itself = plan.produces & plan.consumes and uses["make"] > 1 and not uses["look up"]
    return TensorPlan(axes, plan.out, "recurrent") if feeds_itself else plan


def _role(uses: Mapping[str, int]) -> Role:
    makes = not uses or any(use != "scale" for use in uses)
    return "weight" if makes else "pointwise"


def _out_axis(axes: Sequence[Layout], uses: Mapping[str, int]) -> int:
    """Return the axis that the first op to look a tensor up or sum over it keeps."""
    with_units = [k for k, axis in enumerate(axes) if any(groups_in(axis))]
    for use in uses:
        if use == "look up":
            return len(axes) - 1
        if use.startswith("in "):
            summed = int(use[3:])
            others = [k for k in range(len(axes)) if k != summed]
            if len(axes) == 2 or summed > 1 or not others:
                return next((k for k in others if k in with_units), others[0] if others else 0)
            return 1 - summed
    return with_units[0] if with_units else max(0, len(axes) - 1)


def group_name(tensor: str) -> str:
    """Return the name of the units that a tensor produces: its layer's, as a rule.

    >>> group_name("layer1.0.conv1.weight"), group_name("rnn.weight_ih_l0_reverse")
    ('layer1.0.conv1', 'rnn_l0_reverse')
    """
    tensor = re.sub(r"parametrizations\.(\w+)\.original\d*$", r"\1", tensor)
    layer, _, leaf = tensor.rpartition(".")
    if leaf.startswith("weight_hr"):
        return f"{layer}{leaf.removeprefix('weight_hr')}.projection"
    for start in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        if leaf.startswith(start):
            return f"{layer}{leaf.removeprefix(start)}".lstrip("_") or tensor
    for end in ("_weight", "_bias"):
        if leaf.endswith(end):
            return tensor.removesuffix(end)
    return layer if leaf in ("weight", "bias") and layer else tensor
