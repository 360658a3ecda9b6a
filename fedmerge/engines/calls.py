"""Call work by its name, the same way in every engine."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field

import numpy as np

from fedmerge.engines.values import Status
from fedmerge.errors import Defect
from fedmerge.tracebacks import failure_of, headline, whole_traceback
from fedmerge.types.arrays import Array
from fedmerge.types.work import Arrays, JsonObject, Place, Work, WorkResult
from fedmerge.user_code import is_interrupt

START_LIMIT = 300.0  # seconds for a worker to start and import its code; a hang, not slowness
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Reply:
    """What became of one call."""

    status: Status
    arrays: Arrays = field(default_factory=dict)
    values: JsonObject = field(default_factory=dict)
    message: str = ""
    hint: str = ""
    details: str = ""
    is_defect: bool = False
    seconds: float = 0.0


def find_work(reference: str) -> Work:
    """Return the function that "package.module:name" stands for."""
    module, _, name = reference.partition(":")
    work: Work = getattr(importlib.import_module(module), name)
    return work


def import_work(function: str) -> None:
    """Import work beforehand, which may take longer than the work itself."""
    with suppress(Exception, SystemExit):  # `call_work` meets the same failure and reports it
        find_work(function)


def call_work(function: str, arrays: Arrays, settings: JsonObject, place: Place) -> Reply:
    """Call work and return its result or its failure; what it prints goes to stderr.

    Its time begins when its module is imported.
    """
    began = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr):  # stdout belongs to the results of the command
            work = find_work(function)
            began = time.perf_counter()
            result = work(_read_only(arrays), _plain(settings), place)
        reply = _checked(result)
    except BaseException as error:
        if is_interrupt(error):
            raise
        return _failed(error, time.perf_counter() - began)
    return Reply("ok", reply.arrays, reply.values, seconds=time.perf_counter() - began)


def _failed(error: BaseException, seconds: float) -> Reply:
    """Return the reply of work that failed: the client's doing, or our own."""
    failure = failure_of(error)
    is_defect = isinstance(failure, Defect)
    return Reply(
        "app",
        message=" ".join((headline(error) if is_defect else failure.problem).split()),
        hint=failure.hint,
        details=failure.details or whole_traceback(error),
        is_defect=is_defect,
        seconds=seconds,
    )


def thread_limits(threads: int) -> dict[str, str]:
    """Return the environment of a process whose libraries shall use so many threads."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _checked(result: WorkResult) -> WorkResult:
    arrays = {name: np.asarray(array) for name, array in result.arrays.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise TypeError(f"the result '{name}' holds Python objects, expected numbers")
    return WorkResult(arrays, _plain(result.values))


def _read_only(arrays: Arrays) -> dict[str, Array]:
    """Return views that the work cannot change: some engines share the arrays with others."""
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def _plain(values: JsonObject) -> dict[str, object]:
    """Return values as they are after a journey: tuples are lists, all keys are text."""
    plain: dict[str, object] = json.loads(json.dumps(dict(values)))
    return plain
