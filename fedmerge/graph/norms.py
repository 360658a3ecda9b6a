"""Behind which layer each norm and each PReLU stands, where names and shapes tell."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from fedmerge.errors import ArchitectureError
from fedmerge.graph.layers import MODEL_HINT, Layer
from fedmerge.graph.names import natural_key, numbers, parts, skeleton


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
