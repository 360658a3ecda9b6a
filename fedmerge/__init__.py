"""Merge separately trained PyTorch checkpoints by federated matched averaging.

The names below are loaded when they are first used, so that `import fedmerge` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedmerge.checkpoint import ReadOptions as ReadOptions
    from fedmerge.errors import ArchitectureError as ArchitectureError
    from fedmerge.errors import CheckpointError as CheckpointError
    from fedmerge.errors import FedmergeError as FedmergeError
    from fedmerge.errors import MatchingError as MatchingError
    from fedmerge.errors import TrainingError as TrainingError
    from fedmerge.errors import UnsafeCheckpointError as UnsafeCheckpointError
    from fedmerge.errors import UsageError as UsageError
    from fedmerge.types.plans import Plan as Plan
    from fedmerge.workflow.compare import Comparison as Comparison
    from fedmerge.workflow.compare import compare as compare
    from fedmerge.workflow.convert import convert as convert
    from fedmerge.workflow.evaluate import EvaluationOptions as EvaluationOptions
    from fedmerge.workflow.evaluate import Score as Score
    from fedmerge.workflow.evaluate import evaluate as evaluate
    from fedmerge.workflow.load import load_model as load_model
    from fedmerge.workflow.match import match as match
    from fedmerge.workflow.match import plan as plan
    from fedmerge.workflow.merge import Merge as Merge
    from fedmerge.workflow.models import ModelCode as ModelCode
    from fedmerge.workflow.oneshot.frontier import Frontier as Frontier
    from fedmerge.workflow.oneshot.frontier import frontier as frontier
    from fedmerge.workflow.oneshot.options import ProbeOptions as ProbeOptions
    from fedmerge.workflow.options import MatchOptions as MatchOptions
    from fedmerge.workflow.partition import Partition as Partition
    from fedmerge.workflow.partition import PartitionOptions as PartitionOptions
    from fedmerge.workflow.partition import partition as partition
    from fedmerge.workflow.reporting.images import ImageOptions as ImageOptions
    from fedmerge.workflow.reporting.report import ReportFile as ReportFile
    from fedmerge.workflow.reporting.report import write_report as write_report
    from fedmerge.workflow.retrain.options import Preparation as Preparation
    from fedmerge.workflow.retrain.options import RetrainOptions as RetrainOptions
    from fedmerge.workflow.retrain.options import TrainSettings as TrainSettings
    from fedmerge.workflow.retrain.result import Retrained as Retrained
    from fedmerge.workflow.retrain.retrain import retrain as retrain
    from fedmerge.workflow.retrain.running import RetryPolicy as RetryPolicy
    from fedmerge.workflow.retrain.running import Running as Running
    from fedmerge.workflow.verify import Verification as Verification
    from fedmerge.workflow.verify import verify as verify

_HOMES = {
    "ArchitectureError": "errors",
    "CheckpointError": "errors",
    "Comparison": "workflow.compare",
    "EvaluationOptions": "workflow.evaluate",
    "FedmergeError": "errors",
    "Frontier": "workflow.oneshot.frontier",
    "ImageOptions": "workflow.reporting.images",
    "MatchOptions": "workflow.options",
    "MatchingError": "errors",
    "Merge": "workflow.merge",
    "ModelCode": "workflow.models",
    "Partition": "workflow.partition",
    "PartitionOptions": "workflow.partition",
    "Plan": "types.plans",
    "Preparation": "workflow.retrain.options",
    "ProbeOptions": "workflow.oneshot.options",
    "ReadOptions": "checkpoint",
    "ReportFile": "workflow.reporting.report",
    "RetrainOptions": "workflow.retrain.options",
    "Retrained": "workflow.retrain.result",
    "RetryPolicy": "workflow.retrain.running",
    "Running": "workflow.retrain.running",
    "Score": "workflow.evaluate",
    "TrainSettings": "workflow.retrain.options",
    "TrainingError": "errors",
    "UnsafeCheckpointError": "errors",
    "UsageError": "errors",
    "Verification": "workflow.verify",
    "compare": "workflow.compare",
    "convert": "workflow.convert",
    "evaluate": "workflow.evaluate",
    "frontier": "workflow.oneshot.frontier",
    "load_model": "workflow.load",
    "match": "workflow.match",
    "partition": "workflow.partition",
    "plan": "workflow.match",
    "retrain": "workflow.retrain.retrain",
    "verify": "workflow.verify",
    "write_report": "workflow.reporting.report",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedmerge' has no attribute '{name}'")
    return getattr(import_module(f"fedmerge.{_HOMES[name]}"), name)
