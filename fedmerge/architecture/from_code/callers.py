"""Which of the user's code asks for a value of data, and whether the value goes nowhere."""

from __future__ import annotations

import ast
import linecache
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn

from fedmerge.tracebacks import shown_line
from fedmerge.user_code import run_model

Span: TypeAlias = tuple[int, int, int, int]  # first line, first column, last line, last column

_OURS = f"{Path(__file__).parents[2]}{os.sep}"
_TORCHS = f"{Path(torch.__file__).parent}{os.sep}"
_NOT_USERS = (_OURS, _TORCHS, "<frozen")  # the last is Python's
_IN_NAME_OF_CALLERS = (  # methods of tensors that are written in Python, and lists of layers
    *(f"{_TORCHS}{name}.py" for name in ("__init__", "_tensor", "overrides")),
    f"{_TORCHS}nn{os.sep}modules{os.sep}container.py",
)
_TELLS = (logging.__file__, warnings.__file__)
_INSTRUCTION = 2  # bytes
_PLAIN = (int, float, str, bool)
_TELLING = frozenset(  # functions that only tell somebody
    ("print", "warn", "warning", "warning_once", "debug", "info", "error", "exception", "critical")
) | {"log", "write"}


def users_frames() -> Iterator[FrameType]:
    """Yield the frames of the run that are neither torch's nor fedmerge's, innermost first."""
    return (f for f in _frames() if not f.f_code.co_filename.startswith(_NOT_USERS))


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not run_model.__code__:
        yield frame
        frame = frame.f_back


def position(frame: FrameType) -> Any:
    """Return where in the text of the code a frame is.

    Bytecode is changed while it runs, so that its own numbers differ from run to run.
    """
    if sys.version_info < (3, 11):
        return frame.f_lineno
    return next(islice(frame.f_code.co_positions(), frame.f_lasti // _INSTRUCTION, None))


def line_of(frame: FrameType | None) -> str:
    """Return a frame's file and line, for messages."""
    if frame is None:
        return "a layer of torch"
    return shown_line(frame.f_code.co_filename, frame.f_lineno)


def is_called_by(code: CodeType) -> bool:
    """Return whether a function of ours with this code leads here, without other code between."""
    for frame in _frames():
        if frame.f_code is code:
            return True
        if not frame.f_code.co_filename.startswith(_OURS):
            return False
    return False


def asking(torchs: CodeType) -> FrameType | None:
    """Return the frame of the user's that a value goes to; None if that is torch, or it is told.

    `torchs` is the code of ours that calls torch's functions. Told is what is printed, logged or
    raised.
    """
    for frame in _frames():
        file = frame.f_code.co_filename
        if frame.f_code is torchs or file in _TELLS:
            return None
        if file.startswith(_TORCHS) and file not in _IN_NAME_OF_CALLERS:
            return None
        if not file.startswith(_NOT_USERS):
            return None if _is_told(frame) else frame
    return sys._getframe(1)


def _is_told(frame: FrameType) -> bool:
    """Return whether the statement that a frame is at only tells somebody something."""
    path = _path_to(frame)
    statement = next((node for node in reversed(path) if isinstance(node, ast.stmt)), None)
    if isinstance(statement, ast.Assign):
        functions = [node for node in path if isinstance(node, ast.FunctionDef)]
        return bool(functions) and _is_only_told(statement, functions[-1])
    return statement is not None and _tells(statement)


def is_filter(frame: FrameType) -> bool:
    """Return whether a frame is at a condition in a comprehension, which tells how many pass."""
    path = _path_to(frame)
    return any(
        isinstance(one, ast.comprehension) and other in one.ifs for one, other in pairwise(path)
    )


def plain_locals(frame: FrameType) -> dict[str, Any]:
    """Return the numbers and texts among the variables of a frame."""
    return {name: value for name, value in frame.f_locals.items() if type(value) in _PLAIN}


def are_counted(frame: FrameType, changed: Set[str]) -> bool:
    """Return whether variables that change while a loop turns decide something.

    What a `for` counts may decide inside it, where it is tried for itself.
    """
    path = _path_to(frame)
    functions = [node for node in path if isinstance(node, ast.FunctionDef)]
    if not functions:
        return False
    loops = [node for node in path if isinstance(node, ast.For)]
    targets = {node.id for loop in loops for node in ast.walk(loop.target) if _is_name(node)}
    inside = {id(node) for loop in loops for node in ast.walk(loop)}
    return any(
        node.id in changed and not (node.id in targets and id(node) in inside)
        for part in _deciding(functions[-1], frame)
        for node in ast.walk(part)
        if _is_name(node)
    )


def _is_name(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _deciding(function: ast.AST, frame: FrameType) -> Iterator[ast.AST]:
    """Yield the expressions in a function by which it decides what to do."""
    for node in ast.walk(function):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.Compare):
            yield node
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.Subscript) and _is_container(node.value, frame):
            yield node.slice


def _is_container(node: ast.expr, frame: FrameType) -> bool:
    """Return whether an expression is a list, or the like, of Python's or of layers."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = frame.f_locals.get(node.value.id)
        found = getattr(owner, node.attr, None) if isinstance(owner, nn.Module) else None
    elif isinstance(node, ast.Name):
        found = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    else:
        return isinstance(node, ast.List | ast.Tuple | ast.Dict)
    return isinstance(found, list | tuple | dict | str | nn.ModuleList | nn.ModuleDict)


def _path_to(frame: FrameType) -> Sequence[ast.AST]:
    """Return the statements and expressions that a frame is in, the outermost first."""
    if sys.version_info < (3, 11):  # where in its line a frame is can't be known
        return ()
    first, last, start, end = position(frame)
    if None in (first, last, start, end):
        return ()
    return _path(frame.f_code.co_filename, (first, start, last, end))


@lru_cache(maxsize=1024)
def _path(file: str, span: Span) -> Sequence[ast.AST]:
    found: list[ast.AST] = []
    inside: ast.AST | None = _parsed("".join(linecache.getlines(file)))
    while inside is not None:
        found.append(inside)
        parts = ast.iter_child_nodes(inside)
        inside = next((part for part in parts if _contains(part, span)), None)
    return found


@lru_cache(maxsize=32)
def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _contains(node: Any, span: Span) -> bool:
    if not hasattr(node, "lineno"):  # a comprehension's clause, a case
        return any(_contains(part, span) for part in ast.iter_child_nodes(node))
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return bool(start <= span[:2] and span[2:] <= end)


def _tells(statement: ast.stmt) -> bool:
    """Return whether a statement raises, checks, prints, logs or warns, and does nothing else."""
    if any(isinstance(node, ast.NamedExpr | ast.Lambda) for node in ast.walk(statement)):
        return False
    if isinstance(statement, ast.Raise | ast.Assert):
        return True
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and _name_of(call.func) in _TELLING


def _name_of(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_only_told(statement: ast.Assign, function: ast.FunctionDef) -> bool:
    """Return whether a text is given a name that only statements read which tell it."""
    (target, *others) = statement.targets
    if others or not isinstance(target, ast.Name):
        return False
    reads = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load)
    ]
    told = [s for s in ast.walk(function) if isinstance(s, ast.stmt) and _tells(s)]
    inside = {id(node) for s in told for node in ast.walk(s)}
    return all(id(node) in inside for node in reads)
