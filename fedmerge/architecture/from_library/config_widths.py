"""Which widths a model's config.json can say: a plan is held to these."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fedmerge.architecture.from_library.transformers_models import ConfiguredModel, config_shapes
from fedmerge.architecture.widths import solve_widths
from fedmerge.errors import ArchitectureError
from fedmerge.values.plans import Group, Plan, Units, plain_products

Place: TypeAlias = tuple[str | int, ...]  # in config.json, from the outside in

# Fields by which families say widths of hidden layers; those of one row change together.
FIELDS: tuple[tuple[str, ...], ...] = (
    ("intermediate_size",),  # BERT, Llama, ViT, wav2vec 2.0 and most others
    ("hidden_dim",),  # DistilBERT
    ("n_inner",),  # GPT-2, GPT-J
    ("d_ff",),  # T5
    ("ffn_dim",),  # OPT, BLOOM
    ("encoder_ffn_dim",),  # BART, Whisper, Marian
    ("decoder_ffn_dim",),
    ("moe_intermediate_size",),
    ("num_attention_heads", "num_key_value_heads"),  # Llama, Qwen, Mistral, Gemma
    ("num_heads",),  # T5
    ("embedding_size",),  # ResNet's stem
    ("hidden_sizes",),  # ResNet's stages
    ("conv_dim",),  # wav2vec 2.0's convolutions
    ("classifier_proj_size",),
)
TRIED = 2  # widths that are tried: some configurations ask for divisors of others
_HELD = ("head_dim",)  # follows from the others unless it is said
WHY_UNSAID = "no field of config.json says its width"


@dataclass(frozen=True)
class SaidWidth:
    """Fields of a config.json that say one width, and the groups that are so wide."""

    places: tuple[Place, ...]
    values: tuple[int, ...]  # of the fields, at the width of the client that config.json is of
    width: int
    groups: tuple[str, ...]
    held: Mapping[Place, int]  # fields that would else follow the others

    @property
    def name(self) -> str:
        """How messages call the fields."""
        return " and ".join(".".join(map(str, place)) for place in self.places)


def said_widths(
    model: ConfiguredModel, plan: Plan, shapes: Mapping[str, tuple[int, ...]], source: str
) -> tuple[SaidWidth, ...]:
    """Return the widths of a plan, by the model's names, that its config.json can say.

    A field is changed and the model built without numbers: the groups whose width changes with it,
    and by as much, are said by it. A field that changes anything else says no single width.
    """
    widths = solve_widths(plan, shapes, source=source)
    found: list[SaidWidth] = []
    taken = _unclear(plan)
    for said in _possible(model.config):
        tried = _tried(model, plan, widths, said, source)
        if tried is not None and not taken.intersection(tried.groups):
            taken.update(tried.groups)
            found.append(tried)
    return tuple(found)


def _unclear(plan: Plan) -> set[str]:
    """Return groups in a product with one whose width no shape shows: it may be the other's."""
    fixed = {group.name for group in plan.groups if group.width is not None}
    products = (
        {factor.group for factor in factors if isinstance(factor, Units)}
        for tensor in plan.tensors.values()
        for axis in tensor.axes
        for factors in plain_products(axis)
    )
    return {group for groups in products if groups & fixed for group in groups}


def _possible(config: Any, outer: Place = ()) -> Iterator[SaidWidth]:
    """Yield the fields of a configuration, and of those within it, that may say a width."""
    known = getattr(config, "attribute_map", {})
    seen: set[Place] = set()
    for row in FIELDS:
        names = tuple(known.get(name, name) for name in row if hasattr(config, name))
        for places, values in _numbers(config, names):
            if places and not seen.intersection(places):
                seen.update(places)
                held = {
                    (*outer, known.get(name, name)): getattr(config, name)
                    for name in _HELD
                    if len(places) and isinstance(getattr(config, name, None), int)
                }
                own = tuple((*outer, *place) for place in places)
                width = math.gcd(*values) if all(values) else 0
                yield SaidWidth(own, values, width, (), held)
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            yield from _possible(inner, (*outer, name))


def _numbers(
    config: Any, names: Sequence[str]
) -> Iterator[tuple[tuple[Place, ...], tuple[int, ...]]]:
    """Yield places and values of a row of fields; of a list, one by one. Unsaid ones are 0."""
    values = [getattr(config, name) for name in names]
    if len(values) == 1 and isinstance(values[0], list | tuple):
        for number, value in enumerate(values[0]):
            if type(value) is int:
                yield ((names[0], number),), (value,)
    elif values and all(value is None or type(value) is int for value in values):
        yield tuple((name,) for name in names), tuple(value or 0 for value in values)


def _tried(
    model: ConfiguredModel, plan: Plan, widths: Mapping[str, int], said: SaidWidth, source: str
) -> SaidWidth | None:
    """Return fields with the groups whose width they say, if that is all that they say."""
    least = said.width or max(widths.values(), default=0)
    found: list[tuple[str, ...]] = []
    for more in range(least + 1, least + 1 + TRIED):
        shapes = config_shapes(model, with_widths(model.folder.config, [(said, more)]), source)
        changed = None if shapes is None else _solved(plan, shapes, source)
        if changed is None:
            return None
        found.append(tuple(group for group in widths if changed[group] != widths[group]))
        if {changed[group] for group in found[-1]} != {more}:
            return None
    groups, *others = found
    before = {widths[group] for group in groups} | ({said.width} if said.width else set())
    if len(before) != 1 or any(other != groups for other in others):
        return None
    width = before.pop()
    return replace(said, width=width, groups=groups, values=said.values if said.width else (width,))


def _solved(
    plan: Plan, shapes: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, int] | None:
    try:
        return solve_widths(plan, shapes, source=source)
    except ArchitectureError:
        return None


def with_widths(
    config: Mapping[str, Any], widths: Sequence[tuple[SaidWidth, int]]
) -> dict[str, Any]:
    """Return a configuration that says other widths."""
    changed = copy.deepcopy(dict(config))
    for said, width in widths:
        for place, value in zip(said.places, said.values, strict=True):
            _put(changed, place, value * width // said.width if said.width else width)
        for place, value in said.held.items():
            _put(changed, place, value)
    return changed


def _put(config: dict[str, Any], place: Place, value: int) -> None:
    *outer, last = place
    inner: Any = config
    for part in outer:
        inner = inner.setdefault(part, {}) if isinstance(part, str) else inner[part]
    inner[last] = value


def held_to_config(plan: Plan, said: Sequence[SaidWidth]) -> Plan:
    """Return the plan in which groups grow only as config.json can say: together, or not at all."""
    why = {group.name: group.why for group in plan.groups if not group.can_grow}
    fields = {group: own for own in said for group in own.groups}
    bundles = [*(own.groups for own in said), *plan.same_width]
    while True:
        stuck = dict(why)
        for group in plan.groups:
            if group.name not in fields:
                stuck.setdefault(group.name, WHY_UNSAID)
        for bundle in bundles:
            held = next((name for name in bundle if name in stuck), None)
            if held is not None:
                name = fields[held].name if held in fields else "its width"
                reason = f"{name} is also that of '{held}', which can't grow: {stuck[held]}"
                stuck.update({other: reason for other in bundle if other not in stuck})
        if stuck == why:
            break
        why = stuck
    groups = tuple(_held(group, why.get(group.name)) for group in plan.groups)
    ties = tuple(own.groups for own in said if len(own.groups) > 1)
    return replace(plan, groups=groups, same_width=_joined((*plan.same_width, *ties)))


def _held(group: Group, why: str | None) -> Group:
    return group if why is None else replace(group, can_grow=False, why=why)


def _joined(ties: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return ties such that no group is in two of them."""
    found: list[dict[str, None]] = []
    for tie in ties:
        joined = dict.fromkeys(tie)
        apart = []
        for other in found:
            if joined.keys() & other.keys():
                joined = {**other, **joined}
            else:
                apart.append(other)
        found = [*apart, joined]
    return tuple(map(tuple, found))
