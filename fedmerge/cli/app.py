"""The commands; heavy imports happen inside them, so that help answers at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fedmerge import __version__
from fedmerge.cli import data_options as data_opt
from fedmerge.cli import options as opt
from fedmerge.cli import probe_options as probe_opt
from fedmerge.cli import report_options as report_opt
from fedmerge.cli import training_options as train
from fedmerge.cli.examples import INTRODUCTION, epilog
from fedmerge.cli.signals import at_work
from fedmerge.cli.terminal import Terminal
from fedmerge.errors import UsageError

_Run = TypeVar("_Run", bound=Callable[..., Any])

app = typer.Typer(
    name="fedmerge",
    help="Merge separately trained PyTorch checkpoints of one architecture into one model.",
    epilog="Start with: fedmerge match a.pt b.pt -o global.pt",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"fedmerge {__version__}")
        raise typer.Exit


def _command(panel: str, name: str) -> Callable[[_Run], _Run]:
    """Return what makes a function a command, under a heading of the help and with examples."""
    return app.command(name, rich_help_panel=panel, epilog=epilog(name))


_MERGE, _MEASURE, _LOOK, _WRITE = "Merge", "Measure and show", "Look into files", "Files and data"


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version.", callback=_version, is_eager=True, metavar=""
        ),
    ] = False,
) -> None:
    """Merge separately trained PyTorch checkpoints of one architecture into one model."""
    if context.invoked_subcommand is None:
        print(INTRODUCTION)


@_command(_MERGE, "match")
def match(
    clients: opt.Clients,
    output: opt.MergedOutput = Path("global.pt"),
    force: opt.Force = False,
    shard_size: opt.ShardSize = None,
    dtype: opt.Dtype = None,
    report: report_opt.AlsoReport = None,
    image: report_opt.Image = None,
    image_index: report_opt.ImageIndex = None,
    image_group: report_opt.ImageGroup = None,
    dry_run: opt.DryRun = False,
    method: opt.Method = None,
    preset: opt.Preset = None,
    match_threshold: opt.MatchThreshold = None,
    max_growth: opt.MaxGrowth = None,
    max_params: opt.MaxParams = None,
    gamma: opt.Gamma = None,
    sigma: opt.Sigma = None,
    sigma0: opt.Sigma0 = None,
    sweeps: opt.Sweeps = None,
    refine: opt.Refine = None,
    seed: opt.Seed = None,
    solver: opt.Solver = None,
    tie_breaker: opt.TieBreaker = None,
    client_weight: opt.ClientWeight = None,
    class_counts: opt.ClassCounts = None,
    keep: opt.Keep = None,
    plan: opt.PlanFile = None,
    model: opt.Model = None,
    model_arg: opt.ModelArg = None,
    input_shape: opt.InputShape = None,
    input_dtype: opt.InputDtype = None,
    state: opt.State = None,
    probe: probe_opt.Probe = None,
    probe_data: probe_opt.ProbeData = None,
    probe_count: probe_opt.ProbeCount = None,
    probe_mean: probe_opt.ProbeMean = None,
    probe_std: probe_opt.ProbeStd = None,
    normalize: probe_opt.ProbeNormalize = None,
    channels_last: probe_opt.ProbeChannelsLast = False,
    signature: probe_opt.Signature = None,
    merge_units: probe_opt.MergeUnits = None,
    correct: probe_opt.Correct = None,
    batch_norm: probe_opt.BatchNorm = None,
    lead: probe_opt.Lead = None,
    symmetries: probe_opt.Symmetries = True,
    drop_outliers: probe_opt.DropOutliers = False,
    distill: probe_opt.Distill = False,
    distill_steps: probe_opt.DistillSteps = None,
    frontier: probe_opt.Frontier = False,
    frontier_plot: probe_opt.FrontierPlot = None,
    flatten: opt.Flatten = None,
    assume_chain: opt.AssumeChain = False,
    match_by_order: opt.MatchByOrder = False,
    key: opt.Key = None,
    weights: opt.Weights = None,
    allow_global: opt.AllowGlobal = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    config: opt.Config = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Merge checkpoints into one model: from the files alone, or with the model's code."""
    given = locals()
    _use_threads(threads)
    from fedmerge.cli import match as command

    with at_work():
        command.run(given, Terminal(json, quiet, verbose))


@_command(_MERGE, "retrain")
def retrain(
    context: typer.Context,
    shards: train.Shards,
    model: opt.RequiredModel,
    clients: opt.OptionalClients = None,
    output: opt.MergedOutput = Path("global.pt"),
    force: opt.Force = False,
    shard_size: opt.ShardSize = None,
    dtype: opt.Dtype = None,
    report: report_opt.AlsoReport = None,
    image: report_opt.Image = None,
    image_index: report_opt.ImageIndex = None,
    image_group: report_opt.ImageGroup = None,
    dry_run: train.RetrainDryRun = False,
    data: train.EvaluationData = None,
    task: train.Task = None,
    normalize: train.Normalize = None,
    channels_last: train.ChannelsLast = False,
    method: train.RetrainMethod = None,
    passes: train.Passes = None,
    rounds: train.Rounds = None,
    mu: train.Mu = None,
    init: train.Init = None,
    init_epochs: train.InitEpochs = None,
    epochs: train.Epochs = None,
    batch_size: train.BatchSize = None,
    optimizer: train.Optimizer = None,
    learning_rate: train.LearningRate = None,
    momentum: train.Momentum = None,
    weight_decay: train.WeightDecay = None,
    clip_norm: train.ClipNorm = None,
    mixed_precision: train.MixedPrecision = False,
    partial_weight_decay: train.PartialWeightDecay = None,
    last_rate_factor: train.LastRateFactor = None,
    last_epochs_factor: train.LastEpochsFactor = None,
    last_weight_decay: train.LastWeightDecay = None,
    engine: train.Engine = None,
    workers: train.Workers = None,
    address: train.Address = None,
    cpus_per_client: train.CpusPerClient = None,
    gpus_per_client: train.GpusPerClient = None,
    device: train.TrainingDevice = "auto",
    threads_per_client: train.ThreadsPerClient = None,
    client_timeout: train.ClientTimeout = None,
    retries: train.Retries = None,
    min_clients: train.MinClients = None,
    work_dir: train.WorkDir = None,
    resume: train.Resume = False,
    events: train.Events = None,
    preset: opt.Preset = None,
    match_threshold: opt.MatchThreshold = None,
    max_growth: opt.MaxGrowth = None,
    gamma: opt.Gamma = None,
    sigma: opt.Sigma = None,
    sigma0: opt.Sigma0 = None,
    sweeps: opt.Sweeps = None,
    refine: opt.Refine = None,
    seed: opt.Seed = None,
    solver: opt.Solver = None,
    tie_breaker: opt.TieBreaker = None,
    client_weight: opt.ClientWeight = None,
    class_counts: opt.ClassCounts = None,
    keep: opt.Keep = None,
    plan: opt.PlanFile = None,
    model_arg: opt.ModelArg = None,
    input_shape: opt.InputShape = None,
    input_dtype: opt.InputDtype = None,
    state: opt.State = None,
    match_by_order: opt.MatchByOrder = False,
    key: opt.Key = None,
    weights: opt.Weights = None,
    allow_global: opt.AllowGlobal = None,
    threads: opt.Threads = None,
    config: opt.Config = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Train and match clients layer by layer on their own data, in rounds."""
    given = locals()
    _use_threads(threads)
    from fedmerge.cli import retrain as command
    from fedmerge.cli.applicable import asked_by_user, check_applicable

    with at_work(command.STOPPED):
        check_applicable(given, asked_by_user(context))
        raise typer.Exit(command.run(given, Terminal(json, quiet, verbose)))


@_command(_MEASURE, "eval")
def evaluate(
    models: opt.Clients,
    model: opt.RequiredModel,
    data: data_opt.RequiredData,
    task: train.Task = None,
    normalize: train.Normalize = None,
    channels_last: train.ChannelsLast = False,
    batch_size: data_opt.EvaluationBatch = None,
    model_arg: opt.ModelArg = None,
    key: opt.Key = None,
    weights: opt.Weights = None,
    allow_global: opt.AllowGlobal = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Measure models on data: loss, accuracy, or what your own task measures."""
    given = locals()
    _use_threads(threads)
    from fedmerge.cli import eval as command

    with at_work():
        command.run(given, Terminal(json, quiet, verbose))


@_command(_MEASURE, "compare")
def compare(
    clients: opt.Clients,
    model: opt.RequiredModel,
    data: data_opt.RequiredData,
    merged: data_opt.Global = None,
    task: train.Task = None,
    normalize: train.Normalize = None,
    channels_last: train.ChannelsLast = False,
    batch_size: data_opt.EvaluationBatch = None,
    preset: opt.Preset = None,
    match_threshold: opt.MatchThreshold = None,
    max_growth: opt.MaxGrowth = None,
    max_params: opt.MaxParams = None,
    gamma: opt.Gamma = None,
    sigma: opt.Sigma = None,
    sigma0: opt.Sigma0 = None,
    sweeps: opt.Sweeps = None,
    refine: opt.Refine = None,
    seed: opt.Seed = None,
    solver: opt.Solver = None,
    tie_breaker: opt.TieBreaker = None,
    client_weight: opt.ClientWeight = None,
    class_counts: opt.ClassCounts = None,
    keep: opt.Keep = None,
    plan: opt.PlanFile = None,
    model_arg: opt.ModelArg = None,
    input_shape: opt.InputShape = None,
    input_dtype: opt.InputDtype = None,
    state: opt.State = None,
    probe: probe_opt.Probe = None,
    probe_data: probe_opt.ProbeData = None,
    probe_count: probe_opt.ProbeCount = None,
    probe_mean: probe_opt.ProbeMean = None,
    probe_std: probe_opt.ProbeStd = None,
    signature: probe_opt.Signature = None,
    merge_units: probe_opt.MergeUnits = None,
    correct: probe_opt.Correct = None,
    batch_norm: probe_opt.BatchNorm = None,
    lead: probe_opt.Lead = None,
    symmetries: probe_opt.Symmetries = True,
    match_by_order: opt.MatchByOrder = False,
    key: opt.Key = None,
    weights: opt.Weights = None,
    allow_global: opt.AllowGlobal = None,
    dtype: opt.Dtype = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    config: opt.Config = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Measure clients, their average, ensemble and match, and merged files, in one table."""
    given = locals()
    _use_threads(threads)
    from fedmerge.cli import compare as command

    with at_work():
        command.run(given, Terminal(json, quiet, verbose))


@_command(_WRITE, "partition")
def partition(
    data: data_opt.DataSet,
    output: data_opt.ShardFolder = Path("shards"),
    force: opt.Force = False,
    clients: data_opt.NumberOfClients = None,
    dirichlet: data_opt.Dirichlet = None,
    homogeneous: data_opt.Homogeneous = False,
    by: data_opt.By = None,
    min_samples: data_opt.MinSamples = None,
    seed: data_opt.SplitSeed = None,
    normalize: train.Normalize = None,
    channels_last: train.ChannelsLast = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Split a data set into one ready shard per client: evenly, skewed, or by a column."""
    given = locals()
    from fedmerge.cli import partition as command

    with at_work():
        command.run(given, Terminal(json, quiet, verbose))


@_command(_LOOK, "plan")
def plan(
    clients: opt.Clients,
    output: opt.OptionalOutput = None,
    graph: report_opt.Graph = None,
    force: opt.Force = False,
    keep: opt.Keep = None,
    plan: opt.PlanFile = None,
    model: opt.Model = None,
    model_arg: opt.ModelArg = None,
    input_shape: opt.InputShape = None,
    input_dtype: opt.InputDtype = None,
    state: opt.State = None,
    flatten: opt.Flatten = None,
    assume_chain: opt.AssumeChain = False,
    match_by_order: opt.MatchByOrder = False,
    key: opt.Key = None,
    weights: opt.Weights = None,
    allow_global: opt.AllowGlobal = None,
    config: opt.Config = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show which axes of which tensors carry the same hidden units."""
    given = locals()
    from fedmerge.cli import plan as command

    with at_work():
        command.run(given, Terminal(json, quiet, verbose))


@_command(_LOOK, "inspect")
def inspect(
    files: opt.Clients,
    flatten: opt.Flatten = None,
    assume_chain: opt.AssumeChain = False,
    key: opt.Key = None,
    weights: opt.Weights = None,
    allow_global: opt.AllowGlobal = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show what is in files, what of it is understood, and how they differ."""
    given = locals()
    from fedmerge.cli import inspect as command

    with at_work():
        raise typer.Exit(command.run(given, Terminal(json, quiet, verbose)))


@_command(_MEASURE, "verify")
def verify(
    merged: opt.Merged,
    clients: opt.OptionalClients = None,
    model: opt.Model = None,
    model_arg: opt.ModelArg = None,
    input_shape: opt.InputShape = None,
    input_dtype: opt.InputDtype = None,
    state: opt.State = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Check a merged file against its record and, if given, its clients."""
    given = locals()
    from fedmerge.cli import verify as command

    with at_work():
        raise typer.Exit(command.run(given, Terminal(json, quiet, verbose)))


@_command(_MEASURE, "report")
def report(
    merged: opt.Merged,
    clients: opt.OptionalClients = None,
    output: report_opt.ReportOutput = Path("report.html"),
    force: opt.Force = False,
    data: report_opt.ReportData = None,
    task: train.Task = None,
    normalize: train.Normalize = None,
    channels_last: train.ChannelsLast = False,
    batch_size: data_opt.EvaluationBatch = None,
    image: report_opt.Image = None,
    image_index: report_opt.ImageIndex = None,
    image_group: report_opt.ImageGroup = None,
    baseline: report_opt.Baseline = None,
    work_dir: report_opt.RunFolder = None,
    model: opt.Model = None,
    model_arg: opt.ModelArg = None,
    input_shape: opt.InputShape = None,
    input_dtype: opt.InputDtype = None,
    state: opt.State = None,
    device: opt.Device = "auto",
    threads: opt.Threads = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Write a page about a merged file: what it is of, how good, and what matched what."""
    given = locals()
    _use_threads(threads)
    from fedmerge.cli import report as command

    with at_work():
        command.run(given, Terminal(json, quiet, verbose))


@_command(_WRITE, "convert")
def convert(
    file: opt.File,
    output: opt.Output,
    force: opt.Force = False,
    shard_size: opt.ShardSize = None,
    dtype: opt.Dtype = None,
    key: opt.Key = None,
    weights: opt.Weights = None,
    allow_global: opt.AllowGlobal = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Write the state dict found in a file as a plain one."""
    given = locals()
    from fedmerge.cli import convert as command

    with at_work():
        command.run(given, Terminal(json, quiet, verbose))


@_command(_WRITE, "export")
def export(
    merged: opt.Merged,
    model: opt.RequiredModel,
    output: opt.ExportOutput,
    format: opt.Format = None,
    model_arg: opt.ModelArg = None,
    input_shape: opt.InputShape = None,
    input_dtype: opt.InputDtype = None,
    state: opt.State = None,
    force: opt.Force = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Write a merged model as a file that runs without fedmerge."""
    given = locals()
    from fedmerge.cli import export as command

    with at_work():
        command.run(given, Terminal(json, quiet, verbose))


@_command(_MERGE, "demo")
def demo(
    folder: Annotated[
        Path, typer.Argument(help="Where the demo's files go.", show_default=True)
    ] = Path("demo-output"),
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Train small clients on skewed parts of a data set, merge and compare them."""
    from fedmerge.cli import demo as command

    with at_work():
        command.run(folder, Terminal(json, quiet, verbose))


def _use_threads(threads: int | None) -> None:
    """Limit the CPU threads of every library; they read this when they are first imported.

    Torch multiplies what is large. Numpy has the rest, which threads would only slow down: theirs
    wait for work in a loop, and for each other if the machine is busy.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    if threads is None:
        return
    if threads < 1:
        raise UsageError(f"--threads is {threads}, expected a whole number from 1")
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(threads)
