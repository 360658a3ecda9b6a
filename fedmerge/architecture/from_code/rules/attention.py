"""Scaled dot products: queries and keys share their units, values carry theirs on."""

from __future__ import annotations

from collections.abc import Mapping

from fedmerge.architecture.from_code.labels import Axes, Fixed, product
from fedmerge.architecture.from_code.trace import Call, Result, Rule, Summed

WHY_SCALE = "the scale of attention depends on the width"


def attention(call: Call) -> Result:
    """softmax(q kᵀ · scale) v for q (…, L, E), k (…, S, E), v (…, S, V)."""
    query, key, value = (call[name] for name in ("query", "key", "value"))
    q = call.trace.read(query)
    k, v = (_repeated_heads(call, call.trace.read(tensor), q) for tensor in (key, value))
    call.labels.unify(q[-1], k[-1])
    call.labels.unify(k[-2], v[-2])
    if call["scale"] is None:
        call.labels.mark(q[-1], WHY_SCALE)
    call.labels.mark(k[-2], "softmax over the units")
    if call["is_causal"]:
        call.labels.pin(q[-2], "causal")
        call.labels.pin(k[-2], "causal")
    shapes = [(axes[:-2], t.shape[:-2]) for axes, t in ((q, query), (k, key), (v, value))]
    batch = call.broadcast(shapes) if query.dim() > 2 else ()
    _mask(call, (*batch, q[-2], k[-2]))
    scores = Summed(q[-1], (q[-2], k[-2]), batch)
    call.trace.sums += [scores, Summed(k[-2], (q[-2], v[-1]), batch)]
    made = (*batch, q[-2], v[-1])
    others = [tuple(Fixed(size) for size in t.shape) for t in call.outputs[1:]]
    return [made, *others]


def _repeated_heads(call: Call, axes: Axes, query: Axes) -> Axes:
    """Return the axes of keys or values with every head repeated for its group of queries."""
    if not call["enable_gqa"] or len(axes) < 3:
        return axes
    times = query[-3].size // axes[-3].size
    return (*axes[:-3], product((axes[-3], call.labels.same(times))), *axes[-2:])


def _mask(call: Call, scores: Axes) -> None:
    mask = call.tensor("attn_mask")
    mask = mask if mask is not None else call.tensor("attn_bias")
    if mask is None:
        return
    for own, axis in zip(call.trace.read(mask)[::-1], scores[::-1], strict=False):
        if own.size == axis.size:
            call.labels.unify(own, axis)


_NAMES = (
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_attention_math",
)  # fmt: skip

ATTENTION_RULES: Mapping[str, Rule] = dict.fromkeys(_NAMES, attention)
