"""Run client work: in this process or in worker processes."""

from fedmerge.engines.local import LocalEngine
from fedmerge.engines.policy import RetryPolicy, StepResult, run_step
from fedmerge.engines.processes import ProcessEngine, default_workers
from fedmerge.engines.values import ClientInfo, Engine, Outcome, Status, Task

__all__ = [
    "ClientInfo",
    "Engine",
    "LocalEngine",
    "Outcome",
    "ProcessEngine",
    "RetryPolicy",
    "Status",
    "StepResult",
    "Task",
    "default_workers",
    "run_step",
]
