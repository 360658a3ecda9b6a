"""Devices, precision, and reproducible runs of local training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch

from fedmerge.errors import UsageError
from fedmerge.values.run_settings import (
    Optimizer as Optimizer,
)
from fedmerge.values.run_settings import (
    Stage as Stage,
)
from fedmerge.values.run_settings import (
    TrainSettings as TrainSettings,
)
from fedmerge.values.run_settings import (
    default_settings as default_settings,
)


def choose_devices(asked: str) -> tuple[str, ...]:
    """Return the devices that `auto`, `cpu`, `cuda`, `mps` or a list like `cuda:0,cuda:1` mean.

    `auto` and `cuda` mean every GPU there is.
    """
    there = available_devices()
    if asked == "auto":
        best = there[0].partition(":")[0]
        return tuple(device for device in there if device.partition(":")[0] == best)
    chosen: list[str] = []
    for name in asked.split(","):
        found = [d for d in there if name in (d, d.partition(":")[0])]
        if not found:
            raise UsageError(f"`device={name}` is not there", f"here are: {', '.join(there)}")
        chosen += found
    return tuple(dict.fromkeys(chosen))


def available_devices() -> tuple[str, ...]:
    """Return all devices of this machine, the fastest kind first."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    apple = ("mps",) if torch.backends.mps.is_available() else ()
    return (*(f"cuda:{number}" for number in range(gpus)), *apple, "cpu")


@dataclass(frozen=True)
class Precision:
    """The numbers that products are computed in; weights stay in float32."""

    device_type: str
    dtype: torch.dtype | None  # None: as they are

    def __call__(self) -> AbstractContextManager[object]:
        """Return the context in which the model is called."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, self.dtype)

    @property
    def is_scaled(self) -> bool:
        """Whether small gradients would vanish in these numbers."""
        return self.dtype == torch.float16

    def scaler(self) -> torch.amp.GradScaler:
        """Return what keeps small gradients from vanishing; it does nothing where none would."""
        return torch.amp.GradScaler(self.device_type, enabled=self.is_scaled)


def choose_precision(device: str, *, mixed: bool) -> Precision:
    """Return mixed precision where it is wanted and the device gains from it, else full."""
    kind = device.partition(":")[0]
    if not mixed or kind != "cuda":
        return Precision(kind, None)
    return Precision(kind, torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads for a while: sums depend on how they are cut into parts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
