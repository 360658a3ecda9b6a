"""What it costs to run a model: time, and memory of parameters and of what it makes on its way."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedmerge.errors import TrainingCodeError
from fedmerge.private_torch import CostMode, leaves, storage_address
from fedmerge.training.evaluation import InferenceCost, call_model
from fedmerge.training.shards import Inputs, Shard
from fedmerge.user_code import evaluating, placed, state_of

SAMPLES = 1000  # that the time is told for
_FEWEST_RUNS, _MOST_RUNS = 5, 200
_ENOUGH, _TOO_LONG = 0.1, 2.0  # seconds: of quick models more runs, of slow ones fewer
_LEAST_RUNS = 3


def inference_cost(
    model: nn.Module, shard: Shard, *, device: str, batch_size: int
) -> InferenceCost:
    """Return what a model costs on the first batch of a shard, in evaluation mode.

    The time is the median of several runs after one that warms up.
    """
    count = min(batch_size, len(shard))
    x, _ = shard.batch(np.arange(count), device)
    with torch.no_grad(), evaluating(placed(model, device)):
        peak = _peak_bytes(model, x)  # the first run, which also warms up
        seconds: list[float] = []
        while _goes_on(seconds):
            seconds.append(_seconds(model, x, device))
    tensors = {storage_address(t): t for t in state_of(model, keep_vars=True).values()}
    return InferenceCost(
        seconds=statistics.median(seconds) * SAMPLES / count,
        parameter_bytes=sum(t.untyped_storage().nbytes() for t in tensors.values()),
        activation_bytes=peak,
    )


def ensemble_cost(costs: Sequence[InferenceCost]) -> InferenceCost:
    """Return what models cost together that run one after the other and are all held."""
    peaks = [own.activation_bytes for own in costs]
    known = [peak for peak in peaks if peak is not None]
    return InferenceCost(
        seconds=sum(own.seconds for own in costs),
        parameter_bytes=sum(own.parameter_bytes for own in costs),
        activation_bytes=max(known) if len(known) == len(peaks) else None,
    )


def _goes_on(seconds: Sequence[float]) -> bool:
    total, runs = sum(seconds), len(seconds)
    if runs < _LEAST_RUNS:
        return True
    return runs < _MOST_RUNS and total < _TOO_LONG and (runs < _FEWEST_RUNS or total < _ENOUGH)


def _seconds(model: nn.Module, x: Inputs, device: str) -> float:
    _wait_for(device)
    started = time.perf_counter()
    call_model(model, x)
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: str) -> None:
    """Wait until a device has done what it was told; the CPU has by then."""
    kind = device.partition(":")[0]
    if kind != "cpu":
        getattr(torch, kind).synchronize()


def _peak_bytes(model: nn.Module, x: Inputs) -> int | None:
    """Return the most bytes of new tensors at once, None where the ops can't be watched."""
    watch = _Watch(model, x)
    try:
        with watch:
            call_model(model, x)
    except TrainingCodeError:  # compiled code may refuse to be watched
        call_model(model, x)
        return None
    return watch.peak


class _Watch(CostMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that ops make, as long as they are held."""

    def __init__(self, model: nn.Module, x: Inputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._held = 0
        inputs = x if isinstance(x, tuple) else (x,)
        given = [*inputs, *state_of(model, keep_vars=True).values()]
        self._known = {storage_address(tensor) for tensor in given}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an op and take note of the memory that it made."""
        options: Mapping[str, Any] = kwargs or {}
        result = func(*args, **options)
        for tensor in leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self._hold(tensor)
        return result

    def _hold(self, tensor: torch.Tensor) -> None:
        storage, address = tensor.untyped_storage(), storage_address(tensor)
        if address in self._known:
            return
        self._known.add(address)
        self._held += storage.nbytes()
        self.peak = max(self.peak, self._held)
        weakref.finalize(storage, self._release, address, storage.nbytes())

    def _release(self, address: int, size: int) -> None:
        self._known.discard(address)
        self._held -= size
