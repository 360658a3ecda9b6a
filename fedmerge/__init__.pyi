from .api import (
    frontier as frontier,
    match as match,
    merge_adapters as merge_adapters,
    partition as partition,
    plan as plan,
    retrain as retrain,
    write_report as write_report,
)
from .measuring import compare as compare, evaluate as evaluate, verify as verify
from .architecture.model_code import ModelCode as ModelCode
from .checkpoint import ReadOptions as ReadOptions
from .engines.engine import RetryPolicy as RetryPolicy
from .errors import (
    ArchitectureError as ArchitectureError,
    CheckpointError as CheckpointError,
    FedmergeError as FedmergeError,
    MatchingError as MatchingError,
    TrainingError as TrainingError,
    UnsafeCheckpointError as UnsafeCheckpointError,
    UsageError as UsageError,
)
from .federated.options import RetrainOptions as RetrainOptions, Running as Running
from .federated.retraining import Retrained as Retrained
from .federated.sharding import Partition as Partition, PartitionOptions as PartitionOptions
from .merging.adapter_merge import AdapterMerge as AdapterMerge
from .merging.comparison import Comparison as Comparison
from .merging.conversion import convert as convert
from .merging.evaluations import EvaluationOptions as EvaluationOptions, Score as Score
from .merging.frontier import Frontier as Frontier
from .merging.layer_match import LayerMatch as LayerMatch, match_layer as match_layer
from .merging.loading import load_model as load_model
from .merging.options import MatchOptions as MatchOptions
from .merging.result import Merge as Merge
from .merging.verification import Verification as Verification
from .probes.options import ProbeOptions as ProbeOptions
from .report.reports import ReportFile as ReportFile
from .report.unit_features import ImageOptions as ImageOptions
from .training.samples import Preparation as Preparation
from .values.run_settings import TrainSettings as TrainSettings
from .values.plans import Plan as Plan

__version__: str
