"""Everything that is known of a run before its first round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedmerge import __version__
from fedmerge.errors import ArchitectureError
from fedmerge.graph import plan_to_json
from fedmerge.training import EVALUATION_KEYS, Shard, read_shard
from fedmerge.types.arrays import Array
from fedmerge.types.clients import Client
from fedmerge.types.layouts import axis_size
from fedmerge.types.plans import Plan
from fedmerge.units import Averaging
from fedmerge.user_code import parameters_of
from fedmerge.workflow.clients import Source
from fedmerge.workflow.merge import averaging_for
from fedmerge.workflow.models import ModelCode, model_names
from fedmerge.workflow.options import MatchOptions, options_to_json
from fedmerge.workflow.options import Method as MatchMethod
from fedmerge.workflow.prepared import Prepared, prepare, problem_of
from fedmerge.workflow.retrain.averaging import FedAvg
from fedmerge.workflow.retrain.federation import Method
from fedmerge.workflow.retrain.fedma import FedMA
from fedmerge.workflow.retrain.inputs import (
    ShardEntry,
    Start,
    expand_shards,
    open_shards,
    open_start,
    output_class_counts,
    source_digest,
)
from fedmerge.workflow.retrain.locals import LocalModel
from fedmerge.workflow.retrain.options import RetrainOptions
from fedmerge.workflow.retrain.running import Running
from fedmerge.workflow.retrain.schedule import averaging_rounds, matching_rounds
from fedmerge.workflow.retrain.training import EVALUATION, ModelNames, Trainer
from fedmerge.workflow.retrain.trial import prepare_trial


@dataclass(frozen=True)
class Run:
    """A run that can begin: its clients fit together, with each other and with the model."""

    options: RetrainOptions
    start: Start
    prepared: Prepared
    shards: Sequence[ShardEntry]
    trainer: Trainer
    method: Method
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    identity: Mapping[str, Any]  # all that the result depends on, as JSON

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names."""
        return tuple(entry.client for entry in self.shards)


def prepare_run(
    sources: Sequence[Source],
    shards: Sequence[str | Path],
    options: RetrainOptions,
    *,
    model: ModelCode,
    plan: Plan | None = None,
    data: str | None = None,
    running: Running | None = None,
) -> Run:
    """Open clients and shards, try the model on them, plan it, and choose the rounds."""
    running = running or Running(device="cpu")
    files = expand_shards(shards)
    start = open_start(sources, files, model, options)
    running.check_enough(len(start.clients))
    device = running.devices[0]
    entries, notes, first = _open_data(start, files, options, model=model, data=data, device=device)
    model = model.fed_with(first)
    matching = matching_options(options)
    prepared = prepare(start.clients, matching, plan=plan or start.plan, model=model)
    if plan is not None or start.plan is None:  # else they tell how the merged file was planned
        notes = [*notes, *prepared.plan.notes]
    names = _names(prepared, model)
    averaging, warnings = _averaging(prepared, options, entries)
    method = _method(prepared, options, start, names, averaging, device)
    sources_of = {entry.client: entry.source for entry in entries}
    return Run(
        options=options,
        start=start,
        prepared=prepared,
        shards=entries,
        trainer=Trainer(model, names, prepared.plan, sources_of, options),
        method=method,
        notes=tuple(notes),
        warnings=(*prepared.warnings, *warnings),
        identity=_identity(prepared, options, start, entries, model, data),
    )


def _open_data(
    start: Start,
    files: Sequence[str],
    options: RetrainOptions,
    *,
    model: ModelCode,
    data: str | None,
    device: str,
) -> tuple[list[ShardEntry], list[str], Shard]:
    """Return the shards, what to say of them, and the first; all data fit the model and task."""
    read = partial(read_shard, preparation=options.preparation)
    trial = prepare_trial(model, start.clients[0], options.task, seed=options.seed, device=device)
    if data is not None:
        trial.evaluate_on(read(data, client=EVALUATION, keys=EVALUATION_KEYS))
    names = [client.name for client in start.clients]
    entries, paired = open_shards(names, files, options, look=trial.train_on)
    first = read(entries[0].source, client=entries[0].client)
    notes = [] if start.is_initial else [paired]
    if options.preparation.mean and first.x.dtype != np.uint8:
        found = f"{first.origin} holds {first.x.dtype}, taken as it is"
        notes.append(f"--normalize is for bytes: {found}")
    return entries, notes, first


def matching_options(options: RetrainOptions) -> MatchOptions:
    """Return the options of the merge that the rounds end in."""
    method: MatchMethod = "fedma" if options.is_matched else "average"
    return replace(options.matching, method=method)


def _names(prepared: Prepared, code: ModelCode) -> ModelNames:
    """Return what the model calls the clients' tensors, and which of them it trains."""
    model = code.build()
    names = model_names(prepared.clients[0], model)
    aliases = prepared.aligned[0].aliases
    trained = {n for n, p in parameters_of(model).items() if p.requires_grad}
    own = {aliases.get(name, name) for name, of_model in names.items() if of_model in trained}
    return ModelNames(names, dict(aliases), frozenset(own))


def _averaging(
    prepared: Prepared, options: RetrainOptions, entries: Sequence[ShardEntry]
) -> tuple[Averaging, list[str]]:
    """Return how much clients count: by their samples, or the outputs by their classes."""
    plan = prepared.plan
    if not options.is_matched:
        weights = prepared.averaging.client_weights
        if not options.matching.client_weight:
            weights = tuple(float(entry.samples) for entry in entries)
        return Averaging(weights), []
    if options.matching.class_counts is not None:
        return prepared.averaging, []
    outputs = {axis_size(t.axes[t.out], {}) for t in plan.tensors.values() if t.makes_outputs}
    counts = output_class_counts(entries, outputs)
    if isinstance(counts, str):
        return prepared.averaging, [f"the last layer is averaged by client weights: {counts}"]
    counted = replace(options.matching, class_counts=counts)
    return averaging_for(counted, prepared.dials, plan, prepared.clients), []


def _method(
    prepared: Prepared,
    options: RetrainOptions,
    start: Start,
    names: ModelNames,
    averaging: Averaging,
    device: str,
) -> Method:
    plan = prepared.plan
    kept = {name: prepared.aligned[0].read(name) for name in plan.kept}
    initial = [_local_model(client, prepared.aligned[0]) for client in prepared.aligned]
    epochs = options.settings.epochs
    asked = options.init_epochs if options.init_epochs and start.is_initial else epochs
    first_epochs = 0 if start.is_trained else asked
    if options.is_matched:
        rounds = matching_rounds(
            plan,
            options.passes,
            epochs=epochs,
            first_epochs=first_epochs,
            last_epochs_factor=options.settings.last_epochs_factor,
            trainable=names.trainable,
        )
        problem = problem_of(prepared, options.matching, device=device)
        return FedMA(problem, averaging, rounds, initial, kept)
    rounds = averaging_rounds(plan, options.rounds, epochs=epochs, first_epochs=first_epochs)
    return FedAvg(plan, _common_widths(prepared), averaging, rounds, initial, kept)


def _local_model(client: Client, first: Client) -> LocalModel:
    """Return a client's tensors in memory; integer buffers that it lacks are the first one's."""
    arrays: dict[str, Array] = {
        name: client.read(name) if name in client.tensors else first.read(name)
        for name in first.tensors
        if name not in first.aliases
    }
    return LocalModel(client.name, arrays)


def _common_widths(prepared: Prepared) -> dict[str, int]:
    first = dict(prepared.client_widths[0])
    for client, widths in zip(prepared.clients, prepared.client_widths, strict=True):
        for group, width in widths.items():
            if width != first[group]:
                raise ArchitectureError(
                    f"{client.name}: group '{group}' is {width} wide, expected {first[group]} "
                    f"as in {prepared.clients[0].name}: an element-wise average can't merge them",
                    "use --method fedma",
                )
    return first


def _identity(
    prepared: Prepared,
    options: RetrainOptions,
    start: Start,
    entries: Sequence[ShardEntry],
    model: ModelCode,
    data: str | None,
) -> dict[str, Any]:
    """Return all that the result depends on, in the order in which differences are named."""
    matching = options_to_json(options.matching, prepared.dials)
    place, _, name = model.factory.rpartition(":")
    code = source_digest(place) if place.endswith(".py") else None
    identity: dict[str, Any] = {
        "fedmerge": __version__,
        "options": {**matching, **options.to_json()},
        "model": {"name": name, "arguments": dict(model.arguments), "sha256": code},
        "continued_from": start.continued,
        "clients": {client.name: client.sha256() for client in prepared.clients},
        "shards": {entry.client: entry.sha256 for entry in entries},
        "data": None if data is None else source_digest(data),
        "plan": plan_to_json(prepared.plan),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity))  # as it is read again
    return plain
