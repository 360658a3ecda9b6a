"""Nets with signs and bases, and clients that compute the same with others of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.types.arrays import Float64Array
from fedmerge.types.assignments import Assignment
from fedmerge.types.clients import Client
from fedmerge.units import place_tensor
from fedmerge.workflow.clients import open_clients
from fedmerge.workflow.models import ModelCode
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.symmetries.embeddings import Embedding, basis_change, free_embeddings
from fedmerge.workflow.oneshot.symmetries.rewritten import Change, Rewritten
from fedmerge.workflow.oneshot.symmetries.signs import sign_change
from fedmerge.workflow.oneshot.symmetries.trial import Trial
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.prepared import Prepared, prepare
from tests.model_zoo import ZOO, Model

TIGHT = 1e-9  # of the largest output, double precision
SAME = 1e-5  # single precision
IMAGE = ((2, 1, 8, 8),)


def pooled(pool: nn.Module) -> nn.Module:
    """Return a convolution whose units are squashed, then pooled."""
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.Tanh(), pool, nn.Flatten(), nn.Linear(45, 3))


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def layer_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


NETS: dict[str, Model] = {
    **ZOO,
    "tanh, average pool": Model(lambda: pooled(nn.AvgPool2d(2)), IMAGE, 1),
    "tanh, max pool": Model(lambda: pooled(nn.MaxPool2d(2)), IMAGE, 1),
    "batch norm, tanh": Model(batch_normed, ((2, 6),), 1),
    "tanh, layer norm": Model(layer_normed, ((2, 6),), 1),
}
CANDIDATE = 2  # the gate of an LSTM and of a GRU behind the tanh
SIGNED: dict[str, dict[str, int | None]] = {  # net → groups with signs → the rows that change
    "mlp": {"2": None},  # the first layer has a ReLU
    "tanh, average pool": {"0": None},
    "batch norm, tanh": {"0": None},
    "lstm": {"rnn_l0": CANDIDATE},
    "lstm, 2 layers, both directions": dict.fromkeys(
        ("rnn_l0", "rnn_l0_reverse", "rnn_l1", "rnn_l1_reverse"), CANDIDATE
    ),
    "lstm with projection": {
        "rnn_l0": CANDIDATE,
        "rnn_l0.projection": None,
        "rnn_l1": CANDIDATE,
        "rnn_l1.projection": None,
    },
    "gru, 2 layers": {"rnn_l0": CANDIDATE, "rnn_l1": CANDIDATE},
    "rnn cell": {"cell": None},
    "hand-written lstm": {"inputs": CANDIDATE},
    "lstm from learned states": {"start": CANDIDATE},
    "tied language model": {"encoder": CANDIDATE, "rnn_l0": CANDIDATE},
    "language model": {"encoder": None, "rnn_l0": CANDIDATE, "rnn_l1": CANDIDATE},
    "residual mlp": {"stem": None},  # a stream that nothing but linear layers reads
}
State = dict[str, Tensor]


def build(name: str) -> nn.Module:
    """Return a net: the factory of the merges here."""
    return NETS[name].build()


def code(name: str) -> ModelCode:
    dtypes = ("long",) if NETS[name].tokens else ()
    return ModelCode(f"{__name__}:build", {"name": name}, (NETS[name].shapes[0],), dtypes)


def fresh(name: str, seed: int, dtype: torch.dtype = torch.float32) -> State:
    """Return the state of a net whose numbers are all random."""
    torch.manual_seed(seed)
    model = build(name).to(dtype)
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.dim():
            values = 1.5 * torch.randn_like(tensor) / max(1, tensor[0].numel()) ** 0.5
            tensor.copy_(0.5 + values.abs() if "var" in key else values)
    return dict(model.state_dict())


def prepared_of(name: str, states: list[State], **options: Any) -> Prepared:
    chosen = MatchOptions(**options)
    return prepare(open_clients(states, chosen.reading), chosen, model=code(name))


def models_of(name: str, *states: State) -> Models:
    return Models(prepared_of(name, list(states)), code(name), "cpu")


def inputs_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Return 16 inputs that no merge has seen."""
    generator = torch.Generator().manual_seed(7)
    shape = (16, *NETS[name].shapes[0][1:])
    if NETS[name].tokens:
        return (torch.randint(NETS[name].tokens, shape, generator=generator),)
    return (torch.randn(shape, generator=generator, dtype=dtype),)


def answers(name: str, state: State) -> Tensor:
    dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    model = build(name).to(dtype).eval()
    model.load_state_dict(state)
    with torch.no_grad():
        found = model(*inputs_of(name, dtype))
    assert isinstance(found, Tensor)
    return found


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max())


def written(client: Client, state: State, *changes: Change) -> State:
    """Return a client's state after some changes."""
    rewritten = Rewritten(client, changes)
    return {
        name: torch.from_numpy(np.array(rewritten.read(client.aliases.get(name, name))))
        for name in state
    }


def signs_for(units: int, seed: int) -> Float64Array:
    return np.random.default_rng(seed).choice([-1.0, 1.0], units)


def embeddings_of(name: str, state: State) -> list[Embedding]:
    """Return the embeddings of a net that may be in any basis."""
    models = models_of(name, state, state)
    prepared, rng = models.prepared, np.random.default_rng(0)
    trial, widths = Trial(models, inputs_of(name)), prepared.client_widths[0]
    return free_embeddings(trial, prepared.plan, prepared.aligned[0], widths, rng=rng)


def language_in_another_basis(state: State, seed: int) -> State:
    """Return the same language model with its embedding in another basis."""
    prepared = prepared_of("language model", [state, state])
    (own,) = embeddings_of("language model", state)
    basis = np.random.default_rng(seed).normal(size=(4, 4)) + np.eye(4)
    assert np.linalg.cond(basis) < 50
    change = basis_change(prepared.plan, prepared.client_widths[0], own, basis)
    return written(prepared.aligned[0], state, change)


def disguised(name: str, state: State, seed: int) -> State:
    """Return the same function with units in other orders, of other signs, in another basis."""
    if name == "language model":
        state = language_in_another_basis(state, seed)
    prepared = prepared_of(name, [state, state])
    widths, client = prepared.client_widths[0], prepared.aligned[0]
    parts = SIGNED[name].items()
    changes = [
        sign_change(prepared.plan, widths, group, part, signs_for(widths[group], seed))
        for group, part in parts
    ]
    signed = written(client, state, *changes)
    rng = np.random.default_rng(seed)
    orders = {group: rng.permutation(width) for group, width in widths.items()}
    model = build(name)
    model.load_state_dict(permuted(prepared, signed, orders))
    return dict(model.state_dict())  # tied as before


def permuted(prepared: Prepared, state: State, orders: dict[str, Any]) -> State:
    widths = prepared.client_widths[0]
    placement = {group: Assignment(order, widths[group]) for group, order in orders.items()}
    aliases, found = prepared.aligned[0].aliases, dict(state)
    for name, tensor in state.items():
        plan = prepared.plan.tensors[aliases.get(name, name)]
        found[name] = torch.from_numpy(place_tensor(tensor.numpy(), plan, placement, widths))
    return found
