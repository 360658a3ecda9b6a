"""What engines have in common: tasks, outcomes, retries, one call of client work."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np

from fedmerge.errors import Defect, TrainingError
from fedmerge.process import is_interrupt
from fedmerge.tracebacks import failure_of, headline, whole_traceback
from fedmerge.values.arrays import Array
from fedmerge.values.run_settings import RetryPolicy as RetryPolicy
from fedmerge.values.work import Arrays, JsonObject, Place, Work, WorkResult

Status: TypeAlias = Literal["ok", "app", "lost", "timeout"]


def array_bytes(arrays: Arrays) -> int:
    """Return how many bytes of numbers travel when these arrays are sent."""
    return sum(array.nbytes for array in arrays.values())


@dataclass(frozen=True)
class Task:
    """One client's work for one step; it holds all that the work needs, so it can be run again."""

    id: str
    client: str
    function: str  # a `Work` as "package.module:name"
    arrays: Arrays = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        json.dumps(self.settings)  # every engine refuses what one of them cannot send
        assert not any(array.dtype.hasobject for array in self.arrays.values())

    @property
    def nbytes(self) -> int:
        """The bytes of numbers sent to the client."""
        return array_bytes(self.arrays)


@dataclass(frozen=True)
class Outcome:
    """How a task ended: done, or its code failed (`app`), its process died, it took too long.

    Arrays and values are empty unless it is done (`ok`).
    """

    task: str  # its id
    client: str
    status: Status
    arrays: Arrays = field(default_factory=dict)
    values: JsonObject = field(default_factory=dict)
    message: str = ""  # one line: what went wrong
    hint: str = ""  # what to do about it, where that is known
    details: str = ""  # the traceback of code that failed
    is_defect: bool = False  # whether that code is fedmerge's own
    seconds: float = 0.0
    attempts: int = 1

    @property
    def nbytes(self) -> int:
        """The bytes of numbers sent back by the client."""
        return array_bytes(self.arrays)


@dataclass(frozen=True)
class ClientInfo:
    """A client whose tasks can be run now, and where."""

    name: str
    where: str


class Engine(Protocol):
    """Runs the tasks of clients; one `run` at a time."""

    def clients(self) -> Sequence[ClientInfo]:
        """Return the clients that can be placed now, in the order in which to start them."""

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield exactly one outcome per task, in the order in which they end.

        A client's failure is an outcome, never an exception. Tasks are taken from the iterable
        only when they can start. `timeout`: seconds that a task's function may take.
        """

    def close(self) -> None:
        """End everything that the engine started; closing twice does no harm."""


MOST_REASONS = 3  # that an error names one by one


@dataclass(frozen=True)
class StepResult:
    """What one step over all clients gave."""

    done: Mapping[str, Outcome]  # client → its result, in the clients' order
    missing: Mapping[str, Outcome]  # client → its last failure, in the clients' order


def run_step(
    engine: Engine,
    clients: Sequence[str],
    make_task: Callable[[str], Task],
    *,
    policy: RetryPolicy,
    find_problem: Callable[[Outcome], str] | None = None,
    hear: Callable[[Outcome], None] = lambda outcome: None,
) -> StepResult:
    """Run one task per client, failed ones again, and return who delivered and who did not.

    `make_task` is called when a task can start, and again for each retry, so that no more tasks
    than workers are in memory. A result with NaN or Inf, or in which `find_problem` finds one, is
    a failure. `hear` is told every attempt's outcome. The order of the results does not depend on
    who was first.
    """
    last: dict[str, Outcome] = {}
    pending = list(clients)
    for attempt in range(1, policy.retries + 2):
        pending, absent = _placeable(engine, pending)
        last.update({name: _absence(name, last.get(name)) for name in absent})
        if not pending:
            break
        for outcome in engine.run(map(make_task, pending), timeout=policy.timeout):
            judged = replace(_judged(outcome, find_problem), attempts=attempt)
            last[outcome.client] = judged
            hear(judged)
        pending = [name for name in pending if last[name].status != "ok"]
    step = StepResult(
        {name: last[name] for name in clients if last[name].status == "ok"},
        {name: last[name] for name in clients if last[name].status != "ok"},
    )
    _require(step, policy.min_clients)
    return step


def not_finite(outcome: Outcome) -> str:
    """Say which array of a result holds NaN or Inf, or nothing."""
    for name, array in outcome.arrays.items():
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            count = array.size - int(np.isfinite(array).sum())
            return f"returned NaN or Inf in {count:,} of {array.size:,} values of '{name}'"
    return ""


def _judged(outcome: Outcome, find_problem: Callable[[Outcome], str] | None) -> Outcome:
    if outcome.status != "ok":
        return outcome
    problem = (find_problem(outcome) if find_problem else "") or not_finite(outcome)
    if not problem:
        return outcome
    return replace(outcome, status="app", arrays={}, values={}, message=problem)


def _placeable(engine: Engine, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the clients that the engine can run now, in its order, and the others."""
    there = dict.fromkeys(client.name for client in engine.clients())
    asked = set(names)
    return [n for n in there if n in asked], [n for n in names if n not in there]


def _absence(name: str, before: Outcome | None) -> Outcome:
    """Return the outcome of a client that can't be placed: its last failure, if it had one."""
    return before or Outcome("", name, "lost", message="cannot be placed anywhere now", attempts=0)


def _require(step: StepResult, least: int) -> None:
    if len(step.done) >= least:
        return
    reasons = [f"{name} ({o.status}): {o.message}" for name, o in step.missing.items()]
    if not step.done:  # what they have in common is mostly one cause
        first = next(iter(step.missing.values()))
        problem = f"all {len(reasons)} clients failed; {reasons[0]}"
        raise TrainingError(problem, first.hint, details=first.details)
    if len(reasons) > MOST_REASONS:
        reasons[MOST_REASONS:] = [f"and {len(reasons) - MOST_REASONS} more"]
    total = len(step.done) + len(step.missing)
    raise TrainingError(
        f"{len(step.done)} of {total} clients delivered, {least} are needed; " + "; ".join(reasons),
        "see to the clients named, or allow fewer with `min_clients`",
    )


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


CallWork: TypeAlias = Callable[[str, Arrays, JsonObject, Place], Reply]  # such as `call_work`


def in_time(reply: Reply, timeout: float | None) -> Reply:
    """Return a reply, or that its work took too long."""
    if timeout is None or reply.seconds <= timeout:
        return reply
    message = f"took {reply.seconds:.3g} s, allowed are {timeout:g} s"
    return Reply("timeout", message=message, seconds=reply.seconds)


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
