"""Shards, tasks, and the training of one client with frozen layers."""

from fedmerge.training.client import EVALUATE, TRAIN, ClientWork
from fedmerge.training.devices import choose_devices
from fedmerge.training.ensemble import EnsembleEvaluation, evaluate_ensemble
from fedmerge.training.evaluate import EVALUATION_BATCH, Evaluation, evaluate, try_model
from fedmerge.training.local import Trained, train_model
from fedmerge.training.partition import (
    Parts,
    split_by_dirichlet,
    split_by_key,
    split_homogeneously,
    write_shards,
)
from fedmerge.training.preparation import Preparation, parse_normalize
from fedmerge.training.reproducible import derived_seed, seeded
from fedmerge.training.settings import Stage, TrainSettings, default_settings
from fedmerge.training.shards import (
    EVALUATION_KEYS,
    TRAINING_KEYS,
    Pairing,
    Shard,
    pair_shards,
    read_column,
    read_shard,
)
from fedmerge.training.states import array_dtypes, tied_names
from fedmerge.training.tasks import LearningTask, count_classes, find_task

__all__ = [
    "EVALUATE",
    "EVALUATION_BATCH",
    "EVALUATION_KEYS",
    "TRAIN",
    "TRAINING_KEYS",
    "ClientWork",
    "EnsembleEvaluation",
    "Evaluation",
    "LearningTask",
    "Pairing",
    "Parts",
    "Preparation",
    "Shard",
    "Stage",
    "TrainSettings",
    "Trained",
    "array_dtypes",
    "choose_devices",
    "count_classes",
    "default_settings",
    "derived_seed",
    "evaluate",
    "evaluate_ensemble",
    "find_task",
    "pair_shards",
    "parse_normalize",
    "read_column",
    "read_shard",
    "seeded",
    "split_by_dirichlet",
    "split_by_key",
    "split_homogeneously",
    "tied_names",
    "train_model",
    "try_model",
    "write_shards",
]
