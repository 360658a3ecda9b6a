"""Run one step over an engine: failures are tried again, and then left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedmerge.engines.values import Engine, Outcome, Task
from fedmerge.errors import TrainingError

MOST_REASONS = 3  # that an error names one by one


@dataclass(frozen=True)
class RetryPolicy:
    """What to do about clients that fail."""

    retries: int = 1  # further attempts per client and step
    min_clients: int = 1  # fewer results than this fail the step
    timeout: float | None = None  # seconds per attempt


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
    problem = not_finite(outcome) or (find_problem(outcome) if find_problem else "")
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
        "see to the clients named, or allow fewer with --min-clients",
    )
