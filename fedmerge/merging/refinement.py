"""Refine a merge by a short training towards the clients' ensemble, without labels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
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
from fedmerge.merging.options import Effort
from fedmerge.merging.quality import (
    compared_rows,
    ensemble_weights,
    mean_outputs,
    outputs_on,
    variance,
)
from fedmerge.merging.result import Merge
from fedmerge.probes.augmentation import Augmentation
from fedmerge.probes.descent import Adam
from fedmerge.probes.probe_inputs import Probes
from fedmerge.probes.sources import work_of
from fedmerge.user_code import derived_seed, parts_of, seeded, user_code
from fedmerge.values.arrays import Array
from fedmerge.values.plans import axis_size, index_map
from fedmerge.values.wording import Progress

BATCH = 64  # samples per step
MOST_BYTES = 2**28  # of lessons that are kept; beyond them earlier ones come again
RATE = 1e-3  # Adam's at the start; it falls to 0 along a half cosine
RATES = {RATE: "", RATE / 10: "slowly "}  # the second one where the first one does harm: deep nets
WARM_UP = 20  # steps in which the rate rises: Adam's first ones are of one length whatever helps
FEW = 4  # lessons that tell how much the ensemble's answers vary
TRIAL = 0.25  # of the steps: from every start, before the better one goes on
RUNS_OF_A_STEP = 3  # forward, and backward to activations and weights
FEWEST_STEPS = 50  # fewer are not worth beginning
ROUNDS = 6  # of thorough refinement, each twice as long as the one before
WORTH = 0.01  # of the distance: a round that gains less is the last
SHARES = (1.0, 0.6, 0.3)  # of the way from a start to where training ends, one is chosen


@dataclass(frozen=True)
class Spending:
    """How long a merge is refined."""

    steps: int  # at most, in the first round
    work: float  # multiplications that they may take
    rounds: int = 1


SPENDING: dict[Effort, Spending] = {
    "fast": Spending(0, 0.0),
    "normal": Spending(400, 4e12),
    "thorough": Spending(400, math.inf, ROUNDS),
}


@dataclass(frozen=True)
class Lesson:
    """A batch of probes, and what the ensemble answers (rows, outputs)."""

    inputs: tuple[Tensor, ...]
    wanted: Tensor

    @property
    def bytes(self) -> int:
        """How much memory the lesson takes."""
        return sum(tensor.nbytes for tensor in (*self.inputs, self.wanted))


@dataclass(frozen=True)
class Refiner:
    """Trains merges of one layout on changed probes to answer as the clients' ensemble does.

    Models are in evaluation mode throughout: running statistics stay, and nothing is dropped out.
    Tensors that are kept as the first client's stay too. All starts learn the same lessons.
    """

    modules: ClientModules
    layout: Merge  # whose placements and widths all starts have
    probes: Probes
    members: Sequence[int]  # the clients that the ensemble is of
    augmentation: Augmentation
    seed: int
    memory: int = MOST_BYTES
    lessons: list[Lesson] = field(default_factory=list)  # so far

    def affordable_steps(self, spending: Spending) -> int:
        """Return how many steps the multiplications of a spending pay for."""
        few = next(self.probes.batches(2, self.modules.device))
        members = sum(work_of(self.modules.client(number), few) for number in self.members)
        trained = work_of(self._model(self.layout), few)
        step = BATCH * (RUNS_OF_A_STEP * trained + members) / len(few[0])
        return min(spending.steps, int(min(spending.work / max(step, 1.0), 1e9)))

    def refine(self, start: Merge, steps: int, progress: Progress, *, rate: float = RATE) -> Merge:
        """Return a merge whose tensors were trained for some steps."""
        model = self._model(start)
        parameters = self._parameters(model)
        trained, share = list(parameters.values()), share_of_rate(steps)
        adam = Adam(trained, rate=rate)
        with seeded(self.seed, self.modules.device), differentiable(model):
            for step in range(steps):
                progress("refining", step, steps)
                lesson = self._lesson(step)
                outputs = compared_rows(evaluated(model, lesson.inputs, has_gradient=True))
                loss = refinement_loss(outputs, lesson.wanted, spread=self._spread)
                with user_code("the model can't be trained"):
                    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
                adam.rate = rate * share(step)
                adam.step(gradients)
        progress("refining", steps, steps)
        arrays = {name: p.detach().cpu().numpy().copy() for name, p in parameters.items()}
        return replace(start, fitted={**start.fitted, **arrays})

    def _model(self, merge: Merge) -> nn.Module:
        return self.modules.merged({name: merge.read(name) for name in merge.plan.tensors})

    def _parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return what is trained, by the plan's names; what a merge can't hold is not."""
        named = [(self.modules.own_names[name], p) for name, p in model.named_parameters()]
        uses = Counter(name for name, _ in named)  # two where the file ties what the code doesn't
        if isinstance(model, ExportedProgram):  # it does not say what was trained
            model.requires_grad_(True)
        found = {
            name: parameter
            for name, parameter in named
            if name in self.layout.plan.tensors and uses[name] == 1 and parameter.requires_grad
        }
        if not found:
            raise ArchitectureError("nothing of the model can be trained")
        model.requires_grad_(False)
        for parameter in found.values():
            parameter.requires_grad_(True)
        return found

    def _lesson(self, number: int) -> Lesson:
        """Return a lesson; where memory ends, earlier ones come again."""
        if not self.lessons:
            self.lessons.append(self._next_lesson(0))
        number %= max(1, self.memory // max(1, self.lessons[0].bytes))
        while len(self.lessons) <= number:
            self.lessons.append(self._next_lesson(len(self.lessons)))
        return self.lessons[number]

    def _next_lesson(self, number: int) -> Lesson:
        """Return some probes, changed, with the ensemble's answers: every client runs once."""
        device, count = self.modules.device, min(BATCH, len(self.probes))
        generator = torch.Generator().manual_seed(derived_seed(self.seed, number))
        drawn = self.probes.drawn(count, generator)
        batch = self.augmentation.batch(number, drawn, generator)
        each = [outputs_on(self.modules.client(k), batch, device=device) for k in self.members]
        averaging = self.modules.session.averaging  # a merge's own may leave classes out
        weights = ensemble_weights(averaging, self.members, each[0].shape[1])
        [inputs] = batch.batches(count, device)
        return Lesson(inputs, mean_outputs(each, weights).to(device))

    @cached_property
    def _spread(self) -> float:
        """The variance of what the ensemble answers."""
        few = [self._lesson(number).wanted for number in range(FEW)]
        return variance(torch.cat(few)) or 1.0


def share_of_rate(steps: int) -> Callable[[int], float]:
    """Return which share of the rate a step of so many has."""

    def share(step: int) -> float:
        rising = min(1.0, (step + 1) / WARM_UP)
        return rising * (1 + math.cos(math.pi * step / steps)) / 2

    return share


def refinement_loss(outputs: Tensor, wanted: Tensor, *, spread: float) -> Tensor:
    """Return how far outputs (rows, outputs) are from others: what training makes small.

    The divergence of their softmax, and their mean square distance ÷ spread. Of many tokens few
    matter, which only the divergence knows; on probes that are made up a softmax says little of
    outputs which real inputs need.
    """
    own, other = (functional.log_softmax(each, dim=1) for each in (outputs, wanted))
    divergence = functional.kl_div(own, other, log_target=True, reduction="batchmean")
    return divergence + functional.mse_loss(outputs, wanted) / spread


def between(start: Merge, end: Merge, share: float) -> Merge:
    """Return the merge on the straight line from a start to what training made of it.

    Training learns what is common to all lessons, and forgets some of what a deep net knew: on the
    way there is a place that has most of the one and little of the other.
    """
    if share == 1:
        return end
    arrays = {}
    for name in start.plan.tensors:
        one, other = start.read(name), end.read(name)
        arrays[name] = one + np.asarray(share, one.dtype) * (other - one)
    return replace(start, fitted={**end.fitted, **arrays})


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


def differentiable(model: nn.Module) -> AbstractContextManager[None]:
    """Return the context in which the model has gradients though it is in evaluation mode.

    Cudnn's recurrent layers have none there; torch's own do.
    """
    if any(isinstance(module, nn.RNNBase) for _, module in parts_of(model)):
        return torch.backends.cudnn.flags(enabled=False)
    return nullcontext()
