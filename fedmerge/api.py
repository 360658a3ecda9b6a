"""What fedmerge does, step by step: the one place where steps are put together.

Clients are paths, state dicts or modules, in a list or by name; a model is a class, a function, a
module or a reference; data are paths, arrays, data sets or loaders. Options are keywords
(the modules named `options` say whose). Whatever is wrong with any of them is a `FedmergeError`.
The command line calls these functions and prints; `prepared` tells it what was opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch

from fedmerge.architecture import plan_to_json
from fedmerge.checkpoint import (
    ModelFolder,
    check_targets,
    readable,
    write_text,
)
from fedmerge.errors import UsageError
from fedmerge.merging.client_sources import (
    Source,
    expand_sources,
    first_folder,
    listed,
    open_base,
    open_clients,
    paths_of,
)
from fedmerge.merging.conversion import convert
from fedmerge.merging.inspection import inspect
from fedmerge.merging.methods import merge_session
from fedmerge.merging.options import MatchOptions, changed_match_options, choose_device
from fedmerge.merging.result import Merge
from fedmerge.merging.session import Session, prepare
from fedmerge.notebook import default_progress
from fedmerge.probes.options import ProbeOptions
from fedmerge.report.output_files import OutputFiles, first_sample, folder_like_clients
from fedmerge.report.reports import write_report
from fedmerge.report.sections import check_picture, draw_graph, draw_sizes
from fedmerge.values.option_fields import changed, check_value, checked, one_of
from fedmerge.values.plans import Plan
from fedmerge.values.wording import Progress

if TYPE_CHECKING:
    from fedmerge.architecture.folder_config import FolderConfig
    from fedmerge.architecture.model_code import Model, ModelCode
    from fedmerge.federated.events import HearEvent
    from fedmerge.federated.inputs import RoundInputs
    from fedmerge.federated.options import RetrainOptions, Running
    from fedmerge.federated.preparation import Opened, Run
    from fedmerge.federated.retraining import Retrained
    from fedmerge.federated.sharding import Partition, PartitionOptions
    from fedmerge.merging.adapter_merge import AdapterMerge
    from fedmerge.merging.adapters import Adapter
    from fedmerge.merging.frontier import Frontier
    from fedmerge.merging.onnx_export import Exported
    from fedmerge.report.unit_features import ImageOptions
    from fedmerge.training.samples import Data, Preparation

__all__ = [
    "convert",
    "export",
    "frontier",
    "inspect",
    "match",
    "merge_adapters",
    "open_session",
    "partition",
    "plan",
    "retrain",
    "write_report",
]

Requirement: TypeAlias = Literal["better"]  # than every client
Clients: TypeAlias = "Sequence[Source] | Mapping[str, Source] | Source"


@checked
def match(
    clients: Clients,
    options: MatchOptions | None = None,
    *,
    model: Model | None = None,
    plan: Plan | None = None,
    base: Source | None = None,
    probes: ProbeOptions | None = None,
    output: str | Path | None = None,
    force: bool = False,
    shard_size: str | int | None = None,
    report: str | Path | None = None,
    image: ImageOptions | None = None,
    require: Requirement | None = None,
    device: str = "cpu",
    prepared: Callable[[Session], None] = lambda session: None,
    progress: Progress | None = None,
    **changes: Any,
) -> Merge:
    """Merge clients; with `output`, write the result, and with `report` a page about it.

    With the model's code, or with modules for clients, units are also compared by what they do.
    With `base`, the model that all clients were fine-tuned from, what they changed is merged.
    With `require="better"`, nothing is written unless the merge is expected to beat every client.
    `prepared` is called with the session before the merge. Further keywords are options by their
    names, e.g. `max_growth=1` or `probe_data=x`.
    """
    progress = progress or default_progress()
    options, probes = changed_match_options(options, probes, changes)
    folder = folder_like_clients(output, clients)
    files = OutputFiles(
        output, force, shard_size, report, image, method=options.method, folder=folder
    )
    files.check(clients, can_run=model is not None)
    _check_known(require)
    inputs: dict[str, Any] = {"model": model, "plan": plan, "probes": probes, "device": device}
    inputs |= {"base": base, "is_for_folder": folder is not None}
    session = open_session(clients, options, **inputs)
    files.check_clients(session.clients)
    prepared(session)
    merge = merge_session(session, probes, progress, as_program=files.is_program)
    _check_required(merge, require)
    return files.write(merge, session.model, clients=session.clients, progress=progress)


@checked
def frontier(
    clients: Clients,
    options: MatchOptions | None = None,
    *,
    model: Model | None = None,
    plan: Plan | None = None,
    probes: ProbeOptions | None = None,
    output: str | Path | None = None,
    force: bool = False,
    shard_size: str | int | None = None,
    report: str | Path | None = None,
    image: ImageOptions | None = None,
    frontier_plot: str | Path | None = None,
    require: Requirement | None = None,
    device: str = "cpu",
    prepared: Callable[[Session], None] = lambda session: None,
    progress: Progress | None = None,
    **changes: Any,
) -> Frontier:
    """Merge clients as `match` does, and tell what other size budgets would give.

    `frontier_plot` is a picture of that to draw, .svg or .png.
    """
    from fedmerge.merging.frontier import survey_sizes  # most merges do without

    progress = progress or default_progress()
    options, probes = changed_match_options(options, probes, changes)
    folder = folder_like_clients(output, clients)
    files = OutputFiles(output, force, shard_size, report, image, folder=folder)
    files.check(clients, can_run=model is not None)
    if frontier_plot is not None:
        check_picture(frontier_plot, "frontier_plot", inputs=paths_of(clients), force=force)
    _check_known(require)
    inputs: dict[str, Any] = {"model": model, "plan": plan, "probes": probes, "device": device}
    inputs |= {"is_for_folder": folder is not None}
    session = open_session(clients, options, tries_growth=True, **inputs)
    files.check_clients(session.clients)
    prepared(session)
    surveyed = survey_sizes(session, probes, progress)
    _check_required(surveyed.merge, require)
    files.write(surveyed.merge, session.model, clients=session.clients, progress=progress)
    if frontier_plot is not None:
        draw_sizes(surveyed.to_json(), frontier_plot, force=force)
    return surveyed


@checked
def merge_adapters(
    clients: Clients,
    options: MatchOptions | None = None,
    *,
    output: str | Path | None = None,
    force: bool = False,
    prepared: Callable[[Sequence[Adapter]], None] = lambda adapters: None,
    progress: Progress | None = None,
    **changes: Any,
) -> AdapterMerge:
    """Merge LoRA adapters: the mean of their updates; with `output`, write it as a folder.

    The mean is exact, at the sum of the ranks; with `max_growth`, the nearest one whose rank is at
    most so many times the largest client's. Clients are folders that peft saved.
    """
    from fedmerge.merging.adapter_merge import check_options, check_output, merge_opened
    from fedmerge.merging.adapters import open_adapters

    options = changed(options or MatchOptions(), changes)
    check_options(options)
    if output is not None:
        check_output(output, paths_of(clients), force=force)
    progress = progress or default_progress()
    adapters = open_adapters(clients, options)
    prepared(adapters)
    merge = merge_opened(adapters, options, progress)
    if output is not None:
        merge.write(output, force=force, progress=progress)
    return merge


@checked
def open_session(
    clients: Clients,
    options: MatchOptions | None = None,
    *,
    model: Model | None = None,
    plan: Plan | None = None,
    base: Source | None = None,
    device: str = "cpu",
    least: int = 2,
    tries_growth: bool = False,
    probes: ProbeOptions | None = None,
    is_for_folder: bool = False,
) -> Session:
    """Open clients, plan them, and check that they fit together.

    Folders that a library saved bring their code. `tries_growth`: which groups can grow is of
    interest even where the merge does not grow. `probes`: their data tell what the model is fed.
    `is_for_folder`: the first client's config.json has to say the widths of the merge. `base` is
    the model that the clients were fine-tuned from.
    """
    options = options or MatchOptions()
    sources, names = listed(clients)
    expanded = expand_sources(sources, least=least)
    if names is not None and len(names) != len(expanded):
        raise UsageError("`clients` has a name for several files, expected one file per name")
    if model is None:  # a module brings its code
        model = next((s for s in sources if isinstance(s, torch.nn.Module)), None)
    config = None
    if (folder := first_folder(sources)) is not None:
        model, config = _code_and_config(folder, model, plan, is_for_folder=is_for_folder)
    opened = open_clients(expanded, options.reading, names)
    code = None if model is None else _fed_with(code_of(model), probes)
    return prepare(
        opened,
        options,
        plan=plan,
        model=code,
        device=choose_device(device),
        tries_growth=tries_growth,
        config=config,
        base=None if base is None else open_base(base, options.reading),
    )


@checked
def plan(
    clients: Clients,
    options: MatchOptions | None = None,
    *,
    given: Plan | None = None,
    model: Model | None = None,
    output: str | Path | None = None,
    graph: str | Path | None = None,
    force: bool = False,
    prepared: Callable[[Session], None] = lambda session: None,
    **changes: Any,
) -> Plan:
    """Return the plan that a merge of these clients would use.

    `output` is a JSON file to write it to, `graph` a picture to draw, .svg or .png.
    """
    options = changed(options or MatchOptions(), changes)
    if output is not None:
        check_targets([Path(output)], inputs=paths_of(clients), force=force)
    if graph is not None:
        check_picture(graph, "graph", inputs=paths_of(clients), force=force)
    session = open_session(clients, options, plan=given, model=model, least=1, tries_growth=True)
    prepared(session)
    if output is not None:
        write_text(Path(output), readable(plan_to_json(session.plan)), force=force)
    if graph is not None:
        draw_graph(session, graph, force=force)
    return session.plan


@checked
def retrain(
    clients: Clients,
    shards: Any,
    options: RetrainOptions | None = None,
    *,
    model: Model,
    plan: Plan | None = None,
    data: Data | None = None,
    output: str | Path | None = None,
    force: bool = False,
    shard_size: str | int | None = None,
    report: str | Path | None = None,
    image: ImageOptions | None = None,
    client_names: Sequence[str] | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    running: Running | None = None,
    hear: HearEvent | None = None,
    logger: str | None = None,
    prepared: Callable[[Run], None] = lambda run: None,
    **changes: Any,
) -> Retrained:
    """Train and match clients in rounds, and write the global model if asked to.

    `clients` are checkpoints; none at all, and clients are trained from the start; one file that
    `match` or `retrain` wrote, and its clients go on from it. `shards` are files, folders or a
    function by reference, or data by client's name; `client_names` are those of clients that have
    no checkpoints, if shards don't tell them; `data` is what global models are evaluated
    on. With `work_dir`, the state after every round is kept there for `resume`. With `shard_size`
    (bytes, or text such as "2GB") the output is safetensors shards and their index. `hear` is told
    of every event, and so is the `logger`, a class by reference, or "tensorboard". `prepared`
    is called with the run before its first round. Further keywords are options by their names.
    """
    from fedmerge.federated.events import ignore, logging, told_to
    from fedmerge.federated.inputs import rounds_on_objects
    from fedmerge.federated.options import changed_retrain_options
    from fedmerge.federated.preparation import prepare_run
    from fedmerge.federated.retraining import run_prepared
    from fedmerge.federated.run_folder import held_work_dir

    options, running = changed_retrain_options(options, running, changes)
    if report is not None:
        image = image or first_sample(data, options.preparation)
    files = OutputFiles(output, force, shard_size, report, image, resume)
    with (
        rounds_on_objects(code_of(model), shards, data, running) as inputs,
        held_work_dir(work_dir) as state,
        logging(logger) as log,
    ):
        files.check(clients, can_run=True, also=inputs.files, state=state)
        opened = opened_run(clients, inputs, options, running, client_names)
        known = state.known_shards() if state is not None and resume else {}
        with closing(running.start_engine(opened.clients)) as engine:
            run = prepare_run(opened, engine, plan=plan, running=running, known=known)
            files.check_clients(run.session.clients)
            prepared(run)
            if state is not None and force and not resume:
                state.clear()
            retrained = run_prepared(
                run,
                engine,
                data=inputs.data,
                work_dir=state,
                output=output,
                running=running,
                hear=told_to(hear or ignore, log),
            )
        files.write(retrained, inputs.model, work_dir=work_dir)
    return retrained


def opened_run(
    clients: Clients,
    inputs: RoundInputs,
    options: RetrainOptions,
    running: Running,
    client_names: Sequence[str] | None,
) -> Opened:
    """Open clients; shards name those that are built here, unless they are named."""
    from fedmerge.federated.preparation import open_run

    sources, names = listed(clients)
    return open_run(
        sources,
        inputs.shards,
        options,
        model=inputs.model,
        data=inputs.data,
        running=running,
        names=names or (None if sources else inputs.names or client_names),
    )


@checked
def export(
    merged: str | Path,
    output: str | Path,
    *,
    model: Model,
    format: str | None = None,
    force: bool = False,
) -> Exported:
    """Write a merged model as a file that runs without fedmerge: `format` is pt2 or onnx."""
    from fedmerge.merging.onnx_export import export

    format = format or ("onnx" if Path(output).suffix == ".onnx" else "pt2")
    return export(merged, code_of(model), output, format=format, force=force)


@checked
def partition(
    data: str | Path,
    folder: str | Path,
    options: PartitionOptions | None = None,
    *,
    preparation: Preparation | None = None,
    force: bool = False,
    **changes: Any,
) -> Partition:
    """Split the samples of a file among clients, and write them as `folder/<client>.npz`."""
    from fedmerge.federated.options import changed_partition_options
    from fedmerge.federated.sharding import partition

    options = changed_partition_options(options, changes)
    return partition(data, folder, options, preparation=preparation, force=force)


def _check_known(require: Requirement | None) -> None:
    if require is not None:
        check_value("require", require, one_of(*get_args(Requirement)))


def _check_required(merge: Merge, require: Requirement | None) -> None:
    if require is not None:
        merge.check_better()


def _code_and_config(
    folder: ModelFolder, model: Model | None, plan: Plan | None, *, is_for_folder: bool
) -> tuple[Model | None, FolderConfig | None]:
    """Return the model's code, a folder's own where none is given, and what says the widths."""
    from fedmerge.architecture.folder_config import FolderConfig, folder_code  # files do without

    own = folder_code(folder, is_planned=plan is not None)
    if model is None:
        is_held = own is not None or is_for_folder
        return own, FolderConfig(own) if is_held else None
    return model, FolderConfig(own).if_built() if is_for_folder else None


def _fed_with(code: ModelCode, probes: ProbeOptions | None) -> ModelCode:
    """Return the model's code with the shape of real inputs, unless it is said what that is."""
    if probes is None or probes.data is None or code.input_shapes:
        return code
    from fedmerge.probes.data import read_probes  # other merges do without

    few = read_probes(probes.data, count=1, preparation=probes.preparation)
    return code.fed_like(few.inputs)


def code_of(model: Model) -> ModelCode:
    """Return what builds and runs the user's model."""
    from fedmerge.architecture.model_code import as_model_code  # files alone do without

    return as_model_code(model)
