"""Every ATen operation of a run, those inside higher-order ones too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

from fedmerge.private_torch import (
    HigherOrderOp,
    UncompiledMode,
    forget_compiled,
    higher_order_name,
    is_compiler_loaded,
    plain_kernel,
    uncompiled,
)
from fedmerge.user_code import own_code


class Watcher(Protocol):
    """The mode that sees the ops inside."""

    walks_all: bool

    def __enter__(self) -> Any:
        """Watch again."""

    def __exit__(self, *error: Any) -> Any:
        """Stop watching."""

    def join(self, one: Any, other: Any) -> None:
        """Take note of two nested values of which either may come out of a higher-order op."""


_MOST_STEPS = 10_000  # of one loop on a small input
_branch: ContextVar[bool | None] = ContextVar("_branch", default=None)
_met: ContextVar[set[str] | None] = ContextVar("_met", default=None)


@contextmanager
def taking(branch: bool | None) -> Iterator[None]:
    """Let every `torch.cond` take its true or its false branch (None: as its predicate says)."""
    token = _branch.set(branch)
    try:
        yield
    finally:
        _branch.reset(token)


@contextmanager
def noting() -> Iterator[set[str]]:
    """Return the names of the higher-order ops that are met meanwhile."""
    names: set[str] = set()
    token = _met.set(names)
    try:
        yield names
    finally:
        _met.reset(token)


def follow(op: HigherOrderOp, mode: Watcher, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a higher-order op under a mode that it was taken off for."""
    name = higher_order_name(op)
    if (met := _met.get()) is not None:
        met.add(name)
    if name in _FOLLOWED:
        return _FOLLOWED[name](mode, *args, **kwargs)
    kernel = plain_kernel(op)
    if kernel is None:
        raise NotImplementedError(f"the higher-order op '{name}' has no plain form")
    with mode:
        return kernel(*args, **kwargs)


def _cond(
    mode: Watcher,
    pred: Tensor | bool,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    forced = _branch.get()
    takes = bool(pred) if forced is None else forced
    taken, other = (true_fn, false_fn) if takes else (false_fn, true_fn)
    with mode:
        left = other(*operands) if mode.walks_all else None
        result = taken(*operands)
        if mode.walks_all:
            _join(mode, result, left)
    return result


def _join(mode: Watcher, one: Any, other: Any) -> None:
    with own_code():
        mode.join(one, other)


def _while_loop(
    mode: Watcher,
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
    additional: Sequence[Any] = (),
) -> tuple[Any, ...]:
    values, is_walked = tuple(carried), not mode.walks_all
    for _ in range(_MOST_STEPS):
        with mode:
            goes_on = cond_fn(*values, *additional)
        if not bool(goes_on) and is_walked:
            return values
        with mode:
            after = tuple(body_fn(*values, *additional))
            _join(mode, values, after)
        if not bool(goes_on):  # the body ran to be seen only
            return values
        values, is_walked = after, True
    raise NotImplementedError(f"a while_loop takes more than {_MOST_STEPS:,} steps")


def _scan(
    mode: Watcher,
    combine_fn: Callable[..., Any],
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    additional: Sequence[Any] = (),
) -> tuple[Any, ...]:
    carried: Sequence[Any] = list(init)
    rows: list[Sequence[Any]] = []
    with mode:
        for step in range(len(xs[0])):
            results = combine_fn(*carried, *(x.select(0, step) for x in xs), *additional)
            after, row = results[: len(init)], results[len(init) :]
            _join(mode, carried, after)
            carried = after
            rows.append(row)
        return *carried, *(torch.stack(list(column)) for column in zip(*rows, strict=True))


_FOLLOWED: Mapping[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
}


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
            forget_compiled()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Run without the fast path of attention, which hides what it does and needs other shapes."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class EagerMode(UncompiledMode):  # type: ignore[no-untyped-call]
    """A mode that sees every op of a run, those inside higher-order ones too."""

    walks_all = False  # whether both ways of a branch run, and the body of a loop at least once

    @uncompiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an op, or the ops that a higher-order one stands for."""
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOp):
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
