"""What is known of merges: predicted before them, measured and checked after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge.api import Clients, code_of, open_session, opened_run
from fedmerge.checkpoint import ReadOptions, adapter_folder
from fedmerge.errors import UsageError
from fedmerge.merging.client_sources import Source, listed
from fedmerge.merging.options import MatchOptions, changed_match_options
from fedmerge.merging.prediction import Prediction, predict
from fedmerge.merging.session import Session
from fedmerge.notebook import default_progress
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.option_fields import changed, checked
from fedmerge.values.plans import Plan
from fedmerge.values.wording import Progress

if TYPE_CHECKING:
    from fedmerge.architecture.model_code import Model
    from fedmerge.federated.options import RetrainOptions, Running
    from fedmerge.federated.preparation import Run
    from fedmerge.federated.retraining import RetrainPrediction
    from fedmerge.merging.comparison import Comparison
    from fedmerge.merging.evaluations import EvaluationOptions, Score
    from fedmerge.merging.verification import Verification
    from fedmerge.training.samples import Data


@checked
def predict_match(
    clients: Clients,
    options: MatchOptions | None = None,
    *,
    model: Model | None = None,
    plan: Plan | None = None,
    base: Source | None = None,
    device: str = "cpu",
    prepared: Callable[[Session], None] = lambda session: None,
    **changes: Any,
) -> Prediction:
    """Return how large a merge may become, before any work is done."""
    options = changed(options or MatchOptions(), changes)
    session = open_session(clients, options, model=model, plan=plan, base=base, device=device)
    prepared(session)
    return predict(session)


@checked
def predict_retrain(
    clients: Clients,
    shards: Any,
    options: RetrainOptions | None = None,
    *,
    model: Model,
    plan: Plan | None = None,
    data: Data | None = None,
    client_names: Sequence[str] | None = None,
    running: Running | None = None,
    prepared: Callable[[Run], None] = lambda run: None,
    **changes: Any,
) -> RetrainPrediction:
    """Return what rounds would exchange, and how large their result may be; nothing is trained."""
    from fedmerge.federated.inputs import rounds_on_objects
    from fedmerge.federated.options import changed_retrain_options
    from fedmerge.federated.preparation import prepare_run
    from fedmerge.federated.retraining import predict_run

    options, running = changed_retrain_options(options, running, changes)
    with rounds_on_objects(code_of(model), shards, data, running) as inputs:
        opened = opened_run(clients, inputs, options, running, client_names)
        with closing(running.start_engine(opened.clients)) as engine:
            run = prepare_run(opened, engine, plan=plan, running=running)
    prepared(run)
    return predict_run(run)


@checked
def evaluate(
    models: Clients,
    data: Data,
    *,
    model: Model,
    options: EvaluationOptions | None = None,
    reading: ReadOptions | None = None,
    progress: Progress | None = None,
    **changes: Any,
) -> list[Score]:
    """Evaluate checkpoints, state dicts or modules on data, each at its own widths."""
    from fedmerge.merging.evaluations import EvaluationOptions, evaluate

    sources, names = listed(models, "models")
    return evaluate(
        sources,
        data,
        model=code_of(model),
        options=changed(options or EvaluationOptions(), changes),
        reading=reading,
        names=names,
        progress=progress or default_progress(),
    )


@checked
def compare(
    clients: Clients,
    data: Data,
    *,
    model: Model,
    options: MatchOptions | None = None,
    merged: Sequence[str | Path] = (),
    plan: Plan | None = None,
    evaluation: EvaluationOptions | None = None,
    probes: ProbeOptions | None = None,
    is_matched: bool = True,
    progress: Progress | None = None,
    **changes: Any,
) -> Comparison:
    """Measure clients, their average, ensemble and one-shot match, and merged files.

    Nothing is written. Further keywords are options of the match by their names.
    """
    from fedmerge.merging.comparison import WITH_ROWS, compare
    from fedmerge.merging.evaluations import EvaluationOptions, open_judge

    options, probes = changed_match_options(options, probes, changes)
    if options.method in WITH_ROWS:
        options = replace(options, method="fedma")
    judge = open_judge(data, evaluation or EvaluationOptions())
    code = code_of(model)
    session = open_session(
        clients,
        options,
        model=code.fed_with(judge.shard),
        plan=plan,
        device=judge.options.device,
    )
    return compare(
        session,
        judge,
        code,
        merged=merged,
        probes=probes,
        is_matched=is_matched,
        progress=progress or default_progress(),
    )


@checked
def verify(
    path: str | Path,
    clients: Sequence[str | Path] = (),
    *,
    model: Model | None = None,
    base: str | Path | None = None,
    allow_global: Sequence[str] = (),
    progress: Progress | None = None,
) -> Verification:
    """Check a merged file against its record and, where given, recompute it from its clients.

    With the model's code, every client must give the same outputs in the global layout as before.
    `base` is the model that a merge of changes goes back to. `allow_global` are classes that the
    clients' files may name: a record never says so.
    """
    from fedmerge.merging.adapter_check import verify_adapter
    from fedmerge.merging.verification import verify

    code = None if model is None else code_of(model)
    hear = progress or default_progress()
    if adapter_folder(Path(path)) is not None:
        if code is not None:
            raise UsageError(f"{path}: a LoRA adapter, which `model` is not needed for")
        if base is not None:
            raise UsageError(f"{path}: a LoRA adapter, which `base` is not needed for")
        return verify_adapter(Path(path), clients, allow_global=allow_global, progress=hear)
    return verify(path, clients, model=code, base=base, allow_global=allow_global, progress=hear)
