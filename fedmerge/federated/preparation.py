"""Everything that is known of a run before its first round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedmerge import __version__
from fedmerge.architecture import plan_to_json
from fedmerge.architecture.model_code import ModelCode
from fedmerge.architecture.tensor_names import model_names
from fedmerge.engines import Engine
from fedmerge.federated.algorithms import METHODS, Beginning
from fedmerge.federated.client_training import ModelNames, Trainer
from fedmerge.federated.federation import Method
from fedmerge.federated.inputs import (
    Start,
    check_model,
    expand_shards,
    open_start,
    pair_sources,
)
from fedmerge.federated.options import RetrainOptions, Running
from fedmerge.federated.survey import survey
from fedmerge.merging.client_sources import Source
from fedmerge.merging.options import options_to_json
from fedmerge.merging.record_schema import ShardEntry
from fedmerge.merging.session import Session, prepare
from fedmerge.probes.options import ProbeOptions
from fedmerge.training import array_dtypes, source_digest, tied_names
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


@dataclass(frozen=True)
class Opened:
    """Clients, their model's code, and where their data are: nobody looked at these yet."""

    start: Start
    model: ModelCode
    options: RetrainOptions
    sources: Mapping[str, str]  # client → file, or the user's function by reference
    data: str | None  # what whole global models are evaluated on, by the server
    notes: tuple[str, ...]

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names."""
        return tuple(self.sources)


def open_run(
    sources: Sequence[Source],
    shards: Sequence[str | Path],
    options: RetrainOptions,
    *,
    model: ModelCode,
    data: str | None = None,
    running: Running | None = None,
    names: Sequence[str] | None = None,
) -> Opened:
    """Open clients, pair them with their data, and refuse what can't be trained or evaluated.

    `names` are the clients', where they are not those of files.
    """
    running = running or Running(device="cpu")
    files = expand_shards(shards)
    whole = METHODS[options.method].continues_whole
    start = open_start(sources, files, model, options, names, whole=whole)
    running.check_enough(len(start.clients))
    check_model(model, start.clients[0], options, device=running.devices[0], data=data)
    pairs, why = pair_sources([client.name for client in start.clients], files)
    return Opened(start, model, options, pairs, data, () if start.is_initial else (why,))


def prepare_run(
    opened: Opened,
    engine: Engine,
    *,
    plan: Plan | None = None,
    running: Running | None = None,
    known: Mapping[str, ShardEntry] | None = None,
) -> Run:
    """Let clients try the model on their data, plan it, and choose the rounds.

    `known` is what a run that goes on was told of its clients' data.
    """
    running, options, start = running or Running(device="cpu"), opened.options, opened.start
    seen = survey(
        engine,
        opened.sources,
        options,
        model=opened.model,
        policy=running.policy,
        known=known or {},
    )
    model = opened.model.fed_like(seen.fed)
    algorithm = METHODS[options.method]
    session = prepare(
        start.clients,
        replace(options.matching, method=algorithm.merge),
        plan=plan or start.plan,
        model=model,
        device=running.devices[0],
        is_run=True,
    )
    # Rounds place one group after the other, in every client: units inside heads all alike.
    if session.plan.inside:
        session = replace(session, plan=with_inside(session.plan, {}))
    # A merged file's record told already how it was planned.
    planned = session.plan.notes if plan is not None or start.plan is None else ()
    model_names_of = _names(session, model)
    epochs = _first_epochs(start, options)
    method, warnings = algorithm.begin(
        Beginning(session, options, seen.shards, model_names_of.trainable, epochs)
    )
    return Run(
        options=options,
        start=start,
        session=session,
        shards=seen.shards,
        trainer=Trainer(model, model_names_of, session.plan, opened.sources, options),
        method=method,
        notes=(*opened.notes, *seen.notes, *planned),
        warnings=(*session.warnings, *seen.warnings, *warnings),
        identity=_identity(session, opened, seen.shards, model),
    )


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


def _probes_digest(probes: ProbeOptions) -> str:
    """Return what tells inputs that units are compared on: a file by its content."""
    data = probes.data
    is_file = isinstance(data, str | Path)
    return json.dumps({**probes.to_json(), "sha256": source_digest(str(data)) if is_file else None})


def _identity(
    session: Session, opened: Opened, entries: Sequence[ShardEntry], model: ModelCode
) -> dict[str, Any]:
    """Return all that the result depends on, in the order in which differences are named."""
    options, data = opened.options, opened.data
    matching = options_to_json(options.matching, session.dials)
    place, _, name = model.name.rpartition(":")
    code = source_digest(place) if place.endswith(".py") else None
    identity: dict[str, Any] = {
        "fedmerge": __version__,
        "options": {**matching, **options.to_json()},
        "model": {"name": name, "arguments": dict(model.arguments), "sha256": code},
        "probes": None if options.init != "matched" else _probes_digest(options.probes),
        "continued_from": opened.start.continued,
        "clients": {client.name: client.sha256() for client in session.clients},
        "shards": {entry.client: asdict(entry) for entry in entries},
        "data": None if data is None else source_digest(data),
        "plan": plan_to_json(session.plan),
    }
    plain: dict[str, Any] = json.loads(json.dumps(identity))  # as it is read again
    return plain
