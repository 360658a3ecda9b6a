"""What clients say of their data before the first round: the server itself opens none of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec
import torch

from fedmerge.architecture.model_code import BUILDER, ModelCode
from fedmerge.decoding import decode_value
from fedmerge.engines import Engine, Outcome, RetryPolicy, Task, run_step
from fedmerge.errors import TrainingError
from fedmerge.federated.client_training import check_own
from fedmerge.federated.options import RetrainOptions
from fedmerge.merging.record_schema import WHY_MISSING
from fedmerge.merging.record_schema import ShardEntry as ShardEntry
from fedmerge.training import LOOK, ClientWork
from fedmerge.user_code import derived_seed
from fedmerge.values.work import JsonObject


class _Refused(msgspec.Struct, frozen=True):
    """Why a client's data can't be used."""

    problem: str
    hint: str
    details: str


class _Seen(msgspec.Struct, frozen=True):
    """What a client says of its data."""

    samples: int
    class_counts: tuple[int, ...] | None
    sha256: str
    shapes: tuple[tuple[int, ...], ...]  # of what the model is fed with
    dtypes: tuple[str, ...]
    stored: str  # dtype in the file


class _Answer(msgspec.Struct, frozen=True):
    refused: _Refused


@dataclass(frozen=True)
class Survey:
    """What is known of all clients' data."""

    shards: tuple[ShardEntry, ...]
    fed: tuple[torch.Tensor, ...]  # without values: what the model is fed with
    notes: tuple[str, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Who did not answer; the reason is said once, and kept by no record."""
        return tuple(
            f"{entry.client} could not be tried before the first round: it counts as the mean of "
            "the others"
            for entry in self.shards
            if entry.samples is None
        )


def survey(
    engine: Engine,
    sources: Mapping[str, str],
    options: RetrainOptions,
    *,
    model: ModelCode,
    policy: RetryPolicy,
    known: Mapping[str, ShardEntry],
) -> Survey:
    """Let every client try the model on its own data and say what the server has to know.

    Who hangs or crashes is left out of this step as of any other. Data that don't fit are refused
    here, since they never will. `known` is what a stopped run was told: where one of the two
    surveys had no answer, that one holds, so that the run goes on as it began.
    """

    def make_task(client: str) -> Task:
        work = ClientWork(
            client=client,
            builder=BUILDER,
            shard=sources[client],
            arguments={
                "factory": model.factory,
                "arguments": dict(model.arguments),
                "aliases": {},
            },
            task=options.task,
            training=replace(options.settings, seed=derived_seed(options.seed, "trial", client)),
            preparation=options.preparation,
            keeps_class_counts=options.no_class_counts,
            held_out=options.held_out,
            reading=options.reading,
        )
        return Task(f"look/{client}", client, LOOK, {}, work.to_json())

    step = run_step(
        engine, list(sources), make_task, policy=policy, find_problem=_problem, hear=check_own
    )
    seen = {name: _seen(outcome.values) for name, outcome in step.done.items()}
    first = next(iter(seen.values()))
    notes = [
        f"{name} could not be tried, {WHY_MISSING[outcome.status]}: {outcome.message}"
        for name, outcome in step.missing.items()
    ]
    if options.preparation.mean and first.stored != "uint8":
        notes.append(
            f"`normalize` is for bytes: {next(iter(seen))} holds {first.stored}, taken as it is"
        )
    kinds = zip(first.shapes, first.dtypes, strict=True)
    fed = tuple(torch.empty(s, dtype=getattr(torch, d), device="meta") for s, d in kinds)
    shards = [_entry(name, seen.get(name), known.get(name)) for name in sources]
    return Survey(tuple(shards), fed, tuple(notes))


def _problem(outcome: Outcome) -> str:
    """Refuse data that can't be used; say what is wrong with an answer that none gives."""
    if "refused" in outcome.values:
        refused = decode_value(outcome.values, _Answer, fail=TrainingError).refused
        raise TrainingError(refused.problem, refused.hint, details=refused.details)
    try:
        seen = _seen(outcome.values)
    except TrainingError as error:
        return f"returned values that no trial gives ({error.problem})"
    if seen.samples < 1 or min(seen.class_counts or (0,)) < 0:
        return f"returned {seen.samples} samples and the class counts {seen.class_counts}"
    if not set(seen.dtypes) <= {"float32", "int64"} or len(seen.dtypes) != len(seen.shapes):
        return f"returned samples of {', '.join(seen.dtypes)}"
    return ""


def _seen(values: JsonObject) -> _Seen:
    return decode_value(values, _Seen, fail=TrainingError)


def _entry(client: str, seen: _Seen | None, known: ShardEntry | None) -> ShardEntry:
    if known is not None and (seen is None or known.samples is None):
        return known
    if seen is None:
        return ShardEntry(client)
    return ShardEntry(client, seen.sha256, seen.samples, seen.class_counts)


def sample_weights(entries: Sequence[ShardEntry]) -> tuple[float, ...]:
    """Return how many samples every client has; the mean of the others where it did not say."""
    mean = fmean(entry.samples for entry in entries if entry.samples is not None)
    return tuple(mean if entry.samples is None else float(entry.samples) for entry in entries)


def output_class_counts(
    entries: Sequence[ShardEntry], outputs: set[int]
) -> dict[str, list[float]] | str:
    """Return every client's count per output, or why there is none."""
    if not outputs:
        return "its outputs are made by no tensor of their own, but by tied weights"
    if len(outputs) > 1:
        return "there are outputs of several sizes"
    [size] = outputs
    told = [entry for entry in entries if entry.samples is not None]
    counts: dict[str, list[float]] = {}
    for entry in told:
        if entry.class_counts is None:
            return "clients tell no class counts; if there are classes, give `class_counts`"
        if len(entry.class_counts) > size:
            found = f"{entry.client} has {len(entry.class_counts)} classes"
            return f"{found}, but there are {size} outputs; give `class_counts`"
        counts[entry.client] = [*entry.class_counts, *[0] * (size - len(entry.class_counts))]
    mean = [fmean(of_class) for of_class in zip(*counts.values(), strict=True)]
    return {entry.client: counts.get(entry.client, mean) for entry in entries}
