"""Attempts to match LSTMs better than by their input weights, for `benchmarks.paper`.

Embeddings are turned and signs are changed without a change of any client's function; so clients
become more alike before they are matched as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from fedmerge.matching import GroupMatching
from fedmerge.types.arrays import FloatArray
from fedmerge.types.layouts import Widths
from fedmerge.types.plans import Plan
from fedmerge.workflow.layers import match_group
from fedmerge.workflow.retrain.federation import Exchange, Federation
from fedmerge.workflow.retrain.fedma import FedMA, same_matchings
from fedmerge.workflow.retrain.locals import LocalModel
from fedmerge.workflow.retrain.schedule import Round

EMBEDDING, DECODER = "encoder.weight", "decoder.weight"
INPUT, RECURRENT = "rnn.weight_ih_l0", "rnn.weight_hh_l0"
BIASES = ("rnn.bias_ih_l0", "rnn.bias_hh_l0")
GATES, CANDIDATE = 4, 2  # row blocks of an LSTM's tensors; the one behind the tanh
REFINEMENTS = 10  # matchings around the last one at most


@dataclass(frozen=True)
class LstmFedMA(FedMA):
    """FedMA of the paper's character model, with clients made alike before they are matched."""

    attempts: tuple[str, ...] = ()  # rotation, signs, recurrent

    def exchange(self, federation: Federation, current: Round, present: Sequence[int]) -> Exchange:
        """Turn or flip what the round matches, then do as usual."""
        for attempt in self.attempts:
            is_due, change = _CHANGES.get(attempt, (None, None))
            if change is not None and is_due in current.layer.tensors:
                first = federation.locals[0]
                changed = tuple(change(model, first) for model in federation.locals)
                federation = replace(federation, locals=changed)
        return super().exchange(federation, current, present)

    def _match(
        self,
        group: str,
        clients: Sequence[LocalModel],
        widths: Sequence[Widths],
        matched: Widths,
        limit: int | None,
        *,
        plan: Plan | None = None,
    ) -> GroupMatching:
        """Match as usual; where recurrent weights go up too, match again around the result."""
        found = super()._match(group, clients, widths, matched, limit, plan=plan)
        whole = plan or self.problem.plan
        if "recurrent" not in self.attempts or group not in whole.tensors[RECURRENT].produces:
            return found
        sent = {name: t for name, t in whole.tensors.items() if not t.makes_outputs}
        problem = replace(
            self.problem,
            clients=clients,
            client_widths=widths,
            plan=replace(whole, tensors=sent),
        )
        number = [g.name for g in whole.groups].index(group)
        earlier = same_matchings(matched, len(clients))
        for _ in range(REFINEMENTS):
            before, placed = found, {**earlier, group: found}
            found = match_group(
                problem, number, placed, found.width, outgoing=True, progress=lambda share: None
            )
            pairs = zip(before.assignments, found.assignments, strict=True)
            if all(np.array_equal(a.indices, b.indices) for a, b in pairs):
                break
        return found


def rotated(model: LocalModel, first: LocalModel) -> LocalModel:
    """Turn the embedding's dimensions towards the first client's; the product with W_ih stays.

    E·R and W_ih·R with the orthogonal R that minimises ‖E·R - E_first‖.
    """
    embedding, weights = model.arrays[EMBEDDING], model.arrays[INPUT]
    left, _, right = np.linalg.svd(embedding.T @ first.arrays[EMBEDDING])
    turn = (left @ right).astype(embedding.dtype)
    return model.updated({EMBEDDING: embedding @ turn, INPUT: weights @ turn})


def signed(model: LocalModel, first: LocalModel) -> LocalModel:
    """Give each hidden unit the sign in which it is most alike a unit of the first client.

    A unit changes its sign with its candidate's row, and the recurrent and decoder columns.
    """
    own, other = _gates(model), _gates(first)
    plain = sum(other[k] @ own[k].T for k in range(GATES) if k != CANDIDATE)
    turned = other[CANDIDATE] @ own[CANDIDATE].T
    rows, columns = linear_sum_assignment(plain + np.abs(turned), maximize=True)
    signs: FloatArray = np.ones(own.shape[1], own.dtype)
    signs[columns] = np.where(turned[rows, columns] < 0, -1, 1)
    return flipped(model, signs)


def flipped(model: LocalModel, signs: FloatArray) -> LocalModel:
    """Return the same function with hidden units times signs (hidden,) of 1 or -1."""
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


Change = Callable[[LocalModel, LocalModel], LocalModel]
_CHANGES: Mapping[str, tuple[str, Change]] = {  # what the round averages, and what is done before
    "rotation": (EMBEDDING, rotated),
    "signs": (INPUT, signed),
}
