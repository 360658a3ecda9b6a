"""Fit a merge to the clients' ensemble by a short training on probes, without labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedmerge.architecture.from_code import ExportedProgram
from fedmerge.architecture.model_code import evaluated
from fedmerge.errors import ArchitectureError
from fedmerge.matching.features import place_tensor, targets_of
from fedmerge.merging.client_modules import ClientModules
from fedmerge.merging.quality import (
    compared_rows,
    ensemble_weights,
    mean_outputs,
    outputs_on,
    variance,
)
from fedmerge.merging.result import Merge
from fedmerge.probes.probe_inputs import Probes
from fedmerge.training import seeded
from fedmerge.user_code import parts_of, user_code
from fedmerge.values.arrays import Array
from fedmerge.values.plans import axis_size, index_map
from fedmerge.values.wording import Progress

BATCH = 64  # samples per step
MIXTURES = 7  # of every probe with others: that so few are not learnt by heart
MOST_BYTES = 2**28  # of inputs with their mixtures, beyond which there are fewer of these
RATE = 1e-3  # Adam's at the start; it falls to 0 along a half cosine


@dataclass(frozen=True)
class Lesson:
    """A batch of probes, and what the ensemble answers (rows, outputs)."""

    inputs: tuple[Tensor, ...]
    wanted: Tensor


@dataclass(frozen=True)
class Distiller:
    """Trains a merge on probes to answer as the clients' ensemble does.

    Models are in evaluation mode throughout: running statistics stay, and nothing is dropped out.
    Tensors that are kept as the first client's stay too.
    """

    modules: ClientModules
    merge: Merge
    probes: Probes
    members: Sequence[int]  # the clients that the ensemble is of
    steps: int
    seed: int

    def merges(self, client: int, progress: Progress) -> Iterator[tuple[str, Merge]]:
        """Yield trained merges by name, from two starts: the merge as it is, and a client."""
        starts = {
            "the merge": self.merge,
            self.merge.clients[client].name: started_from(self.merge, client),
        }
        for number, (name, start) in enumerate(starts.items()):
            trained = self._trained(start, _part(progress, number, len(starts)))
            yield f"distilled from {name}", trained

    def _trained(self, start: Merge, progress: Progress) -> Merge:
        """Return a merge whose tensors were trained."""
        model = self.modules.trainable({name: start.read(name) for name in start.plan.tensors})
        parameters = self._parameters(model)
        optimizer = torch.optim.Adam(list(parameters.values()), lr=RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        with seeded(self.seed, self.modules.device), _differentiable(model):
            for step, lesson in enumerate(self._drawn_lessons()):
                progress("distilling", step, self.steps)
                optimizer.zero_grad(set_to_none=True)
                outputs = compared_rows(evaluated(model, lesson.inputs, has_gradient=True))
                loss = distillation_loss(outputs, lesson.wanted, spread=self._spread)
                with user_code("`distill`: the model can't be trained"):
                    torch.autograd.backward(loss)
                    optimizer.step()
                schedule.step()
        progress("distilling", self.steps, self.steps)
        arrays = {name: p.detach().cpu().numpy() for name, p in parameters.items()}
        return replace(start, fitted={**start.fitted, **arrays})

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return what is trained, by the plan's names; what a merge can't hold is not."""
        named = [(self.modules.own_names[name], p) for name, p in model.named_parameters()]
        uses = Counter(name for name, _ in named)  # two where the file ties what the code doesn't
        if isinstance(model, ExportedProgram):  # it does not say what was trained
            model.requires_grad_(True)
        found = {
            name: parameter
            for name, parameter in named
            if name in self.merge.plan.tensors and uses[name] == 1 and parameter.requires_grad
        }
        if not found:
            raise ArchitectureError("`distill`: nothing of the model can be trained")
        model.requires_grad_(False)
        for parameter in found.values():
            parameter.requires_grad_(True)
        return found

    def _drawn_lessons(self) -> Iterator[Lesson]:
        """Yield one lesson per step: all of them in random order, again and again."""
        rng = np.random.default_rng(self.seed)
        order: list[int] = []
        for _ in range(self.steps):
            order = order or rng.permutation(len(self._lessons)).tolist()
            yield self._lessons[order.pop()]

    @cached_property
    def _lessons(self) -> Sequence[Lesson]:
        """Probes and mixtures in batches, with the ensemble's answers; every client runs once."""
        device, copies = self.modules.device, min(MIXTURES, MOST_BYTES // self.probes.bytes)
        probes = self.probes.mixed(copies, seed=self.seed)
        batches = [Probes(batch, probes.source) for batch in probes.batches(BATCH, "cpu")]
        each: list[list[Tensor]] = []
        for number in self.members:
            model = self.modules.client(number)
            each.append([outputs_on(model, batch, device=device) for batch in batches])
        averaging = self.modules.session.averaging  # a merge's own may leave classes out
        weights = ensemble_weights(averaging, self.members, each[0][0].shape[1])
        return [
            Lesson(
                tuple(tensor.to(device) for tensor in batch.inputs),
                mean_outputs(own, weights).to(device),
            )
            for batch, *own in zip(batches, *each, strict=True)
        ]

    @cached_property
    def _spread(self) -> float:
        """The variance of what the ensemble answers."""
        every = torch.cat([lesson.wanted for lesson in self._lessons])
        return variance(every) or 1.0


def distillation_loss(outputs: Tensor, wanted: Tensor, *, spread: float) -> Tensor:
    """Return how far outputs (rows, outputs) are from others: what training makes small.

    The divergence of their softmax, and their mean square distance ÷ spread. Of many tokens few
    matter, which only the divergence knows; on probes that are made up a softmax says little of
    outputs which real inputs need.
    """
    own, other = (functional.log_softmax(each, dim=1) for each in (outputs, wanted))
    divergence = functional.kl_div(own, other, log_target=True, reduction="batchmean")
    return divergence + functional.mse_loss(outputs, wanted) / spread


def started_from(merge: Merge, client: int) -> Merge:
    """Return a merge that computes what a client does, and whose other units can learn.

    The client's units have its own weights and read no others. Other units have the merge's
    incoming weights: their gradient is not 0, as it would be for units without any weights.
    """
    return replace(
        merge, fitted={name: _started_tensor(merge, client, name) for name in merge.plan.tensors}
    )


def _started_tensor(merge: Merge, number: int, name: str) -> Array:
    client, first, tensor = (
        merge.session.aligned[number],
        merge.session.aligned[0],
        merge.plan.tensors[name],
    )
    values = (client if name in client.tensors else first).read(name)
    placed = place_tensor(values, tensor, merge.placements[number], merge.widths)
    if not tensor.axes or name in first.aliases.values():
        return placed  # tied: what makes some units here reads them elsewhere
    out = tensor.axes[tensor.out]
    others = np.ones(axis_size(out, merge.widths), dtype=bool)
    others[index_map(out, targets_of(merge.placements[number]), merge.widths)] = False
    rows = [slice(None)] * tensor.out + [others]
    placed[tuple(rows)] = merge.read(name)[tuple(rows)]
    return placed


def _part(progress: Progress, number: int, parts: int) -> Progress:
    """Return who hears how far one of several equal parts of a step is."""
    return lambda step, done, total: progress(step, number * total + done, parts * total)


def _differentiable(model: nn.Module) -> AbstractContextManager[None]:
    """Return the context in which the model has gradients though it is in evaluation mode.

    Cudnn's recurrent layers have none there; torch's own do.
    """
    if any(isinstance(module, nn.RNNBase) for _, module in parts_of(model)):
        return torch.backends.cudnn.flags(enabled=False)
    return nullcontext()
