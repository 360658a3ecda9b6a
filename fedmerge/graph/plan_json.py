"""A plan as JSON, to be read, edited or written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast, get_args

from fedmerge.errors import ArchitectureError
from fedmerge.types.layouts import Concat, Layout, Pinned, Product, Units, groups_in
from fedmerge.types.plans import OUTPUT, Group, Norm, Plan, Role, TensorPlan

FORMAT = 1
_GIVEN = "the plan gives its width"
_HINT = "docs/reference/plan.md describes the format; `fedmerge plan A -o plan.json` writes one"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values."""
    return {
        "format": FORMAT,
        "architecture": plan.architecture,
        "groups": [_group_to_json(group) for group in plan.groups],
        "tensors": {name: _tensor_to_json(tensor) for name, tensor in plan.tensors.items()},
        "norms": [dict(vars(norm)) for norm in plan.norms],
        "same_width": [list(tie) for tie in plan.same_width],
        "kept": list(plan.kept),
        "notes": list(plan.notes),
    }


def plan_from_json(value: object) -> Plan:
    """Return the plan that JSON values describe; only `tensors` is required."""
    fields = _object(value, "the plan")
    _check_keys(fields, vars(Plan((), {})).keys() | {"format"}, "the plan")
    if fields.get("format", FORMAT) != FORMAT:
        raise _error(f"the plan has format {fields['format']!r}, expected {FORMAT}")
    tensors = {
        name: _tensor_from_json(name, tensor)
        for name, tensor in _object(fields.get("tensors"), "'tensors'").items()
    }
    named = [_group_from_json(group) for group in _list(fields.get("groups", []), "'groups'")]
    plan = Plan(
        groups=_complete_groups(named, tensors),
        tensors=tensors,
        norms=tuple(_norm_from_json(n, tensors) for n in _list(fields.get("norms", []), "'norms'")),
        same_width=tuple(
            tuple(_strings(tie, "'same_width'"))
            for tie in _list(fields.get("same_width", []), "'same_width'")
        ),
        kept=tuple(_strings(fields.get("kept", []), "'kept'")),
        architecture=str(fields.get("architecture", "")),
        notes=tuple(_strings(fields.get("notes", []), "'notes'")),
    )
    _check_references(plan)
    return plan


def _group_to_json(group: Group) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": group.name}
    if not group.can_grow:
        fields |= {"can_grow": False, "why": group.why}
    if group.width is not None:
        fields["width"] = group.width
    return fields


def _group_from_json(value: object) -> Group:
    if isinstance(value, str):
        return Group(value)
    fields = _object(value, "a group")
    _check_keys(fields, {"name", "can_grow", "why", "width"}, "a group")
    if not isinstance(fields.get("name"), str):
        raise _error("a group has no 'name'")
    name, width = fields["name"], fields.get("width")
    is_count = isinstance(width, int) and not isinstance(width, bool) and width > 0
    if width is not None and not is_count:
        raise _error(f"group '{name}' has the width {width!r}, expected a number of units")
    can_grow = bool(fields.get("can_grow", width is None))
    if can_grow and width is not None:
        raise _error(f"group '{name}' has a width of its own, so it can't grow")
    why = fields.get("why", "" if width is None else _GIVEN)
    return Group(name, can_grow, str(why), width)


def _tensor_to_json(tensor: TensorPlan) -> object:
    axes = [
        _layout_to_json(layout, _default_reason(axis, tensor.out))
        for axis, layout in enumerate(tensor.axes)
    ]
    if tensor.out == 0 and tensor.role == "weight":
        return axes
    return {"axes": axes, "out": tensor.out, "role": tensor.role}


def _tensor_from_json(name: str, value: object) -> TensorPlan:
    fields = {"axes": value} if isinstance(value, list) else _object(value, f"'{name}'")
    _check_keys(fields, {"axes", "out", "role"}, f"'{name}'")
    out, role = fields.get("out", 0), fields.get("role", "weight")
    if role not in get_args(Role):
        raise _error(f"'{name}' has role {role!r}, expected one of {', '.join(get_args(Role))}")
    layouts = _list(fields.get("axes"), f"'{name}'")
    if not isinstance(out, int) or isinstance(out, bool) or not 0 <= out < max(1, len(layouts)):
        raise _error(f"'{name}' has out axis {out!r}, expected 0 to {max(0, len(layouts) - 1)}")
    axes = tuple(
        _layout_from_json(layout, name, _default_reason(axis, out))
        for axis, layout in enumerate(layouts)
    )
    return TensorPlan(axes, out, cast(Role, role))


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


def _layout_from_json(value: object, name: str, default_reason: str) -> Layout:
    match value:
        case str():
            return Units(value)
        case int() if not isinstance(value, bool) and value >= 0:
            return Pinned(value, default_reason)
        case {"pinned": int(size), **rest} if not isinstance(size, bool) and set(rest) <= {"why"}:
            return Pinned(size, str(rest.get("why", default_reason)))
        case {"prod": list(factors), **rest} if factors and not rest:
            return _checked_product(tuple(_layout_from_json(f, name, "") for f in factors), name)
        case {"cat": list(parts), **rest} if parts and not rest:
            return Concat(tuple(_layout_from_json(part, name, "") for part in parts))
    raise _error(
        f"'{name}' has the layout {value!r}, expected a group's name, a size, "
        '{"prod": […]}, {"cat": […]} or {"pinned": size, "why": …}'
    )


def _checked_product(factors: tuple[Layout, ...], name: str) -> Layout:
    counts = Counter(group for factor in factors for group in set(groups_in(factor)))
    for group, count in counts.items():
        if count > 1:
            raise _error(f"'{name}' has a product with group '{group}' in more than one factor")
    return Product(factors)


def _norm_from_json(value: object, tensors: Mapping[str, TensorPlan]) -> Norm:
    fields = _object(value, "a norm")
    names = ("producer", "bias", "scale", "shift", "mean", "variance")
    _check_keys(fields, {*names, "eps"}, "a norm")
    for key in names:
        optional = key in ("bias", "scale", "shift")
        if fields.get(key) not in tensors and not (optional and fields.get(key) is None):
            raise _error(f"a norm's '{key}' is {fields.get(key)!r}, which is no tensor of the plan")
    eps = fields.get("eps", 1e-5)
    if not isinstance(eps, int | float) or isinstance(eps, bool) or eps < 0:
        raise _error(f"a norm's 'eps' is {eps!r}, expected a number")
    tensor_names: dict[str, Any] = {key: fields.get(key) for key in names}
    return Norm(**tensor_names, eps=float(eps))


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


def _check_references(plan: Plan) -> None:
    used = {g for t in plan.tensors.values() for axis in t.axes for g in groups_in(axis)}
    for group in plan.groups:
        if group.name not in used:
            raise _error(f"group '{group.name}' stands on no tensor's axis")
    for tie in plan.same_width:
        unknown = set(tie) - used
        if unknown:
            raise _error(f"'same_width' names the unknown group '{min(unknown)}'")


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _error(f"{what} must be a JSON object, not {type(value).__name__}")
    return cast(dict[str, Any], value)


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise _error(f"{what} must be a JSON list, not {type(value).__name__}")
    return value


def _strings(value: object, what: str) -> list[str]:
    items = _list(value, what)
    if not all(isinstance(item, str) for item in items):
        raise _error(f"{what} must hold names only")
    return items


def _check_keys(fields: Mapping[str, Any], known: set[str], what: str) -> None:
    for key in fields:
        if key not in known:
            raise _error(f"{what} has the unknown entry '{key}'")


def _error(problem: str) -> ArchitectureError:
    return ArchitectureError(problem, _HINT)
