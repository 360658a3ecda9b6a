"""What there is to do: every command, its heading in the help, and the parameters it takes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path

import typer

from fedmerge.cli import data_options as data_opt
from fedmerge.cli import options as opt
from fedmerge.cli import probe_options as probe_opt
from fedmerge.cli import report_options as report_opt
from fedmerge.cli import training_options as train
from fedmerge.cli.parameters import argument

_MERGE, _MEASURE, _LOOK, _WRITE = "Merge", "Measure and show", "Look into files", "Files and data"
_DEMO_FOLDER = argument(
    "folder", Path, "Where the demo's files go.", default=Path("demo-output"), show_default=True
)
_CONTEXT = inspect.Parameter(  # typer fills it in
    "context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context
)


@dataclass(frozen=True)
class Command:
    """A command, which `run` of the module of its name carries out."""

    name: str
    panel: str
    help: str
    parameters: tuple[inspect.Parameter, ...]


COMMANDS = (
    Command(
        "match",
        _MERGE,
        "Merge checkpoints into one model: from the files alone, or with the model's code.",
        (
            *(_CONTEXT, opt.CLIENTS, opt.MERGED_OUTPUT, opt.FORCE, opt.SHARD_SIZE, opt.DTYPE),
            *(report_opt.ALSO_REPORT, *report_opt.IMAGES, opt.DRY_RUN),
            *(opt.METHOD, opt.PRESET, opt.MATCH_THRESHOLD, opt.MAX_GROWTH, opt.MAX_PARAMS),
            *(*opt.MATCHING, opt.MODEL, *opt.CODE),
            *(*probe_opt.PROBES, *probe_opt.PROBE_PIXELS, *probe_opt.PROBED, *probe_opt.IMPROVED),
            *(opt.FLATTEN, opt.ASSUME_CHAIN, opt.MATCH_BY_ORDER, *opt.READING),
            *(opt.DEVICE, opt.THREADS, opt.CONFIG, *opt.SAYING),
        ),
    ),
    Command(
        "retrain",
        _MERGE,
        "Train and match clients layer by layer on their own data, in rounds.",
        (
            *(_CONTEXT, train.SHARDS, opt.REQUIRED_MODEL, opt.OPTIONAL_CLIENTS),
            *(opt.MERGED_OUTPUT, opt.FORCE, opt.SHARD_SIZE, opt.DTYPE),
            *(report_opt.ALSO_REPORT, *report_opt.IMAGES, train.RETRAIN_DRY_RUN),
            *(train.EVALUATION_DATA, train.TASK, *train.PIXELS, *train.ROUNDS_OF, *train.TRAINING),
            *(*train.PLACES, *train.FAILURES),
            *(opt.PRESET, opt.MATCH_THRESHOLD, opt.MAX_GROWTH, *opt.MATCHING, *opt.CODE),
            *(opt.MATCH_BY_ORDER, *opt.READING, opt.THREADS, opt.CONFIG, *opt.SAYING),
        ),
    ),
    Command(
        "demo",
        _MERGE,
        "Train small clients on skewed parts of a data set, merge and compare them.",
        (_DEMO_FOLDER, *opt.SAYING),
    ),
    Command(
        "eval",
        _MEASURE,
        "Measure models on data: loss, accuracy, or what your own task measures.",
        (
            *(opt.MODELS, opt.REQUIRED_MODEL, data_opt.REQUIRED_DATA, train.TASK, *train.PIXELS),
            *(data_opt.EVALUATION_BATCH, opt.MODEL_ARG, *opt.READING),
            *(opt.DEVICE, opt.THREADS, *opt.SAYING),
        ),
    ),
    Command(
        "compare",
        _MEASURE,
        "Measure clients, their average, ensemble and match, and merged files, in one table.",
        (
            *(_CONTEXT, opt.CLIENTS, opt.REQUIRED_MODEL, data_opt.REQUIRED_DATA, data_opt.GLOBAL),
            *(train.TASK, *train.PIXELS, data_opt.EVALUATION_BATCH),
            *(opt.PRESET, opt.MATCH_THRESHOLD, opt.MAX_GROWTH, opt.MAX_PARAMS),
            *(*opt.MATCHING, *opt.CODE, *probe_opt.PROBES, *probe_opt.PROBED),
            *(opt.MATCH_BY_ORDER, *opt.READING, opt.DTYPE),
            *(opt.DEVICE, opt.THREADS, opt.CONFIG, *opt.SAYING),
        ),
    ),
    Command(
        "verify",
        _MEASURE,
        "Check a merged file against its record and, if given, its clients.",
        (
            *(opt.MERGED, opt.OPTIONAL_CLIENTS, opt.MODEL, *opt.CODE),
            *(opt.ALLOW_GLOBAL, *opt.SAYING),
        ),
    ),
    Command(
        "report",
        _MEASURE,
        "Write a page about a merged file: what it is of, how good, and what matched what.",
        (
            *(opt.MERGED, opt.OPTIONAL_CLIENTS, report_opt.REPORT_OUTPUT, opt.FORCE),
            *(report_opt.REPORT_DATA, train.TASK, *train.PIXELS, data_opt.EVALUATION_BATCH),
            *(*report_opt.IMAGES, report_opt.BASELINE, report_opt.RUN_FOLDER),
            *(opt.MODEL, *opt.CODE, opt.ALLOW_GLOBAL, opt.DEVICE, opt.THREADS, *opt.SAYING),
        ),
    ),
    Command(
        "plan",
        _LOOK,
        "Show which axes of which tensors carry the same hidden units.",
        (
            *(_CONTEXT, opt.CLIENTS, opt.OPTIONAL_OUTPUT, report_opt.GRAPH, opt.FORCE),
            *(opt.KEEP, opt.PLAN_FILE, opt.MODEL, *opt.CODE),
            *(opt.FLATTEN, opt.ASSUME_CHAIN, opt.MATCH_BY_ORDER, *opt.READING),
            *(opt.CONFIG, *opt.SAYING),
        ),
    ),
    Command(
        "inspect",
        _LOOK,
        "Show what is in files, what of it is understood, and how they differ.",
        (opt.FILES, opt.FLATTEN, opt.ASSUME_CHAIN, *opt.READING, *opt.SAYING),
    ),
    Command(
        "partition",
        _WRITE,
        "Split a data set into one ready shard per client: evenly, skewed, or by a column.",
        (
            *(data_opt.DATA_SET, data_opt.SHARD_FOLDER, opt.FORCE, *data_opt.SPLIT),
            *(*train.PIXELS, *opt.SAYING),
        ),
    ),
    Command(
        "convert",
        _WRITE,
        "Write the state dict found in a file as a plain one.",
        (
            *(opt.FILE, opt.OUTPUT, opt.FORCE, opt.SHARD_SIZE, opt.DTYPE),
            *(*opt.READING, *opt.SAYING),
        ),
    ),
    Command(
        "export",
        _WRITE,
        "Write a merged model as a file that runs without fedmerge.",
        (
            *(opt.MERGED, opt.REQUIRED_MODEL, opt.EXPORT_OUTPUT, opt.FORMAT, *opt.CODE),
            *(opt.FORCE, *opt.SAYING),
        ),
    ),
)
