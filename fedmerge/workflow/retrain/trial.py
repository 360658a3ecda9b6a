"""A few samples of everybody through the model and the task: what can't work shows at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import UsageError
from fedmerge.training import LearningTask, Shard, find_task, seeded, try_model
from fedmerge.workflow.load import load_checkpoint
from fedmerge.workflow.models import ModelCode


@dataclass(frozen=True)
class Trial:
    """One client's model, which stands for all: hidden widths change nothing of what fits."""

    model: nn.Module
    task: LearningTask
    seed: int
    device: str

    def train_on(self, shard: Shard) -> None:
        """Refuse samples on which a client could not train."""
        self._try(shard, training=True)

    def evaluate_on(self, shard: Shard) -> None:
        """Refuse samples on which global models could not be evaluated."""
        self._try(shard, training=False)

    def _try(self, shard: Shard, *, training: bool) -> None:
        with seeded(self.seed, self.device):
            try_model(self.model, shard, self.task, training=training, device=self.device)


def prepare_trial(
    code: ModelCode, client: Checkpoint, task: str, *, seed: int, device: str
) -> Trial:
    """Return the trial of a client's model, which must be one that can be trained."""
    with seeded(seed, device):
        built = code.build()
        if isinstance(built, torch.jit.ScriptModule | torch.fx.GraphModule):
            raise UsageError(
                f"--model {code.factory} is an exported model, which can't be trained here",
                "give the code that builds it: file.py:name",
            )
        return Trial(load_checkpoint(lambda: built, client), find_task(task), seed, device)
