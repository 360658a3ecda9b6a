"""A plan from what a run of the model showed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from fedmerge.graph.model.modules import StatePairs
from fedmerge.graph.model.roles import group_name, tensor_plan
from fedmerge.graph.model.trace import FoundNorm
from fedmerge.graph.model.trees import Factors, Fixed, Label, Parts, Same, Tree, labels_of
from fedmerge.graph.model.walk import Walked, walk_model
from fedmerge.graph.model.ways import Ways
from fedmerge.graph.model.widths import fix_widths
from fedmerge.types.layouts import (
    Concat,
    Layout,
    Pinned,
    Product,
    Units,
    groups_in,
    outer_groups,
    plain_products,
)
from fedmerge.types.plans import Group, Norm, Plan, TensorPlan

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
