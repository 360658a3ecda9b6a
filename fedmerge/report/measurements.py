"""What a report takes models to be run for: feature maps, and measured quality."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedmerge.checkpoint import Checkpoint, expand_paths, open_checkpoint
from fedmerge.errors import CheckpointError, UsageError
from fedmerge.federated.run_folder import default_work_dir
from fedmerge.merging.comparison import Comparison, Row, compare
from fedmerge.merging.evaluations import EvaluationOptions, evaluate, open_judge
from fedmerge.merging.merge_record import MergeRecord
from fedmerge.merging.session import prepare
from fedmerge.merging.verification import open_recorded, prepare_recorded, replay_recorded
from fedmerge.probes.options import ProbeOptions
from fedmerge.report import FeatureMaps, Scores
from fedmerge.report.round_features import round_features
from fedmerge.report.sections import Wishes, measured_scores, short_names
from fedmerge.report.unit_features import feature_maps
from fedmerge.values.wording import Progress

if TYPE_CHECKING:
    from fedmerge.architecture.model_code import ModelCode


def features_of(merged: Path, record: MergeRecord, wishes: Wishes) -> tuple[FeatureMaps, ...]:
    """Return what matched units see in the wished image."""
    assert wishes.image is not None
    assert wishes.model is not None
    if record.is_trained:
        folder = wishes.work_dir or default_work_dir(merged)
        opened = open_checkpoint(merged)
        return round_features(opened, record, folder, wishes.model, wishes.image)
    clients = _recorded_clients(merged, record, wishes)
    merge = replay_recorded(record, prepare_recorded(record, clients))
    return feature_maps(open_checkpoint(merged), merge, wishes.model, wishes.image)


def measure(
    merged: Path, record: MergeRecord, wishes: Wishes, progress: Progress
) -> tuple[Scores, str, tuple[str, ...]]:
    """Return the scores on the wished data, how a sentence about them starts, and warnings."""
    name = Path(_code_and_data(wishes)[1]).name
    is_alone = record.is_trained and not all(source.file for source in record.sources)
    found = (
        _alone(merged, record, wishes, progress)
        if is_alone
        else _compared(merged, record, wishes, progress)
    )
    how = f"Measured on {found.samples:,} samples of {name},"
    return measured_scores(found, name), how, found.warnings


def _code_and_data(wishes: Wishes) -> tuple[ModelCode, str]:
    assert wishes.model is not None
    assert wishes.data is not None
    return wishes.model, wishes.data


def _alone(
    merged: Path,
    record: MergeRecord,
    wishes: Wishes,
    progress: Progress,
) -> Comparison:
    """Measure a merged file whose clients never were files, next to the baselines."""
    model, data = _code_and_data(wishes)
    files = [*map(Path, wishes.baselines), merged]
    scores = evaluate(files, data, model=model, options=wishes.evaluation, progress=progress)
    names = [*short_names(wishes.baselines), merged.name]
    widest = record.parameters / record.growth  # of a net as wide as the widest client
    rows = tuple(
        Row(
            "global" if path is merged else "baseline",
            name,
            score.evaluation,
            score.parameters,
            score.parameters / widest,
        )
        for path, name, score in zip(files, names, scores, strict=True)
    )
    return Comparison(rows, scores[-1].evaluation.samples, "", (), ())


def _compared(
    merged: Path,
    record: MergeRecord,
    wishes: Wishes,
    progress: Progress,
) -> Comparison:
    model, data = _code_and_data(wishes)
    clients = _recorded_clients(merged, record, wishes)
    judge = open_judge(data, wishes.evaluation or EvaluationOptions())
    session = prepare(
        [clients[source.sha256] for source in record.sources],
        replace(record.options, method="fedma", allow_global=tuple(wishes.allow_global)),
        plan=record.plan,
        model=model.fed_with(judge.shard),
        device=judge.options.device,
    )
    return compare(
        session,
        judge,
        model,
        merged=[merged],
        probes=ProbeOptions(),
        is_timed=False,
        is_matched=False,
        progress=progress,
    )


def _recorded_clients(
    merged: Path, record: MergeRecord, wishes: Wishes
) -> Mapping[str, Checkpoint]:
    """Return the clients by their hashes; they must be those of the record."""
    files = _files(record, merged, wishes.clients)
    clients = open_recorded(record, files, wishes.allow_global)
    for source in record.sources:
        if source.sha256 not in clients:
            raise CheckpointError(
                f"client {source.name} ({source.file}) is not among the files, or was changed "
                "since the merge",
                "give the clients' files after the merged one, as they were merged",
            )
    return clients


def _files(record: MergeRecord, merged: Path, given: Sequence[str | Path]) -> list[Path]:
    """Return the clients' files: those given, else those beside the merged one."""
    if given:
        return expand_paths(given)
    found = []
    for source in record.sources:
        place = merged.parent / source.file
        if not source.file or not os.path.exists(place):  # noqa: PTH110 (of any name)
            raise UsageError(
                f"client {source.name} ({source.file or 'no file'}) is not beside {merged.name}",
                "give the clients' files after the merged one",
            )
        found.append(place)
    return list(dict.fromkeys(found))  # several clients may be one file
