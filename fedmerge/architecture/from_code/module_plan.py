"""The plan of a module: groups, roles and norms from the labels of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from fedmerge.architecture.from_code.branch_search import Ways
from fedmerge.architecture.from_code.labels import (
    Factors,
    Fixed,
    Label,
    Parts,
    Same,
    Tree,
    labels_of,
)
from fedmerge.architecture.from_code.modules import StatePairs
from fedmerge.architecture.from_code.own_orders import own_orders
from fedmerge.architecture.from_code.trace import FoundNorm
from fedmerge.architecture.from_code.tracing import Walked, walk_model
from fedmerge.private_torch import StatisticsNormLayer
from fedmerge.values.nesting import with_inside
from fedmerge.values.plans import (
    Concat,
    Group,
    Layout,
    Norm,
    Pinned,
    Plan,
    Product,
    Role,
    TensorPlan,
    Units,
    groups_in,
    outer_groups,
    plain_products,
    replace_groups,
)

WHY_UNSOLVED = "its width does not show in any shape"
WHY_UNTRIED = "not tried, as the merge does not grow"


def fix_widths(plan: Plan, widths: Mapping[str, int]) -> Plan:
    """Return the plan with groups tied or held until the tensors' shapes fix every width.

    Zero padding on both sides of a shortcut gives two groups of which only the sum shows: those
    are tied if they are equally wide. Else, and where only a product shows (heads × units per
    head), one is held at its width: one that can't grow anyway if possible, the outer one first.
    """
    while crowded := _crowded_axis(plan):
        layout, unsolved = crowded
        groups = [group for group in plan.groups if group.name in unsolved]
        one, other = sorted(groups, key=lambda group: -widths[group.name])[:2]
        is_sum = not _are_multiplied(layout, unsolved)
        if is_sum and widths[one.name] == widths[other.name]:
            plan = replace(plan, same_width=(*plan.same_width, (one.name, other.name)))
            continue
        held = next((g for g in groups if not g.can_grow), other if is_sum else groups[-1])
        plan = _with_group(plan, _held(held, widths[held.name]))
    return plan


def let_go(plan: Plan) -> Plan:
    """Return the plan without held widths, the groups free to grow that only those forbade."""
    groups = (
        Group(g.name) if g.why == WHY_UNSOLVED else replace(g, width=None) for g in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def held_untried(plan: Plan) -> Plan:
    """Return the plan with the groups held of which nobody tried whether they can grow."""
    groups = (replace(g, can_grow=False, why=WHY_UNTRIED) if g.can_grow else g for g in plan.groups)
    return replace(plan, groups=tuple(groups))


def freed_untried(plan: Plan) -> Plan:
    """Return the plan with such groups free to grow, to be tried."""
    groups = (replace(g, can_grow=True, why="") if g.why == WHY_UNTRIED else g for g in plan.groups)
    return replace(plan, groups=tuple(groups))


def _held(group: Group, width: int) -> Group:
    return replace(group, can_grow=False, why=group.why or WHY_UNSOLVED, width=width)


def _with_group(plan: Plan, changed: Group) -> Plan:
    groups = tuple(changed if group.name == changed.name else group for group in plan.groups)
    return replace(plan, groups=groups)


def _crowded_axis(plan: Plan) -> tuple[Layout, set[str]] | None:
    """Return an axis with several groups whose widths no shape fixes, and those groups."""
    first = _firsts(plan)
    layouts = [
        replace_groups(axis, lambda group: Units(first.get(group, group)))
        for tensor in plan.tensors.values()
        for axis in tensor.axes
    ]
    axes = [(layout, set(groups_in(layout))) for layout in layouts]
    known = {first.get(group.name, group.name) for group in plan.groups if group.width}
    while fixed := {g for _, groups in axes if len(groups - known) == 1 for g in groups - known}:
        known |= fixed
    return next(((axis, groups - known) for axis, groups in axes if groups - known), None)


def _are_multiplied(layout: Layout, groups: set[str]) -> bool:
    """Return whether several factors of a product in a layout have such groups."""
    match layout:
        case Product(children):
            if sum(bool(groups.intersection(groups_in(child))) for child in children) > 1:
                return True
        case Concat(children):
            pass
        case _:
            return False
    return any(_are_multiplied(child, groups) for child in children)


def _firsts(plan: Plan) -> dict[str, str]:
    """Return for every tied group the one that stands for all groups tied to it."""
    first: dict[str, str] = {}
    for tie in plan.same_width:
        joined = {first.get(group, group) for group in tie}
        chosen = first.get(tie[0], tie[0])
        first.update(dict.fromkeys(tie, chosen))
        first.update({group: chosen for group, old in first.items() if old in joined})
    return first


_POINTWISE: tuple[type[nn.Module], ...] = (
    StatisticsNormLayer, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.PReLU,
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


_BY_NATURE = {"", "gates", "pixels", "groups of a convolution", "groups of a norm"}  # no heads
MOST_NAMES = 4  # of tensors in one note


def plan_model(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    state: StatePairs = (),
    ways: Ways | None = None,
) -> Plan:
    """Return the plan of a model from runs on the inputs (not yet verified)."""
    return plan_walked(walk_model(model, inputs, state=state, ways=ways))


def plan_walked(walked: Walked) -> Plan:
    """Return the plan that a walk through a model gives."""
    squared = _pin_squares(walked)
    names = _name_groups(walked)
    tensors = _tensor_plans(walked, names)
    ties, unequal = _same_widths(walked, tensors)
    marks = _marks(walked, names) | unequal
    groups = tuple(Group(name, name not in marks, marks.get(name, "")) for name in names.values())
    plan = Plan(
        groups=groups,
        tensors=tensors,
        norms=tuple(_norms(walked, tensors)),
        same_width=ties,
        architecture=type(walked.module).__name__,
        notes=(*_notes(walked), *squared, *_ordered_blocks(tensors)),
    )
    if any(True for own in tensors.values() for axis in own.axes for _ in outer_groups(axis)):
        plan = with_inside(plan, own_orders(plan, walked.trace, names))
    return fix_widths(plan, {name: label.size for label, name in names.items()})


def _pin_squares(walked: Walked) -> tuple[str, ...]:
    """Pin the groups that stand in several factors of one product; say where."""
    labels = walked.trace.labels
    notes: dict[str, None] = {}
    for name, axes in walked.tensors.items():
        for axis in axes:
            for label in _squared(labels.resolve(axis)):
                labels.pin(label, "two factors of one product")
                notes[f"'{name}': {label.size} units times themselves on one axis: pinned"] = None
    return tuple(notes)


def _squared(tree: Tree) -> Iterator[Label]:
    """Yield the labels that several factors of a product share."""
    children = tree.trees if isinstance(tree, Factors | Parts) else ()
    if isinstance(tree, Factors):
        counts = Counter(label for child in children for label in set(labels_of(child)))
        yield from (label for label, count in counts.items() if count > 1)
    for child in children:
        yield from _squared(child)


def _ordered_blocks(tensors: dict[str, TensorPlan]) -> Iterator[str]:
    """Yield notes on blocks of units (heads) that something pins, by the reason."""
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if len(tensor.axes) > 1:
            reason = next(_reasons_around(tensor.axes[tensor.out]), None)
            if reason is not None:
                found.setdefault(reason, []).append(name)
    for reason, names in found.items():
        yield f"blocks of units keep their order ({reason}): {', '.join(names)}"


def _reasons_around(layout: Layout) -> Iterator[str]:
    """Yield why positions are pinned that stand around units in a product."""
    for factors in plain_products(layout):
        for outer, inner in pairwise(factors):
            match outer, inner:
                case Pinned(_, reason), Units() if reason not in _BY_NATURE:
                    yield reason


def _name_groups(walked: Walked) -> dict[Label, str]:
    """Return every group's name in forward order: after the first tensor that produces it."""
    names: dict[Label, str] = {}
    taken: Counter[str] = Counter()
    resolve = walked.trace.labels.resolve
    heads = _outer_numbers(walked)
    parameters = dict(walked.module.named_parameters())
    read = sorted(walked.trace.reads, key=lambda name: name not in parameters)
    for only_makers in (True, False):
        for tensor in read:
            trees = tuple(map(resolve, walked.tensors[tensor]))
            plan = _plain_plan(walked, tensor, trees)
            if only_makers and (plan.role == "pointwise" or not trees):
                continue
            for tree in (trees[plan.out],) if only_makers else trees:
                for label in labels_of(tree):
                    if label not in names:
                        kind = ".heads" if str(label.number) in heads else ""
                        base = group_name(tensor) + kind
                        taken[base] += 1
                        names[label] = base if taken[base] == 1 else f"{base}-{taken[base]}"
    return names


def _outer_numbers(walked: Walked) -> set[str]:
    """Return the labels that stand around others on some axis, by their numbers."""
    resolve = walked.trace.labels.resolve
    trees = [resolve(axis) for axes in walked.tensors.values() for axis in axes]
    return {number for tree in trees for number in outer_groups(_numbered(tree))}


def _numbered(tree: Tree) -> Layout:
    return _layout(tree, {label: str(label.number) for label in labels_of(tree)})


def _plain_plan(walked: Walked, tensor: str, trees: Sequence[Tree]) -> TensorPlan:
    layer, _, leaf = tensor.rpartition(".")
    axes = tuple(map(_numbered, trees))
    return tensor_plan(axes, walked.trace.uses[tensor], walked.layers[layer], leaf)


def _tensor_plans(walked: Walked, names: dict[Label, str]) -> dict[str, TensorPlan]:
    resolve = walked.trace.labels.resolve
    plans = {}
    for tensor, axes in walked.tensors.items():
        layer, _, leaf = tensor.rpartition(".")
        layouts = tuple(_layout(resolve(axis), names) for axis in axes)
        plans[tensor] = tensor_plan(layouts, walked.trace.uses[tensor], walked.layers[layer], leaf)
    return plans


def _layout(tree: Tree, names: dict[Label, str]) -> Layout:
    match tree:
        case Label():
            return Units(names[tree])
        case Fixed(size, reason):
            return Pinned(size, reason)
        case Same(_, size):
            return Pinned(size, "constant")
        case Factors(trees):
            return Product(tuple(_layout(child, names) for child in trees))
        case Parts(trees):
            return Concat(tuple(_layout(child, names) for child in trees))


def _marks(walked: Walked, names: dict[Label, str]) -> dict[str, str]:
    """Return why groups can't grow, as far as the rules know."""
    found: dict[str, str] = {}
    for tree, why in walked.trace.labels.marks:
        for label in labels_of(walked.trace.labels.resolve(tree)):
            if label in names:
                found.setdefault(names[label], why)
    return found


def _norms(walked: Walked, tensors: dict[str, TensorPlan]) -> Iterator[Norm]:
    """Yield the batch norms of one producer that makes nothing else, in the same layout."""
    producers = Counter(found.makers[0] for found in walked.trace.norms)
    statistics = Counter(found.mean for found in walked.trace.norms)
    for found in walked.trace.norms:
        producer = found.makers[0]
        is_single = producers[producer] == statistics[found.mean] == 1
        is_used_once = walked.trace.uses[producer]["make"] == 1
        made = tensors[producer].axes[tensors[producer].out]
        if is_single and is_used_once and tensors[found.mean].axes == (made,):
            yield _norm(found)


def _norm(found: FoundNorm) -> Norm:
    return Norm(
        producer=found.makers[0],
        bias=found.makers[1],
        scale=found.scale,
        shift=found.shift,
        mean=found.mean,
        variance=found.variance,
        eps=found.eps,
    )


def _same_widths(
    walked: Walked, tensors: dict[str, TensorPlan]
) -> tuple[tuple[tuple[str, ...], ...], dict[str, str]]:
    """Return the groups of recurrent stacks that must end equally wide, and those that can't.

    All layers and directions of one nn.LSTM have one hidden size; a pinned one fixes the others.
    """
    ties: list[tuple[str, ...]] = []
    fixed: dict[str, str] = {}
    for path, module in walked.module.named_modules():
        if not isinstance(module, nn.RNNBase):
            continue
        for start in ("weight_ih", "weight_hr"):
            name = f"{path}.{start}" if path else start
            axes = [plan.axes[0] for key, plan in tensors.items() if key.startswith(name)]
            groups = tuple(dict.fromkeys(g for axis in axes for g in groups_in(axis)))
            if any(not _is_plain(axis) for axis in axes):
                why = f"must stay as wide as a pinned layer of '{path}'"
                fixed.update(dict.fromkeys(groups, why))
            elif len(groups) > 1:
                ties.append(groups)
    return tuple(ties), fixed


def _is_plain(axis: Layout) -> bool:
    """Whether an axis is one group, or gates × one group."""
    inner = axis.factors[-1] if isinstance(axis, Product) else axis
    return isinstance(inner, Units)


def _notes(walked: Walked) -> Iterator[str]:
    for op in walked.trace.unknown:
        yield f"the op '{op}' has no rule: all that it touches is pinned"
    if unused := [f"'{name}'" for name in walked.unused]:
        shown = ", ".join(unused[:MOST_NAMES])
        more = len(unused) - MOST_NAMES
        are = "is" if len(unused) == 1 else "are"
        others = f" and {more} more" if more > 0 else ""
        yield f"{shown}{others} {are} not used in the forward pass: pinned"
