"""What couples layers of a chain: norms, skip connections, recurrence and tied weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fedmerge.architecture.layers import (
    MODEL_HINT,
    Layer,
    names_block,
    names_output,
    natural_key,
    numbers,
    parts,
    skeleton,
    without_common_parts,
)
from fedmerge.errors import ArchitectureError
from fedmerge.values.clients import TensorInfo
from fedmerge.values.plans import (
    Concat,
    Layout,
    Norm,
    Pinned,
    Plan,
    Product,
    Units,
    axis_size,
    groups_in,
    pin_groups,
    replace_groups,
)


def place_norms(
    chain: Sequence[Layer],
    stored: Sequence[Layer],
    *,
    is_ordered: bool,
    starts_with_embedding: bool,
    kept: Collection[str],
) -> list[Layer]:
    """Return the chain with the stored norms and scales in their places, or refuse.

    `stored` are all layers as stored, which is the order of their definition if `is_ordered`.
    """
    places = _Places(tuple(chain), tuple(stored), is_ordered, starts_with_embedding)
    gaps: list[list[Layer]] = [[] for _ in range(len(chain) + 1)]
    for layer in stored:
        if layer.is_weighted:
            continue
        try:
            gaps[places.gap_of(layer)].append(layer)
        except ArchitectureError:
            if not set(layer.names) <= set(kept):
                raise
    result: list[Layer] = []
    for gap, found in enumerate(gaps):
        result += places.sorted_in(gap, found)
        result += chain[gap : gap + 1]
    return result


@dataclass(frozen=True)
class _Places:
    """The gaps before, between and behind the layers of a chain; gap k is behind k layers."""

    chain: tuple[Layer, ...]
    stored: tuple[Layer, ...]
    is_ordered: bool
    starts_with_embedding: bool

    def gap_of(self, layer: Layer) -> int:
        """Return the gap in which a norm or scale stands, or refuse if several are possible."""
        by_numbering = self._sequential_gap(layer)
        if layer.kind == "scale":
            behind = self._stored_behind(layer) if self.is_ordered else len(self.chain)
            return behind if by_numbering is None else by_numbering
        fitting = [gap for gap in range(len(self.chain) + 1) if self._fits(layer, gap)]
        if not fitting:
            raise ArchitectureError(
                f"the norm '{layer.prefix}' is {layer.output_width} wide, but no layer "
                f"gives or reads {layer.output_width} values",
                MODEL_HINT,
            )
        if len(fitting) == 1:
            return fitting[0]
        for gap in (by_numbering, self._gap_of_number(layer)):
            if gap in fitting:
                return gap
        raise self._ambiguous(layer, fitting)

    def sorted_in(self, gap: int, found: Sequence[Layer]) -> list[Layer]:
        """Return a gap's norms in order: those of the layer's own width, then the flattened."""
        width = self.chain[gap - 1].output_width if gap else 0

        def key(layer: Layer) -> tuple[bool, object]:
            flat = gap > 0 and layer.kind != "scale" and layer.output_width != width
            by_name = natural_key(layer.prefix)
            return flat, self.stored.index(layer) if self.is_ordered else by_name

        same: set[int] = set()
        for layer in filter(_normalises, found):
            several = [g for g in range(len(self.chain) + 1) if self._fits(layer, g)]
            if layer.output_width in same and len(several) > 1:
                raise self._ambiguous(layer, several)
            same.add(layer.output_width)
        return sorted(found, key=key)

    def _fits(self, norm: Layer, gap: int) -> bool:
        return norm.output_width in self._widths(gap)

    def _widths(self, gap: int) -> Iterator[int]:
        """Yield the widths of the activations in a gap: as given, and as read (flattened)."""
        embedded = self.starts_with_embedding
        if gap > 0:
            first = self.chain[gap - 1]
            yield first.input_width if embedded and gap == 1 else first.output_width
        if gap < len(self.chain) and not (embedded and gap == 0):
            yield self.chain[gap].input_width

    def _ambiguous(self, layer: Layer, fitting: Sequence[int]) -> ArchitectureError:
        names = [f"'{self.chain[gap - 1].prefix}'" if gap else "the input" for gap in fitting[:3]]
        return ArchitectureError(
            f"'{layer.prefix}' ({layer.output_width} wide) could belong to "
            f"{', '.join(names[:-1])} or {names[-1]}",
            MODEL_HINT,
        )

    def _sequential_gap(self, layer: Layer) -> int | None:
        """Return the gap between the neighbours in the numbering of an `nn.Sequential`."""
        order = [_numbering_order(layer.prefix, other.prefix) for other in self.chain]
        before = [index for index, found in enumerate(order) if found > 0]
        behind = [index for index, found in enumerate(order) if found < 0]
        gaps = {index + 1 for index in before[-1:]} | set(behind[:1])
        return gaps.pop() if len(gaps) == 1 else None

    def _stored_behind(self, norm: Layer) -> int:
        """Return the gap behind the layer stored before a norm."""
        earlier = [layer for layer in self.stored[: self.stored.index(norm)] if layer in self.chain]
        return self.chain.index(earlier[-1]) + 1 if earlier else 0

    def _is_directly_behind(self, norm: Layer) -> bool:
        """Whether a norm is defined right behind a weighted layer that it fits.

        The last layer does not count: norms that are defined after all layers stand behind it.
        """
        if not self.is_ordered or self._stored_behind(norm) == len(self.chain):
            return False
        for layer in reversed(self.stored[: self.stored.index(norm)]):
            if layer.is_weighted:
                return layer in self.chain and self._fits(norm, self._stored_behind(norm))
            if layer.kind != "scale" and _normalises(layer) == _normalises(norm):
                return False
        return False

    def _gap_of_number(self, norm: Layer) -> int | None:
        """Return the gap of a numbered norm: `bn1` stands behind `conv1`, if no sign speaks else.

        Norms stored one by one behind layers stay there (`conv1, bn1, …, fc1, bn3`).
        """
        if not numbers(norm.prefix):
            return None
        mates = self._mates(norm)
        if self._is_directly_behind(norm) and not self._is_in_run(norm):
            gap = self._stored_behind(norm)
            if not mates or gap in mates:
                return gap
            interleaved = all(map(self._is_directly_behind, filter(_is_norm, self.stored)))
            return gap if interleaved and min(mates) > gap else None
        return mates[0] if len(mates) == 1 and self._stands_behind(norm) else None

    def _mates(self, norm: Layer) -> list[int]:
        """Return the gaps behind the layers of the norm's numbers and width, the likeliest kind."""
        mates = [
            (gap, layer)
            for gap, layer in enumerate(self.chain, start=1)
            if numbers(layer.prefix) == numbers(norm.prefix)
            and layer.output_width == norm.output_width
            and not (self.starts_with_embedding and gap == 1)
        ]
        parent, own = parts(norm.prefix)[:-1], parts(norm.prefix)[-1]
        near = [mate for mate in mates if parts(mate[1].prefix)[:-1] == parent] or mates
        named = [mate for mate in near if parts(mate[1].prefix)[-1] in own] or near
        return [gap for gap, _ in named]

    def _is_in_run(self, norm: Layer) -> bool:
        """Whether norms are stored one after another (`conv1, conv2, bn1, bn2`)."""
        index = self.stored.index(norm)
        return any(
            _is_norm(layer) and skeleton(layer.prefix) == skeleton(norm.prefix)
            for layer in self.stored[index + 1 : index + 2]
        )

    def _stands_behind(self, norm: Layer) -> bool:
        """Whether norms named like this one stand behind the layers of their numbers.

        Each must have one such layer, all by one numbering (`bn3` may follow `fc1` in a net with
        `conv1`, `conv2`); and they could all stand before them, unless one does not fit there.
        """
        family = [
            layer
            for layer in self.stored
            if _is_norm(layer) and skeleton(layer.prefix) == skeleton(norm.prefix)
        ]
        mates = [self._mates(layer) for layer in family]
        if any(len(gaps) != 1 for gaps in mates):
            return False
        pairs = [(layer, gap) for layer, (gap,) in zip(family, mates, strict=True)]
        stems = {skeleton(self.chain[gap - 1].prefix) for _, gap in pairs}
        counted = [numbers(layer.prefix) for layer in self.chain if numbers(layer.prefix)]
        one_numbering = len(stems) == 1 or len(set(counted)) == len(counted)
        return one_numbering and any(not self._fits(layer, gap - 1) for layer, gap in pairs)


def _is_norm(layer: Layer) -> bool:
    return not layer.is_weighted and layer.kind != "scale"


def _normalises(layer: Layer) -> bool:
    """Whether a layer is a norm for sure: a PReLU has neither bias nor statistics."""
    return layer.kind == "batch norm" or (layer.kind == "norm" and "bias" in layer.tensors)


def _numbering_order(norm: str, other: str) -> int:
    """Return 1 if the other stands before the norm in a common numbering, -1 if behind, else 0."""
    own, others = parts(norm), parts(other)
    split = next((k for k, (a, b) in enumerate(zip(own, others, strict=False)) if a != b), None)
    if split is None or not others[split].isdigit() or not all(p.isdigit() for p in own[split:]):
        return 0
    return 1 if int(others[split]) < int(own[split]) else -1


_NUMBERED = re.compile(r"((?:[A-Za-z_]+\.)*)(\w*?[A-Za-z]\w*?)_?(\d+)")
_SEQUENTIAL = re.compile(r"(?:([A-Za-z_]+\d*|\d+(?:\.\d+)*)\.)?(\d+)")


@dataclass(frozen=True)
class Activation:
    """What one layer of a chain gives: its width and how many spatial axes it has."""

    prefix: str
    width: int
    spatial: int
    kind: str  # of the layer that gives it, or "input"


def refuse_hidden_skips(activations: Sequence[Activation]) -> None:
    """Refuse a chain in which two activations could be added, unless its names rule that out.

    `activations` are the input (unless it is tokens), then one per layer, the output last. Input
    and output are both pinned, so it does no harm if the one is added to the other.
    """
    layers = [activation for activation in activations if activation.kind != "input"]
    ruled_out = {to_output: _rule_out(layers, to_output) for to_output in (False, True)}
    for later, activation in enumerate(activations):
        is_output = later == len(activations) - 1
        for earlier in activations[:later]:
            if (earlier.width, earlier.spatial) != (activation.width, activation.spatial):
                continue
            if (is_output and earlier.kind == "input") or ruled_out[is_output]:
                continue
            raise ArchitectureError(
                f"'{earlier.prefix}' and '{activation.prefix}' are both {activation.width} wide, "
                "so a skip connection between them can't be ruled out from names alone",
                f"if the net is a plain chain say `assume_chain`, else {MODEL_HINT}",
            )


def _rule_out(layers: Sequence[Activation], to_output: bool) -> bool:
    """Whether the names are those of a plain chain: numbered layers, or `nn.Sequential`s.

    Embeddings, one recurrent layer and the last layer need no number.
    """
    if any(names_block(layer.prefix) for layer in layers):
        return False
    names = without_common_parts([layer.prefix for layer in layers])
    recurrent = sum(1 for layer in layers if layer.kind == "recurrent")
    checked = [
        name
        for layer, name in zip(layers, names, strict=True)
        if _is_placed(name)
        or not (layer.kind == "embedding" or (layer.kind == "recurrent" and recurrent == 1))
    ]
    if checked and checked[-1] == names[-1] and not _is_placed(names[-1]):
        if to_output and not names_output(names[-1]):
            return False
        checked = checked[:-1]
    sequential = [name for name in checked if _SEQUENTIAL.fullmatch(name)]
    others = [name for name in checked if not _SEQUENTIAL.fullmatch(name)]
    return _have_gaps(sequential) and _count_up(others)


def _is_placed(name: str) -> bool:
    return bool(_SEQUENTIAL.fullmatch(name) or _NUMBERED.fullmatch(name))


def _count_up(names: Sequence[str]) -> bool:
    """Whether the names count up without gaps (conv1, conv2, fc1, fc2), each stem for itself.

    The first of a stem may have no number (fc, fc2).
    """
    counted: dict[str, list[int]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        stem = (found[1] + found[2] if found else name).lower()
        counted.setdefault(stem, []).append(int(found[3]) if found else 1)
    unnumbered = {name.lower() for name in names if not _NUMBERED.fullmatch(name)}
    return all(
        all(later == earlier + 1 for earlier, later in pairwise(numbers))
        and (stem not in unnumbered or len(numbers) > 1)
        for stem, numbers in counted.items()
    )


def _have_gaps(names: Sequence[str]) -> bool:
    """Whether the layers of each `nn.Sequential` (`0`, `features.3`) have modules between them.

    Neighbours without a gap between their numbers have no activation between them: that is a
    list of layers, which the model's code may combine in any way.
    """
    found = [_SEQUENTIAL.fullmatch(name) for name in names]
    places = [(match[1], int(match[2])) for match in found if match]
    return all(
        container != next_container or next_number > number + 1
        for (container, number), (next_container, next_number) in pairwise(places)
    )


def tie_tensors(plan: Plan, aliases: Mapping[str, str]) -> Plan:
    """Return the plan without the aliases, their groups made one with those of the tensors.

    Aliases of tensors that are not planned (integer counters) say nothing.
    """
    planned = {a: name for a, name in aliases.items() if {a, name} <= plan.tensors.keys()}
    for alias, name in planned.items():
        while pair := _first_difference(plan.tensors[name].axes, plan.tensors[alias].axes):
            plan = _unify(plan, *pair, f"'{name}' and '{alias}'")
    tensors = {name: tensor for name, tensor in plan.tensors.items() if name not in planned}
    return replace(plan, tensors=tensors, norms=_renamed_norms(plan.norms, planned))


def _renamed_norms(norms: Iterable[Norm], aliases: Mapping[str, str]) -> tuple[Norm, ...]:
    """Return the norms under their tensors' first names, without those that share a part."""
    renamed = dict.fromkeys(
        Norm(**{key: aliases.get(value, value) for key, value in vars(norm).items()})
        for norm in norms
    )
    producers = Counter(norm.producer for norm in renamed)
    statistics = Counter(norm.mean for norm in renamed)
    return tuple(n for n in renamed if producers[n.producer] == statistics[n.mean] == 1)


def _first_difference(
    axes: tuple[Layout, ...], others: tuple[Layout, ...]
) -> tuple[Layout, Layout] | None:
    """Return the first two parts in which the layouts differ in more than a reason."""
    for one, other in zip(axes, others, strict=True):
        match one, other:
            case Pinned(size), Pinned(twin) if size == twin:
                continue
            case (Product(a), Product(b)) | (Concat(a), Concat(b)) if len(a) == len(b):
                if pair := _first_difference(a, b):
                    return pair
            case _ if one != other:
                return one, other
    return None


def _unify(plan: Plan, one: Layout, other: Layout, what: str) -> Plan:
    match one, other:
        case Units(group), Units(twin):
            return _merge_groups(plan, group, twin)
        case (Units(group), Pinned(size, reason)) | (Pinned(size, reason), Units(group)):
            return pin_groups(plan, {group: size}, reason)
    raise ArchitectureError(f"{what} are one tied tensor used in two different ways", MODEL_HINT)


def _merge_groups(plan: Plan, group: str, twin: str) -> Plan:
    """Return the plan with both groups under the name of the one that comes first."""
    names = [g.name for g in plan.groups]
    first, second = sorted((group, twin), key=names.index)

    def renamed(name: str) -> Layout:
        return Units(first if name == second else name)

    tensors = {
        key: replace(tensor, axes=tuple(replace_groups(axis, renamed) for axis in tensor.axes))
        for key, tensor in plan.tensors.items()
    }
    merged, absorbed = plan.group(first), plan.group(second)
    merged = merged if not merged.can_grow else replace(absorbed, name=first)
    groups = tuple(merged if g.name == first else g for g in plan.groups if g.name != second)
    same_width = (
        tuple(dict.fromkeys(first if g == second else g for g in tie)) for tie in plan.same_width
    )
    ties = tuple(tie for tie in same_width if len(tie) > 1)
    return replace(plan, groups=groups, tensors=tensors, same_width=ties)


KEPT = "kept"


def keep_tensors(
    plan: Plan, kept: Sequence[str], *, tensors: Mapping[str, TensorInfo], widths: Mapping[str, int]
) -> Plan:
    """Return the plan without the kept tensors, the groups on their axes pinned.

    A kept tensor that the plan does not describe pins every group as wide as one of its axes, and
    all on an axis as long as one of its own: nothing says which of them it touches.
    """
    touched: set[str] = set()
    layouts = [axis for tensor in plan.tensors.values() for axis in tensor.axes]
    for name in kept:
        if name in plan.tensors:
            touched |= {g for axis in plan.tensors[name].axes for g in groups_in(axis)}
        else:
            shape = tensors[name].shape
            touched |= {g for g, width in widths.items() if width in shape}
            alike = (layout for layout in layouts if axis_size(layout, widths) in shape)
            touched |= {g for layout in alike for g in groups_in(layout)}
    pinned = pin_groups(plan, {group: widths[group] for group in touched}, KEPT)
    others = {name: tensor for name, tensor in pinned.tensors.items() if name not in kept}
    norms = tuple(norm for norm in pinned.norms if not set(vars(norm).values()) & set(kept))
    notes = [*plan.notes]
    if touched:
        groups = ", ".join(sorted(touched))
        notes.append(f"kept tensors pin {groups}: averaged position by position, not matched")
    return replace(
        pinned, tensors=others, norms=norms, kept=(*plan.kept, *kept), notes=tuple(notes)
    )
