"""The methods of rounds: one row each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from fedmerge.errors import ArchitectureError
from fedmerge.federated.afl import AgnosticAveraging
from fedmerge.federated.fedavg import FedAvg, averaging_rounds
from fedmerge.federated.federation import LocalModel, Method
from fedmerge.federated.fedma import FedMA, matching_rounds
from fedmerge.federated.inputs import client_in_memory
from fedmerge.federated.options import RetrainOptions
from fedmerge.federated.survey import output_class_counts, sample_weights
from fedmerge.merging.averages import Averaging, averaging_for
from fedmerge.merging.methods import merge_session
from fedmerge.merging.options import Init
from fedmerge.merging.options import Method as MergeMethod
from fedmerge.merging.record_schema import ShardEntry
from fedmerge.merging.session import Session, prepare
from fedmerge.values.arrays import Array
from fedmerge.values.clients import Client
from fedmerge.values.plans import axis_size
from fedmerge.values.wording import silent
from fedmerge.values.work import Arrays


@dataclass(frozen=True)
class Beginning:
    """What a method of rounds begins with."""

    session: Session
    options: RetrainOptions
    shards: Sequence[ShardEntry]
    trainable: Collection[str]  # tensors that clients train
    first_epochs: int  # before the first exchange

    @property
    def kept(self) -> Arrays:
        """The first client's tensors that everybody takes as they are."""
        first = self.session.aligned[0]
        return {name: first.read(name) for name in self.session.plan.kept}

    @property
    def initial(self) -> Sequence[LocalModel]:
        """The clients' models as they came."""
        first = self.session.aligned[0]
        return [_local_model(client, first) for client in self.session.aligned]


Server: TypeAlias = tuple[Method, list[str]]  # and what to warn of


@dataclass(frozen=True)
class Algorithm:
    """A method of rounds: what its server does, how clients begin, what its record says."""

    begin: Callable[[Beginning], Server]
    merge: MergeMethod  # of the record of what the rounds end in
    init: Init  # how models begin where there are no checkpoints
    continues_whole: bool = False  # whether a merged file's clients begin with all of it
    is_proximal: bool = False  # whether clients are held near the global model by `mu`


def match_layers(beginning: Beginning) -> Server:
    """Return the server of FedMA, which matches layer by layer."""
    session, options = beginning.session, beginning.options
    rounds = matching_rounds(
        session.plan,
        options.passes,
        epochs=options.settings.epochs,
        first_epochs=beginning.first_epochs,
        last_epochs_factor=options.settings.last_epochs_factor,
        trainable=beginning.trainable,
    )
    averaging, warnings = _averaging_by_classes(beginning)
    return FedMA(session, averaging, rounds, beginning.initial, beginning.kept), warnings


def average_models(beginning: Beginning) -> Server:
    """Return the server of FedAvg and FedProx, which averages whole models by their samples."""
    session, options = beginning.session, beginning.options
    rounds = averaging_rounds(
        session.plan,
        options.rounds,
        epochs=options.settings.epochs,
        first_epochs=beginning.first_epochs,
    )
    weights = session.averaging.client_weights
    if not options.matching.client_weight:
        weights = sample_weights(beginning.shards)
    widths = _common_widths(session)
    averaging = Averaging(weights)
    server = FedAvg(
        session.plan,
        widths,
        averaging,
        rounds,
        beginning.initial,
        beginning.kept,
        partial(_matched, beginning) if options.init == "matched" else None,
    )
    return server, []


def average_worst_mixture(beginning: Beginning) -> Server:
    """Return the server of AFL: FedAvg whose clients count by their losses."""
    server, warnings = average_models(beginning)
    return AgnosticAveraging(**vars(server), rate=beginning.options.weight_rate), warnings


def _matched(beginning: Beginning, models: Sequence[LocalModel]) -> Arrays:
    """Return the model that `match` makes of clients that trained apart, at their widths."""
    session, options = beginning.session, beginning.options
    first = session.clients[0]
    kept = {name: first.read(name) for name in first.tensors if name not in session.plan.tensors}
    clients = [client_in_memory(first, {**kept, **m.arrays}, m.name) for m in models]
    effort = options.matching.effort or "fast"  # training follows
    matching = replace(options.matching, method="fedma", max_growth=1.0, effort=effort)
    merged = merge_session(
        prepare(clients, matching, plan=session.plan, model=session.model, device=session.device),
        options.probes,
        silent,
    )
    return {name: merged.read(name) for name in session.plan.tensors}


METHODS: Mapping[str, Algorithm] = {
    "fedma": Algorithm(match_layers, merge="fedma", init="independent"),
    "fedavg": Algorithm(average_models, merge="average", init="shared", continues_whole=True),
    "fedprox": Algorithm(
        average_models, merge="average", init="shared", continues_whole=True, is_proximal=True
    ),
    "afl": Algorithm(average_worst_mixture, merge="average", init="shared", continues_whole=True),
}


def _averaging_by_classes(beginning: Beginning) -> tuple[Averaging, list[str]]:
    """Return how much clients count: at the outputs by their classes, where these are known."""
    session, options = beginning.session, beginning.options
    if options.matching.class_counts is not None or options.no_class_counts:
        return session.averaging, []
    makers = [tensor for tensor in session.plan.tensors.values() if tensor.makes_outputs]
    outputs = {axis_size(tensor.axes[tensor.out], {}) for tensor in makers}
    counts = output_class_counts(beginning.shards, outputs)
    if isinstance(counts, str):
        return session.averaging, [f"the last layer is averaged by client weights: {counts}"]
    counted = replace(options.matching, class_counts=counts)
    return averaging_for(counted, session.dials, session.plan, session.clients), []


def _local_model(client: Client, first: Client) -> LocalModel:
    """Return a client's tensors in memory; integer buffers that it lacks are the first one's."""
    arrays: dict[str, Array] = {
        name: client.read(name) if name in client.tensors else first.read(name)
        for name in first.tensors
        if name not in first.aliases
    }
    return LocalModel(client.name, arrays)


def _common_widths(session: Session) -> dict[str, int]:
    """Return the widths of all clients; refuse clients of different widths."""
    first = dict(session.client_widths[0])
    for client, widths in zip(session.clients, session.client_widths, strict=True):
        for group, width in widths.items():
            if width != first[group]:
                raise ArchitectureError(
                    f"{client.name}: group '{group}' is {width} wide, expected {first[group]} "
                    f"as in {session.clients[0].name}: an element-wise average can't merge them",
                    "use `method=fedma`",
                )
    return first
