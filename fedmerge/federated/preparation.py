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
from fedmerge.architecture import plan_to_json
from fedmerge.architecture.model_code import ModelCode
from fedmerge.architecture.tensor_names import model_names
from fedmerge.federated.algorithms import METHODS, Beginning
from fedmerge.federated.client_training import ModelNames, Trainer
from fedmerge.federated.federation import Method
from fedmerge.federated.inputs import (
    ShardEntry,
    Start,
    expand_shards,
    open_shards,
    open_start,
    prepare_trial,
    source_digest,
)
from fedmerge.federated.options import RetrainOptions, Running
from fedmerge.merging.client_sources import Source
from fedmerge.merging.options import options_to_json
from fedmerge.merging.session import Session, prepare
from fedmerge.training import EVALUATION_KEYS, Shard, array_dtypes, read_shard, tied_names
from fedmerge.training.shards import EVALUATION
from fedmerge.user_code import parameters_of
from fedmerge.values.nesting import with_inside
from fedmerge.values.plans import Plan


@dataclass(frozen=True)
class Run:
    """A run that can begin: its clients fit together, with each other and with the model."""

    options: RetrainOptions
    start: Start
    session: Session
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
    names: Sequence[str] | None = None,
) -> Run:
    """Open clients and shards, try the model on them, plan it, and choose the rounds.

    `names` are the clients', where they are not those of files.
    """
    running = running or Running(device="cpu")
    files = expand_shards(shards)
    start = open_start(sources, files, model, options, names)
    running.check_enough(len(start.clients))
    device = running.devices[0]
    entries, notes, first = _open_data(start, files, options, model=model, data=data, device=device)
    model = model.fed_with(first)
    algorithm = METHODS[options.method]
    matching = replace(options.matching, method=algorithm.merge)
    given = plan or start.plan
    session = prepare(start.clients, matching, plan=given, model=model, device=device, is_run=True)
    # Rounds place one group after the other, in every client: units inside heads all alike.
    if session.plan.inside:
        session = replace(session, plan=with_inside(session.plan, {}))
    if plan is not None or start.plan is None:  # else they tell how the merged file was planned
        notes = [*notes, *session.plan.notes]
    model_names_of = _names(session, model)
    epochs = _first_epochs(start, options)
    method, warnings = algorithm.begin(
        Beginning(session, options, entries, model_names_of.trainable, epochs)
    )
    sources_of = {entry.client: entry.source for entry in entries}
    return Run(
        options=options,
        start=start,
        session=session,
        shards=entries,
        trainer=Trainer(model, model_names_of, session.plan, sources_of, options),
        method=method,
        notes=tuple(notes),
        warnings=(*session.warnings, *warnings),
        identity=_identity(session, options, start, entries, model, data),
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
        notes.append(f"`normalize` is for bytes: {found}")
    return entries, notes, first


def _first_epochs(start: Start, options: RetrainOptions) -> int:
    """Return how long clients train before the first exchange."""
    if start.is_trained:
        return 0
    if start.is_initial and options.init_epochs:
        return options.init_epochs
    return options.settings.epochs


def _names(session: Session, code: ModelCode) -> ModelNames:
    """Return what the model calls the clients' tensors, and which of them it trains."""
    model = code.build()
    names = model_names(session.clients[0], model)
    aliases = session.aligned[0].aliases
    trained = {n for n, p in parameters_of(model).items() if p.requires_grad}
    own = {aliases.get(name, name) for name, of_model in names.items() if of_model in trained}
    given, ties = array_dtypes(model), tied_names(model)
    dtypes = {aliases.get(name, name): given[of_model] for name, of_model in names.items()}
    firsts: dict[str, str] = {}  # by the model's first names
    for name, of_model in names.items():
        firsts.setdefault(ties[of_model], aliases.get(name, name))
    first = {name: firsts[ties[of_model]] for name, of_model in names.items()}
    return ModelNames(names, dict(aliases), frozenset(own), first, dtypes)


def _identity(
    session: Session,
    options: RetrainOptions,
    start: Start,
    entries: Sequence[ShardEntry],
    model: ModelCode,
    data: str | None,
) -> dict[str, Any]:
    """Return all that the result depends on, in the order in which differences are named."""
    matching = options_to_json(options.matching, session.dials)
    place, _, name = model.name.rpartition(":")
    code = source_digest(place) if place.endswith(".py") else None
    identity: dict[str, Any] = {
        "fedmerge": __version__,
        "options": {**matching, **options.to_json()},
        "model": {"name": name, "arguments": dict(model.arguments), "sha256": code},
        "continued_from": start.continued,
        "clients": {client.name: client.sha256() for client in session.clients},
        "shards": {entry.client: entry.sha256 for entry in entries},
        "data": None if data is None else source_digest(data),
        "plan": plan_to_json(session.plan),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity))  # as it is read again
    return plain
