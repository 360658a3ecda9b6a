"""A plan as JSON, to be read, edited or written by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from fedmerge.decoding import DEEPEST, Count, Name, decode_value, shortened
from fedmerge.errors import ArchitectureError, FedmergeError
from fedmerge.values.nesting import possible_outers, with_inside
from fedmerge.values.plans import (
    OUTPUT,
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
)

FORMAT: Final = 1
SCHEMA: Final = 1
MOST_TENSORS = 100_000
MOST_TERMS = 10_000  # plain products that one axis may be a sum of: they are walked one by one
_GIVEN = "the plan gives its width"
_HINT = "docs/reference/plan.md describes the format; `fedmerge plan A -o plan.json` writes one"

_Width: TypeAlias = Annotated[int, Meta(ge=1, le=2**53)]
_Layout: TypeAlias = "Name | Count | JsonLayout"
_Parts: TypeAlias = "Annotated[list[_Layout], Meta(min_length=1)] | UnsetType"


class JsonLayout(Struct, frozen=True, forbid_unknown_fields=True):
    """A layout that is neither a group's name nor a bare size."""

    pinned: Count | UnsetType = UNSET
    why: str | UnsetType = UNSET
    prod: _Parts = UNSET
    cat: _Parts = UNSET

    def __post_init__(self) -> None:
        given = [kind for kind in (self.pinned, self.prod, self.cat) if kind is not UNSET]
        if len(given) != 1 or (self.why is not UNSET and self.pinned is UNSET):
            raise ValueError('expected {"prod": […]}, {"cat": […]} or {"pinned": size, "why": …}')


class JsonTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor with more to say than its axes."""

    axes: list[_Layout]
    out: Count = 0
    role: Role = "weight"


class JsonGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """A group with more to say than its name."""

    name: Name
    can_grow: bool | UnsetType = UNSET
    why: str | UnsetType = UNSET
    width: _Width | None = None
    inside: Name | None = None


class JsonNorm(Struct, frozen=True, forbid_unknown_fields=True):
    """A batch norm, by the names of its tensors."""

    producer: Name
    mean: Name
    variance: Name
    bias: Name | None = None
    scale: Name | None = None
    shift: Name | None = None
    eps: Annotated[float, Meta(ge=0, le=1e30)] = 1e-5


class JsonPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as it stands in a file."""

    tensors: dict[Name, list[_Layout] | JsonTensor]
    groups: list[Name | JsonGroup] = []
    norms: list[JsonNorm] = []
    same_width: list[list[Name]] = []
    kept: list[Name] = []
    architecture: str = ""
    notes: list[str] = []
    format: Literal[1] = FORMAT
    schema: Literal[1] = SCHEMA


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    return {
        "schema": SCHEMA,
        "format": FORMAT,
        "architecture": plan.architecture,
        "groups": [_group_to_json(group, plan.inside.get(group.name)) for group in plan.groups],
        "tensors": {name: _tensor_to_json(tensor) for name, tensor in plan.tensors.items()},
        "norms": [dict(vars(norm)) for norm in plan.norms],
        "same_width": [list(tie) for tie in plan.same_width],
        "kept": list(plan.kept),
        "notes": list(plan.notes),
    }


def plan_from_json(value: object) -> Plan:
    """Return the plan that JSON values describe; only `tensors` is required."""
    found = value.get("format") if isinstance(value, dict) else None
    if isinstance(found, int) and found != FORMAT:
        raise _error(f"the plan has format {found}, expected {FORMAT}")
    given = decode_value(value, JsonPlan, fail=lambda reason: _refusal(value, reason))
    if len(given.tensors) > MOST_TENSORS:
        raise _error(
            f"the plan has {len(given.tensors):,} tensors, expected {MOST_TENSORS:,} at most"
        )
    tensors = {name: _tensor_from_json(name, tensor) for name, tensor in given.tensors.items()}
    plan = Plan(
        groups=_complete_groups([_group_from_json(group) for group in given.groups], tensors),
        tensors=tensors,
        norms=tuple(Norm(**msgspec.structs.asdict(norm)) for norm in given.norms),
        same_width=tuple(map(tuple, given.same_width)),
        kept=tuple(given.kept),
        architecture=given.architecture,
        notes=tuple(given.notes),
    )
    _check_groups(plan)
    inside = {g.name: g.inside for g in given.groups if isinstance(g, JsonGroup) and g.inside}
    plan = _with_inside(plan, inside) if inside else plan
    for norm in plan.norms:
        _check_norm(norm, plan.tensors)
    return plan


def _refusal(value: object, reason: str) -> FedmergeError:
    """Return the error of a plan of other types, with the name of the tensor if it is one."""
    tensors = value.get("tensors") if isinstance(value, dict) else None
    for name, tensor in tensors.items() if isinstance(tensors, dict) else ():
        alone = {"tensors": {name: tensor}}
        try:
            msgspec.convert(alone, JsonPlan)
        except (msgspec.ValidationError, RecursionError):
            return _error(f"the plan's tensor '{shortened(str(name))}' is wrong: {reason}")
    return _error(f"the plan is wrong: {reason}")


def _group_to_json(group: Group, inside: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": group.name}
    if not group.can_grow:
        fields |= {"can_grow": False, "why": group.why}
    if group.width is not None:
        fields["width"] = group.width
    if inside is not None:
        fields["inside"] = inside
    return fields


def _group_from_json(given: str | JsonGroup) -> Group:
    if isinstance(given, str):
        return Group(given)
    can_grow = given.width is None if given.can_grow is UNSET else given.can_grow
    if can_grow and given.width is not None:
        raise _error(f"group '{given.name}' has a width of its own, so it can't grow")
    why = "" if given.width is None else _GIVEN
    return Group(given.name, can_grow, why if given.why is UNSET else given.why, given.width)


def _tensor_to_json(tensor: TensorPlan) -> object:
    axes = [
        _layout_to_json(layout, _default_reason(axis, tensor.out))
        for axis, layout in enumerate(tensor.axes)
    ]
    if tensor.out == 0 and tensor.role == "weight":
        return axes
    return {"axes": axes, "out": tensor.out, "role": tensor.role}


def _tensor_from_json(name: str, given: Sequence[_Layout] | JsonTensor) -> TensorPlan:
    tensor = given if isinstance(given, JsonTensor) else JsonTensor(list(given))
    last = max(0, len(tensor.axes) - 1)
    if tensor.out > last:
        raise _error(f"'{name}' has out axis {tensor.out}, expected 0 to {last}")
    axes = tuple(
        _layout_from_json(layout, name, _default_reason(axis, tensor.out), DEEPEST)
        for axis, layout in enumerate(tensor.axes)
    )
    if any(_count_terms(layout) > MOST_TERMS for layout in axes):
        raise _error(f"'{name}' has an axis that is a sum of more than {MOST_TERMS:,} products")
    return TensorPlan(axes, tensor.out, tensor.role)


def _default_reason(axis: int, out: int) -> str:
    """Why a bare number pins an axis: an out axis without units makes the network's outputs."""
    return OUTPUT if axis == out else ""


def _layout_to_json(layout: Layout, default_reason: str) -> object:
    match layout:
        case Units(group):
            return group
        case Pinned(size, reason):
            return size if reason == default_reason else {"pinned": size, "why": reason}
        case Product(factors):
            return {"prod": [_layout_to_json(factor, "") for factor in factors]}
        case Concat(parts):
            return {"cat": [_layout_to_json(part, "") for part in parts]}


def _layout_from_json(given: _Layout, name: str, default_reason: str, deepest: int) -> Layout:
    if not deepest:
        raise _error(f"'{name}' has a layout that is nested more than {DEEPEST} levels deep")
    match given:
        case str():
            return Units(given)
        case int():
            return Pinned(given, default_reason)
        case JsonLayout(pinned=int(size), why=why):
            return Pinned(size, default_reason if why is UNSET else why)
        case JsonLayout(prod=list(factors)):
            inner = (_layout_from_json(factor, name, "", deepest - 1) for factor in factors)
            return _checked_product(tuple(inner), name)
        case JsonLayout(cat=list(parts)):
            return Concat(tuple(_layout_from_json(part, name, "", deepest - 1) for part in parts))
    raise AssertionError("a layout is one of its kinds")


def _checked_product(factors: tuple[Layout, ...], name: str) -> Layout:
    counts = Counter(group for factor in factors for group in set(groups_in(factor)))
    for group, count in counts.items():
        if count > 1:
            raise _error(f"'{name}' has a product with group '{group}' in more than one factor")
    if any(map(_is_empty, factors)):  # the others might be of any size, and no shape would show it
        raise _error(f"'{name}' has a product with a factor of size 0")
    return Product(factors)


def _is_empty(layout: Layout) -> bool:
    match layout:
        case Pinned(size):
            return size == 0
        case Concat(parts):
            return all(map(_is_empty, parts))
    return False


def _count_terms(layout: Layout) -> int:
    """Return how many plain products an axis is a sum of."""
    match layout:
        case Product(factors):
            return math.prod(map(_count_terms, factors))
        case Concat(parts):
            return sum(map(_count_terms, parts))
    return 1


def _complete_groups(named: list[Group], tensors: Mapping[str, TensorPlan]) -> tuple[Group, ...]:
    """Return the named groups, then the others in order of appearance."""
    known = {group.name: group for group in named}
    if len(known) < len(named):
        raise _error("a group is listed twice")
    for tensor in tensors.values():
        for layout in tensor.axes:
            for group in groups_in(layout):
                known.setdefault(group, Group(group))
    return tuple(known.values())


def _check_groups(plan: Plan) -> None:
    used = {g for t in plan.tensors.values() for axis in t.axes for g in groups_in(axis)}
    for group in plan.groups:
        if group.name not in used:
            raise _error(f"group '{group.name}' stands on no tensor's axis")
    tied: set[str] = set()
    for tie in plan.same_width:
        if unknown := set(tie) - used:
            raise _error(f"'same_width' names the unknown group '{min(unknown)}'")
        if not tie or len(tied | set(tie)) < len(tied) + len(tie):
            raise _error("'same_width' has an empty list, or a group twice")
        tied |= set(tie)


def _with_inside(plan: Plan, inside: Mapping[str, str]) -> Plan:
    """Return the plan with these groups inside others (group → outer); refuse any that is not."""
    around = possible_outers(plan)
    before: set[str] = set()
    for group in plan.groups:
        outer = inside.get(group.name)
        if outer is not None and outer not in around[group.name]:
            raise _error(
                f"group '{group.name}' is not inside '{outer}' on all of its axes: there is no "
                "product with that factor before it"
            )
        if outer is not None and (outer in inside or outer not in before):
            how = "is inside another one itself" if outer in inside else "is listed after it"
            raise _error(f"group '{group.name}' is inside '{outer}', which {how}")
        before.add(group.name)
    return with_inside(plan, inside)


def _check_norm(norm: Norm, tensors: Mapping[str, TensorPlan]) -> None:
    """Refuse a norm of tensors that are not one number per unit of its producer."""
    for kind, name in vars(norm).items():
        if kind != "eps" and name is not None and name not in tensors:
            raise _error(f"a norm's '{kind}' is '{name}', which is no tensor of the plan")
    producer = tensors[norm.producer]
    if not producer.axes:
        raise _error(f"a norm's producer '{norm.producer}' has no axes")
    units = _without_reasons(producer.axes[producer.out])
    for name in (norm.bias, norm.scale, norm.shift, norm.mean, norm.variance):
        if name is not None and tuple(map(_without_reasons, tensors[name].axes)) != (units,):
            raise _error(f"a norm's '{name}' has not one number per unit of '{norm.producer}'")


def _without_reasons(layout: Layout) -> Layout:
    match layout:
        case Pinned(size):
            return Pinned(size)
        case Product(factors):
            return Product(tuple(map(_without_reasons, factors)))
        case Concat(parts):
            return Concat(tuple(map(_without_reasons, parts)))
    return layout


def _error(problem: str) -> ArchitectureError:
    return ArchitectureError(problem, _HINT)
