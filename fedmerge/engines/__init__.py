"""Run client work: in this process, in worker processes, or over a Ray cluster."""

from fedmerge.engines.interpreter import python_command
from fedmerge.engines.local import LocalEngine
from fedmerge.engines.policy import RetryPolicy, StepResult, run_step
from fedmerge.engines.processes import ProcessEngine, default_workers
from fedmerge.engines.ray_cluster import check_installed, is_address
from fedmerge.engines.ray_engine import RayEngine
from fedmerge.engines.ray_nodes import Share
from fedmerge.engines.values import ClientInfo, Engine, Outcome, Status, Task

__all__ = [
    "ClientInfo",
    "Engine",
    "LocalEngine",
    "Outcome",
    "ProcessEngine",
    "RayEngine",
    "RetryPolicy",
    "Share",
    "Status",
    "StepResult",
    "Task",
    "check_installed",
    "default_workers",
    "is_address",
    "python_command",
    "run_step",
]
