"""`--dry-run`: what a run would exchange and become, before any work is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmerge.graph import count_parameters
from fedmerge.types.clients import Client
from fedmerge.types.layouts import axis_size
from fedmerge.types.plans import Plan
from fedmerge.workflow.predict import Prediction, predict
from fedmerge.workflow.retrain.prepare import Run, matching_options


@dataclass(frozen=True)
class RetrainPrediction:
    """The sizes of a run; bytes are those of layers that do not grow."""

    merge: Prediction
    rounds: tuple[str, ...]  # what each decides
    epochs: int  # of local training, all rounds of one client together
    bytes_up: int  # of all clients and rounds
    bytes_down: int

    def to_json(self) -> dict[str, Any]:
        """Return the prediction as JSON values."""
        own = {**vars(self), "rounds": list(self.rounds)}
        del own["merge"]
        return {**self.merge.to_json(), **own}


def predict_run(run: Run) -> RetrainPrediction:
    """Return what a run would exchange with its clients, and how large its result may be."""
    prepared, rounds = run.prepared, run.method.rounds
    widest = {
        group.name: max(own[group.name] for own in prepared.client_widths)
        for group in prepared.plan.groups
    }
    whole = sum(current.completes for current in rounds)  # each has exchanged every tensor once
    first = prepared.aligned[0]
    up = [_bytes(prepared.plan, own, first) for own in prepared.client_widths]
    return RetrainPrediction(
        merge=predict(prepared, matching_options(run.options)),
        rounds=tuple(current.layer.label for current in rounds),
        epochs=sum(current.epochs for current in rounds),
        bytes_up=whole * sum(up),
        bytes_down=whole * len(up) * _bytes(prepared.plan, widest, first),
    )


def _bytes(plan: Plan, widths: Mapping[str, int], first: Client) -> int:
    """Return the bytes of all planned tensors at some widths, as they are in memory."""
    double = [name for name in plan.tensors if first.tensors[name].dtype == "float64"]
    sizes = [
        int(np.prod([axis_size(axis, widths) for axis in plan.tensors[name].axes]))
        for name in double
    ]
    return 4 * (count_parameters(plan, widths) + sum(sizes))
