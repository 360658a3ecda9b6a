"""The base of modes that see every ATen op of an eager run, inside higher-order ops too."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from fedmerge.graph.model.higher_order import follow
from fedmerge.user_code import own_code

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def uncompiled(function: _Function) -> _Function:
    """Keep torch's compiler out of a function and what it calls, without importing the compiler.

    A compiled module, or a higher-order op, would else have the modes themselves compiled.
    """
    set_code_exec_strategy(function.__code__, _SKIPPED)
    return function


def is_compiler_loaded() -> bool:
    """Return whether anything imported torch's compiler in this process."""
    return "torch._dynamo" in sys.modules


@contextmanager
def eagerly() -> Iterator[None]:
    """Let compiled functions run as they were written, for the sake of the modes."""
    if is_compiler_loaded():
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    try:
        yield
    finally:
        if is_compiler_loaded():  # it remembers what it could not compile under a mode
            torch._dynamo.reset()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Run without the fast path of attention, which hides what it does and needs other shapes."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class EagerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that leaves torch's compiler alone, whose import takes seconds."""

    supports_higher_order_operators = True
    walks_all = False  # whether both ways of a branch run, and the body of a loop at least once

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an op, or the ops that a higher-order one stands for."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return follow(func, self, args, kwargs)
        with own_code():
            before = self.look_before(func, args, kwargs)
        result = func(*args, **kwargs)
        with own_code():
            return self.look_after(func, before, result)

    def look_before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what is to be known of an op when it has run."""
        return args, kwargs

    def look_after(self, func: Any, before: Any, result: Any) -> Any:
        """Look at an op that has run, and return its result."""
        return result

    def join(self, one: Any, other: Any) -> None:
        """Take note of two nested values of which either may come out of a higher-order op."""
