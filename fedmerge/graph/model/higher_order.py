"""Higher-order ops (`torch.cond`, `while_loop`, `scan`, `map`) as the ops they stand for.

Under a dispatch mode torch hands such an op over whole. It runs here as plain Python calls, so
that the mode sees what is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

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


def follow(
    op: HigherOrderOperator, mode: Watcher, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Run a higher-order op under a mode that it was taken off for."""
    name: str = op._name
    if (met := _met.get()) is not None:
        met.add(name)
    if name in _FOLLOWED:
        return _FOLLOWED[name](mode, *args, **kwargs)
    kernel = op.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
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
