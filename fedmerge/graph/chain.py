"""A plan from the state dict alone, for plain chains of layers (never strictly sound: say so)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fedmerge.errors import ArchitectureError
from fedmerge.graph.known import KnownNet, recognise
from fedmerge.graph.layers import MODEL_HINT, Layer, group_layers
from fedmerge.graph.names import names_embedding
from fedmerge.graph.norms import place_norms
from fedmerge.graph.order import Order, forward_order, stored_alphabetically
from fedmerge.graph.skips import refuse_hidden_skips
from fedmerge.graph.ties import tie_tensors
from fedmerge.graph.walk import Walk
from fedmerge.types.clients import TensorInfo
from fedmerge.types.plans import Plan

_INFERRED = (
    "the file stores names alphabetically: the order of the layers was inferred from their "
    "names, numbers and widths"
)
_GROUPED = (
    "'{}' is assumed to read images of one channel: a grouped convolution of three channels "
    "has the same shape, and needs --model"
)


@dataclass(frozen=True)
class ChainOptions:
    """What the user knows of the net that its names do not show."""

    flatten: int | None = None  # positions per channel, or steps, that a linear layer reads
    assume_chain: bool = False  # take equal widths for a plain chain


def plan_chain(
    tensors: Mapping[str, TensorInfo],
    options: ChainOptions,
    *,
    aliases: Mapping[str, str],
    kept: Collection[str] = (),
    source: str,
) -> Plan:
    """Return the plan of a plain chain of layers, or refuse with the reason.

    Layers whose tensors are all `kept` may fall out of the chain.
    """
    try:
        floats = {name: info for name, info in tensors.items() if info.is_float}
        layers = group_layers(floats, kept=kept)
        order = forward_order(
            [layer for layer in layers if layer.is_weighted],
            alphabetical=stored_alphabetically(floats),
            assume_chain=options.assume_chain,
            kept=kept,
        )
        plan = tie_tensors(_plan_order(layers, order, options, kept), aliases)
    except ArchitectureError as error:
        raise ArchitectureError(f"{source}: {error.problem}", error.hint) from None
    return plan


def _plan_order(
    stored: Sequence[Layer], order: Order, options: ChainOptions, kept: Collection[str]
) -> Plan:
    """Return the plan of the layers in that order."""
    if not any(layer.is_weighted for layer in stored):
        raise ArchitectureError("has no layer with weights that are understood", MODEL_HINT)
    # without any order that chains, the stored one tells what does not fit
    chain = order.layers or [layer for layer in stored if layer.is_weighted]
    known = recognise(chain)
    embedded = _starts_with_embedding(chain, known, options.flatten)
    if embedded:
        _refuse_two_embeddings(chain)
    layers: Sequence[Layer] = chain
    if order.layers:
        layers = place_norms(
            chain,
            stored,
            is_ordered=not order.inferred,
            starts_with_embedding=embedded,
            kept=kept,
        )
    walk = Walk(options.flatten)
    for layer in layers:
        walk.step(layer, is_embedding=embedded and layer is chain[0])
    if known is None and not options.assume_chain:
        refuse_hidden_skips(walk.activations)
    plan = walk.finish(known.name if known else "plain chain")
    notes = [_INFERRED] if order.inferred else []
    if chain[0].kind == "conv" and chain[0].input_width == 1 and chain[0].output_width % 3 == 0:
        notes.append(_GROUPED.format(chain[0].prefix))
    return replace(plan, notes=(*plan.notes, *notes))


def _starts_with_embedding(
    chain: Sequence[Layer], known: KnownNet | None, steps: int | None
) -> bool:
    """Rule 3: the first bias-free matrix is an embedding if the next layer reads its axis 1."""
    first, following = chain[0], chain[1:2]
    if first.kind != "linear" or "bias" in first.tensors or not following:
        return False
    if known is not None:
        return known.starts_with_embedding
    rows, columns = first.shape("weight")
    reads = following[0].input_width
    named = names_embedding(first.prefix)
    several = following[0].kind == "linear" and (
        reads == columns * (steps or 1) or (named and reads % columns == 0 and reads != rows)
    )
    if rows == reads and (reads == columns or several):
        raise ArchitectureError(
            f"'{first.name('weight')}' ({rows}×{columns}) may be an embedding or linear", MODEL_HINT
        )
    return reads == columns or several


def _refuse_two_embeddings(chain: Sequence[Layer]) -> None:
    """Refuse a second matrix without bias: it may be looked up too (positions, items)."""
    if len(chain) > 2 and chain[1].kind == "linear" and "bias" not in chain[1].tensors:
        raise ArchitectureError(
            f"'{chain[0].prefix}' is an embedding, and '{chain[1].prefix}' may be one too",
            MODEL_HINT,
        )
