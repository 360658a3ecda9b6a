"""A persistor for global models of any widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nvflare.apis.fl_constant import FLContextKey
from nvflare.app_common.abstract.model import (
    ModelLearnable,
    ModelLearnableKey,
    make_model_learnable,
)
from nvflare.app_common.abstract.model_persistor import ModelPersistor

from fedmerge.checkpoint import from_state_dict, open_checkpoint, write_model
from fedmerge.values.arrays import Array


class GlobalModelPersistor(ModelPersistor):  # type: ignore[misc]  # NVFLARE has no types
    """Keeps the global model in one file of the server's app that `fedmerge.load_model` reads.

    Nothing ties it to the widths of the model that the job began with. `FedMA` writes the file
    with its record. Other controllers need a model to begin with: `initial`, a file.
    """

    def __init__(self, file_name: str = "global.pt", initial: str | None = None) -> None:
        super().__init__()
        self.file_name, self.initial = file_name, initial

    def path(self, fl_ctx: Any) -> Path:
        """Return the file of the global model in this job."""
        return Path(fl_ctx.get_prop(FLContextKey.APP_ROOT)) / self.file_name

    def load_model(self, fl_ctx: Any) -> ModelLearnable:
        """Return the model that the job has saved, or the initial one, or none."""
        saved = self.path(fl_ctx)
        source = saved if saved.is_file() else self.initial
        if source is None:
            return make_model_learnable({}, {})
        checkpoint = open_checkpoint(Path(source))
        tensors = {name: checkpoint.read_torch(name) for name in checkpoint.tensors}
        return make_model_learnable({name: _as_array(tensors[name]) for name in tensors}, {})

    def save_model(self, model: ModelLearnable, fl_ctx: Any) -> None:
        """Write a controller's global model in place of the last one."""
        weights = model[ModelLearnableKey.WEIGHTS]
        state = {name: torch.as_tensor(value) for name, value in weights.items()}
        checkpoint = from_state_dict(state, name="the global model")
        write_model(self.path(fl_ctx), checkpoint.tensors, checkpoint.read, force=True)


def _as_array(tensor: torch.Tensor) -> Array:
    """Return a tensor as NVFLARE's controllers take it; NumPy has no bfloat16."""
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
