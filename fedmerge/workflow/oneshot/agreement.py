"""How alike models answer: shares of equal decisions, and distances of outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedmerge.errors import ArchitectureError
from fedmerge.graph.model.modules import plain_numbers
from fedmerge.probing.values import Probes
from fedmerge.units import Averaging
from fedmerge.workflow.models import evaluated, tensors_in

BATCH = 128  # samples run at once
IMAGE_AXES = 4  # samples, channels, height, width


@dataclass(frozen=True)
class Agreement:
    """How a model's outputs on probes compare with others, the ensemble's as a rule."""

    decisions: float  # share of rows whose largest output is at the same place; of one, its sign
    explained: float  # 1 - mean square distance ÷ variance of the others' outputs; 1 at best

    def to_json(self) -> dict[str, float | None]:
        """Return both numbers; what is not finite is null."""
        return {name: v if math.isfinite(v) else None for name, v in vars(self).items()}

    @property
    def rank(self) -> tuple[float, float]:
        """The larger, the better."""
        return self.decisions, self.explained


def answers(model: nn.Module, probes: Probes, *, device: str) -> Tensor:
    """Return a model's outputs on all probes as (rows, outputs), in single precision on the CPU."""
    batches = probes.batches(BATCH, device)
    return torch.cat([compared_rows(evaluated(model, batch)).detach().cpu() for batch in batches])


def compared_rows(outputs: object) -> Tensor:
    """Return the first numbers among a model's outputs as (rows, outputs), in single precision.

    Outputs are the last axis, or the channels of images; one number per sample is one output.
    """
    plain = map(plain_numbers, tensors_in(outputs))
    found = [t for t in plain if t.is_floating_point() and t.dim()]
    if not found:
        raise ArchitectureError("the model returns no numbers that could be compared")
    first = found[0].unsqueeze(-1) if found[0].dim() == 1 else found[0]
    first = first.movedim(1, -1) if first.dim() >= IMAGE_AXES else first
    return first.reshape(-1, first.shape[-1]).float()


def ensemble_weights(averaging: Averaging, members: Sequence[int], outputs: int) -> list[Tensor]:
    """Return what each member of the ensemble counts for each output, (outputs,).

    Its share of the class where that is known, as in an averaged last layer: a client knows little
    of classes that it never saw. A class of no member, and outputs that are no classes, go by the
    clients' weights.
    """
    each = torch.tensor([averaging.client_weights[k] for k in members])
    alike = each.unsqueeze(1).expand(-1, outputs)
    shares = averaging.class_weights
    if shares is None or shares.shape[1] != outputs:
        return list(alike)
    own = torch.from_numpy(shares[list(members)]).to(alike)
    return list(torch.where(own.sum(0) > 0, own, alike))


def mean_answers(each: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the ensemble's outputs: the clients' weighted mean."""
    total = sum((w * own for w, own in zip(weights, each, strict=True)), torch.zeros(()))
    return total / sum(weights, torch.zeros(()))


def agreement(outputs: Tensor, wanted: Tensor) -> Agreement:
    """Compare outputs (rows, outputs) with others; those that are not finite agree with nothing."""
    if not torch.isfinite(outputs).all():
        return Agreement(0.0, -torch.inf)
    decisions = float((decisions_of(outputs) == decisions_of(wanted)).float().mean())
    spread = variance(wanted)
    distance = float((outputs - wanted).square().mean())
    return Agreement(decisions, 1 - distance / spread if spread else float(distance == 0))


def variance(outputs: Tensor) -> float:
    """Return how much outputs (rows, outputs) differ from row to row, in the mean."""
    return float((outputs - outputs.mean(0)).square().mean())


def decisions_of(outputs: Tensor) -> Tensor:
    """Return where each row is largest; of one output, whether it is positive."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
