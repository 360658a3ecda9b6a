"""Attempts to match LSTMs better than fedmerge does, for `benchmarks.paper`.

Embeddings are turned and signs are changed without a change of any client's function; so clients
become more alike before they are matched as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedmerge.federated import Exchange, Federation, FedMA, LocalModel, Round
from fedmerge.values import Array, FloatArray

EMBEDDING, DECODER = "encoder.weight", "decoder.weight"
INPUT, RECURRENT = "rnn.weight_ih_l0", "rnn.weight_hh_l0"
BIASES = ("rnn.bias_ih_l0", "rnn.bias_hh_l0")
GATES, CANDIDATE = 4, 2  # row blocks of an LSTM's tensors; the one behind the tanh


@dataclass(frozen=True)
class Attempt:
    """A change that makes a client more like the first one, found by what a round exchanges.

    The server finds it and tells the client, whose other tensors follow.
    """

    tensor: str  # that the round exchanges
    find: Callable[[LocalModel, LocalModel], Array]
    apply: Callable[[LocalModel, Array], LocalModel]


@dataclass(frozen=True)
class LstmFedMA(FedMA):
    """FedMA of the paper's character model, with clients made alike before they are matched."""

    attempts: tuple[str, ...] = ()

    def exchange(self, federation: Federation, current: Round, present: Sequence[int]) -> Exchange:
        """Turn or flip what the round matches, then do as usual; what clients are told is sent."""
        first, *others = federation.locals
        told = 0
        for attempt in (ATTEMPTS[name] for name in self.attempts):
            if attempt.tensor in current.layer.tensors:
                changes = [attempt.find(model, first) for model in others]
                told += sum(change.nbytes for change in changes)
                others = [attempt.apply(m, c) for m, c in zip(others, changes, strict=True)]
        alike = replace(federation, locals=(first, *others))
        done = super().exchange(alike, current, present)
        return replace(done, down=done.down + told)


def turn_towards(model: LocalModel, first: LocalModel) -> FloatArray:
    """Return the orthogonal R (inputs, inputs) that minimises ‖E·R - E_first‖ of embeddings E."""
    embedding = model.arrays[EMBEDDING]
    left, _, right = np.linalg.svd(embedding.T @ first.arrays[EMBEDDING])
    return np.asarray(left @ right, embedding.dtype)


def turned(model: LocalModel, turn: FloatArray) -> LocalModel:
    """Return the same function with E·R and W_ih·R in place of E and W_ih; E·W_ihᵀ stays."""
    return model.updated({name: model.arrays[name] @ turn for name in (EMBEDDING, INPUT)})


def signs_towards(model: LocalModel, first: LocalModel) -> Array:
    """Return the signs (hidden,) in which hidden units are most alike units of the first client."""
    own, other = _gates(model), _gates(first)
    plain = sum(other[k] @ own[k].T for k in range(GATES) if k != CANDIDATE)
    either = other[CANDIDATE] @ own[CANDIDATE].T
    rows, columns = linear_sum_assignment(plain + np.abs(either), maximize=True)
    signs: Array = np.ones(own.shape[1], np.int8)
    signs[columns] = np.where(either[rows, columns] < 0, -1, 1)
    return signs


def flipped(model: LocalModel, signs: Array) -> LocalModel:
    """Return the same function with hidden units times signs (hidden,) of 1 or -1.

    A unit changes its sign with its candidate's row, and the recurrent and decoder columns.
    """
    arrays = model.arrays
    by_gate = np.ones((GATES, len(signs)), signs.dtype)
    by_gate[CANDIDATE] = signs
    rows = by_gate.reshape(-1)
    return model.updated(
        {
            INPUT: arrays[INPUT] * rows[:, None],
            RECURRENT: arrays[RECURRENT] * rows[:, None] * signs,
            DECODER: arrays[DECODER] * signs,
            **{name: arrays[name] * rows for name in BIASES},
        }
    )


def _gates(model: LocalModel) -> FloatArray:
    """Return the input weights and the bias of every unit (gates, hidden, inputs + 1)."""
    bias = sum(model.arrays[name] for name in BIASES)
    stacked = np.concatenate([model.arrays[INPUT], np.asarray(bias)[:, None]], axis=1)
    return np.asarray(stacked.reshape(GATES, -1, stacked.shape[1]))


ATTEMPTS: Mapping[str, Attempt] = {
    "rotation": Attempt(EMBEDDING, turn_towards, turned),
    "signs": Attempt(INPUT, signs_towards, flipped),
}
