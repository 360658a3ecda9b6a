"""Runs of one model on several batches that wait for each other at the calls of its weights."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from contextvars import copy_context
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code.dispatch import EagerMode, eagerly
from fedmerge.errors import UserCodeError
from fedmerge.private_torch import leaves, storage_address
from fedmerge.probes.layer_calls import Call, names_of, run_heard
from fedmerge.user_code import StopRun, copied_object, state_of, user_code

Inputs: TypeAlias = Sequence[Tensor]
Solve: TypeAlias = Callable[[Mapping[int, Call]], None]


def run_in_step(
    models: Sequence[nn.Module],
    batches: Sequence[Inputs],
    is_wanted: Callable[[Call], bool],
    solve: Solve,
) -> None:
    """Run each model on its batch, layer by layer: `solve` gets a wanted call of all batches.

    It gets it before it is made, and changes its weights in place, in all models. Models are copies
    of one another, since a model may keep things from call to call. Only one runs at a time, each
    in a thread: that is how a run can be left and taken up again.
    """
    runs = [_SteppedRun(*pair, is_wanted) for pair in zip(models, batches, strict=True)]
    # Both are of the whole process, and the runs, which end in any order, leave them as found.
    with redirect_stdout(sys.stderr), eagerly():
        try:
            for run in runs:
                run.go_on()
            while waiting := {k: run.call for k, run in enumerate(runs) if run.call is not None}:
                first = names_of(next(iter(waiting.values())))
                calls = {k: call for k, call in waiting.items() if names_of(call) == first}
                solve(calls)
                for k in calls:
                    runs[k].go_on()
        finally:
            for run in runs:
                run.end()


class _SteppedRun:
    """A run of a model that stops at every wanted call until it may go on."""

    def __init__(self, model: nn.Module, inputs: Inputs, is_wanted: Callable[[Call], bool]) -> None:
        self.call: Call | None = None  # at which the run waits
        self._error: BaseException | None = None
        self._is_ending = False
        self._is_wanted = is_wanted
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        work = (self._run, model, inputs)
        self._thread = threading.Thread(target=copy_context().run, args=work, daemon=True)

    def go_on(self) -> None:
        """Run up to the next wanted call, or the end."""
        self.call = None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Give the run up where it is."""
        self._is_ending = True
        self._turn.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self, model: nn.Module, inputs: Inputs) -> None:
        try:
            run_heard(model, inputs, self._hear, is_ahead=True)
        except BaseException as error:
            self._error = error
        finally:
            self.call = None
            self._back.release()

    def _hear(self, call: Call) -> None:
        if self._is_ending:
            raise StopRun
        if not self._is_wanted(call):
            return
        self.call = call
        self._back.release()
        self._turn.acquire()
        if self._is_ending:
            raise StopRun


def copies_of(model: nn.Module, count: int) -> list[nn.Module]:
    """Return a model and copies of it that share its tensors as far as torch lets them.

    Code that copies models in a way of its own may know the widths of its class alone. Then the
    model stands for its copies: only what it keeps on itself from call to call is mixed.
    """
    shared = {id(tensor): tensor for tensor in state_of(model, keep_vars=True).values()}
    try:
        with user_code("the model cannot be copied", of=model):
            return [model, *(copied_object(model, dict(shared)) for _ in range(count - 1))]
    except UserCodeError:
        return [model] * count


def held_bytes(model: nn.Module, inputs: Inputs) -> int:
    """Return how many bytes a run, heard call by call, holds of its own in its fullest moment."""
    held, last = _Held(), list[Call]()
    with eagerly(), held:
        run_heard(model, inputs, lambda call: last.__setitem__(slice(None), [call]), is_ahead=True)
    return held.most


class _Held(EagerMode):  # type: ignore[no-untyped-call]
    """Count the bytes of storages that ops made and that something still refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._owners: dict[int, int] = {}  # tensors per storage

    def look_after(self, func: Any, before: Any, result: Any) -> Any:
        """Take note of the tensors that an op made, and of views of these."""
        for tensor in leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._take(tensor, is_view=func.is_view)
        self.most = max(self.most, self._now)
        return result

    def _take(self, tensor: Tensor, *, is_view: bool) -> None:
        place, size = storage_address(tensor), tensor.untyped_storage().nbytes()
        owners = self._owners.get(place, 0)
        if is_view and not owners:
            return
        self._now += 0 if owners else size
        self._owners[place] = owners + 1
        weakref.finalize(tensor, self._leave, place, size).atexit = False

    def _leave(self, place: int, size: int) -> None:
        self._owners[place] -= 1
        self._now -= 0 if self._owners[place] else size
