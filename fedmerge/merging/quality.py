"""How far models are from the clients' ensemble, and what is expected of a merge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code.modules import plain_numbers
from fedmerge.architecture.model_code import evaluated, tensors_in
from fedmerge.errors import ArchitectureError
from fedmerge.merging.averages import Averaging
from fedmerge.probes.probe_inputs import Probes
from fedmerge.values.wording import client_name, percent, whole_percent

BATCH = 128  # samples run at once
IMAGE_AXES = 4  # samples, channels, height, width
NEGLIGIBLE = 1e-4  # distance from the ensemble that rounding may explain
PROBABLE = 1e-3  # by which sums of probabilities may miss 1: they may come in half precision


@dataclass(frozen=True)
class Agreement:
    """How a model's outputs on probes compare with others, the ensemble's as a rule."""

    decisions: float  # share of rows whose largest output is at the same place; of one, its sign
    explained: float  # 1 - mean square distance ÷ variance of the others' outputs; 1 at best
    distance: float  # mean L1 distance of class probabilities, or of outputs that are none

    def to_json(self) -> dict[str, float | None]:
        """Return both numbers; what is not finite is null."""
        return {name: v if math.isfinite(v) else None for name, v in vars(self).items()}

    @property
    def rank(self) -> float:
        """The larger, the better: decisions on inputs that nets know by heart tell little."""
        return -max(self.distance, NEGLIGIBLE)


def outputs_on(model: nn.Module, probes: Probes, *, device: str) -> Tensor:
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


def mean_outputs(each: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the ensemble's outputs: the clients' weighted mean."""
    total = sum((w * own for w, own in zip(weights, each, strict=True)), torch.zeros(()))
    return total / sum(weights, torch.zeros(()))


def agreement(outputs: Tensor, wanted: Tensor, *, are_classes: bool = True) -> Agreement:
    """Compare outputs (rows, outputs) with others; those that are not finite agree with nothing."""
    if not torch.isfinite(outputs).all():
        return Agreement(0.0, -torch.inf, torch.inf)
    spread = variance(wanted)
    square = float((outputs - wanted).square().mean())
    return Agreement(
        decisions=same_decisions(outputs, wanted),
        explained=1 - square / spread if spread else float(square == 0),
        distance=distance(outputs, wanted, are_classes=are_classes),
    )


def same_decisions(outputs: Tensor, others: Tensor) -> float:
    """Return the share of rows (rows, outputs) on which two models decide alike."""
    return float((decisions_of(outputs) == decisions_of(others)).float().mean())


def distance(outputs: Tensor, others: Tensor, *, are_classes: bool) -> float:
    """Return the mean L1 distance of rows (rows, outputs): of their probabilities, if any."""
    if are_classes:
        outputs, others = probabilities(outputs), probabilities(others)
    return float((outputs - others).abs().sum(1).mean())


def probabilities(scores: Tensor) -> Tensor:
    """Return the class probabilities (rows, classes) that logits, or probabilities, stand for."""
    sums = scores.sum(1)
    if bool((scores >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=PROBABLE):
        return scores
    return scores.softmax(1)


def are_class_scores(outputs: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Return whether rows (rows, outputs) seem to score classes.

    One number is a measurement, and as many numbers as a sample has stand for the sample itself.
    """
    return outputs.shape[1] > 1 and all(
        math.prod(given.shape) != outputs.numel() for given in inputs if given.is_floating_point()
    )


def variance(outputs: Tensor) -> float:
    """Return how much outputs (rows, outputs) differ from row to row, in the mean."""
    return float((outputs - outputs.mean(0)).square().mean())


def decisions_of(outputs: Tensor) -> Tensor:
    """Return where each row is largest; of one output, whether it is positive."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()


SAME = 0.985  # share of equal decisions from which a merge may be a client in disguise
LITTLE_PULL = 0.1  # below which it is


@dataclass(frozen=True)
class Position:
    """Where a model stands between the clients and their ensemble."""

    distance: float  # of the model from the ensemble
    clients: Mapping[str, float]  # of the clients
    likeness: Mapping[str, float] = field(default_factory=dict)  # share of equal decisions

    @property
    def nearest(self) -> str:
        """The client that is nearest to the ensemble."""
        return min(self.clients, key=lambda name: self.clients[name])

    @property
    def pull(self) -> float | None:
        """1 - distance ÷ the nearest client's: 0 as far as that client, 1 the ensemble itself.

        None where that client is the ensemble but for rounding, or nothing is finite.
        """
        nearest = self.clients[self.nearest]
        is_known = NEGLIGIBLE < nearest < math.inf and math.isfinite(self.distance)
        return 1 - self.distance / nearest if is_known else None

    @property
    def copied_client(self) -> str | None:
        """The client that the model is, if nothing of the others is in it."""
        if not self.likeness or self.pull is None or self.pull >= LITTLE_PULL:
            return None
        name = max(self.likeness, key=lambda name: self.likeness[name])
        return name if self.likeness[name] > SAME else None

    @property
    def words(self) -> str:
        """The position in plain words."""
        if self.copied_client is not None:
            return f"this is client {self.copied_client}: nothing of the others is in it"
        if not math.isfinite(self.distance):
            return "nowhere near the ensemble: its outputs are not finite"
        if self.pull is None:
            return f"the ensemble is as client {self.nearest}"
        if self.pull < -LITTLE_PULL:
            return f"farther from the ensemble than client {self.nearest}"
        if self.pull < LITTLE_PULL:
            return f"as far from the ensemble as client {self.nearest}"
        way = whole_percent(min(self.pull, 1.0))
        return f"{way} of the way from client {self.nearest} to the ensemble"

    @property
    def sentence(self) -> str:
        """The same as a sentence."""
        if self.copied_client is not None:
            return f"This is client {self.copied_client}: nothing of the others is in it."
        return f"The merge is {self.words}."


DATA = "data"  # the source of real inputs
CLEAR_PULL: Mapping[bool, float] = {  # from which a merge is expected to beat the nearest client
    True: 0.2,  # on real inputs, on which a deep net's was predicted to be 0.19 above what it is
    False: 0.3,  # on made-up ones, which flatter a merge
}
ALIKE = 0.5  # share of probes below which clients differ more often than not


@dataclass(frozen=True)
class Quality:
    """How often a merge and every client decide as the ensemble does, on held-out probes."""

    source: str  # of the probes
    samples: int
    merged: Agreement
    clients: Mapping[str, Agreement]  # with the ensemble of all
    candidates: Mapping[str, Agreement]
    chosen: str  # which candidate the merge is
    outliers: tuple[str, ...]  # clients that answer unlike the others
    dropped: tuple[str, ...] = ()  # clients that were left out for that
    alike: float | None = None  # share of equal decisions of two clients, in the mean
    likeness: Mapping[str, float] = field(default_factory=dict)  # the merge's, with each client

    @property
    def position(self) -> Position:
        """Where the merge stands between the clients and their ensemble."""
        distances = {name: own.distance for name, own in self.clients.items()}
        return Position(self.merged.distance, distances, self.likeness)

    @property
    def best_client(self) -> str:
        """The client nearest to the ensemble."""
        return self.position.nearest

    @property
    def is_client(self) -> bool:
        """Whether nothing that was tried is nearer to the ensemble than a client as it is."""
        return self.chosen in map(client_name, self.clients)

    @property
    def is_better(self) -> bool:
        """Whether the merge is expected to be better than every client."""
        pull = self.position.pull
        return pull is not None and not self.is_client and pull >= CLEAR_PULL[self._is_real]

    @property
    def _is_real(self) -> bool:
        return self.source == DATA

    @property
    def verdict(self) -> str:
        """Where the merge stands, and how often it decides as the ensemble does."""
        if self.is_client:
            return (
                f"Nothing that was tried comes nearer to the clients' ensemble than "
                f"{self.chosen}, so the result is that client."
            )
        return (
            f"{self.position.sentence} It decides as the ensemble does on "
            f"{percent(self.merged.decisions)} of {self.samples} held-out probes ({self.source}), "
            f"client {self.best_client} on {percent(self.clients[self.best_client].decisions)}."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the quality as JSON values."""
        return {
            "probes": self.source,
            "samples": self.samples,
            "agreement": self.merged.to_json(),
            "pull": self.position.pull,
            "likeness": dict(self.likeness),
            "position": self.position.words,
            "clients": {name: own.to_json() for name, own in self.clients.items()},
            "candidates": {name: own.to_json() for name, own in self.candidates.items()},
            "chosen": self.chosen,
            "outliers": list(self.outliers),
            "dropped": list(self.dropped),
            "clients_alike": self.alike,
        }

    def warnings(self) -> Iterator[str]:
        """Say what speaks against the merge."""
        if not math.isfinite(self.merged.distance):
            yield f"the merge is useless: its outputs on {self.source} probes are not finite"
        elif self.is_client:
            yield (
                f"the result is {self.chosen} itself: nothing that was tried comes nearer to the "
                "clients' ensemble; more effort, growth or real inputs (`probe_data`) may"
            )
        elif not self.is_better and self.merged.distance > NEGLIGIBLE:
            doubt = "" if self._is_real else "; made-up probes flatter a merge"
            is_farther = (self.position.pull or 0.0) < 0
            how = "is predicted to be" if is_farther else "may be"
            yield (
                f"the merge {how} worse than client {self.best_client}: on {self.samples} "
                f"{self.source} probes it is {self.position.words}{doubt}"
            )
        elif self.alike is not None and self.alike < ALIKE and self.source != "noise":
            yield (
                f"the merge may be worse than the best client: two clients decide alike on only "
                f"{percent(self.alike)} of the probes, and whether their ensemble is better than "
                "the best of them can't be told without labels"
            )
        for name in self.outliers:
            yield (
                f"client {name} answers unlike the others (untrained, diverged or of another "
                "task?): leave it out with `drop_outliers`"
            )
        for name in self.dropped:
            yield f"client {name} was left out: it answers unlike the others"
