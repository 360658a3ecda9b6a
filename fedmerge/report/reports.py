"""`report`: one page about a merge, from its record and, where they are given, its clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedmerge import __version__
from fedmerge.checkpoint import check_targets, read_record, write_text
from fedmerge.errors import FedmergeError, UsageError
from fedmerge.merging.merge_record import MergeRecord, consistent_record
from fedmerge.report import Fact, FeatureMaps, Report, Scores, SourceView, check_drawing, render
from fedmerge.report.plan_figure import has_convolution, plan_picture
from fedmerge.report.sections import (
    ACCURACY,
    Wishes,
    frontier_points,
    group_views,
    last_metrics,
    method_of,
    predicted_scores,
    rounds_view,
    run_scores,
    short_names,
    verdict,
)
from fedmerge.values.option_fields import checked
from fedmerge.values.wording import Progress, silent

if TYPE_CHECKING:
    from fedmerge.architecture.model_code import Model, ModelCode
    from fedmerge.merging.evaluations import EvaluationOptions
    from fedmerge.report.unit_features import ImageOptions


SUFFIXES = (".html", ".htm")
NEVER_RUN = "it was run on no data and on no probes"
UNSEEN = "What matched units see: `fedmerge report … --model CODE --image FILE` shows it."
PREDICTED = ("the merge may be worse than", "the merge is predicted to be worse than")
_SECTIONS = ("scores", "rounds", "frontier", "groups", "features", "warnings")


@dataclass(frozen=True)
class ReportFile:
    """A report that was written: where, how large, and what is in it."""

    output: Path
    size: int  # bytes
    verdict: str
    sections: tuple[str, ...]  # beside sources and plan, which every report has

    def to_json(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return {
            "output": str(self.output),
            "bytes": self.size,
            "verdict": self.verdict,
            "sections": list(self.sections),
        }


@checked
def write_report(
    merged: str | Path,
    output: str | Path,
    clients: Sequence[str | Path] = (),
    *,
    model: Model | None = None,
    image: ImageOptions | None = None,
    data: str | Path | None = None,
    evaluation: EvaluationOptions | None = None,
    baselines: Sequence[str | Path] = (),
    work_dir: str | Path | None = None,
    allow_global: Sequence[str] = (),
    force: bool = False,
    progress: Progress = silent,
) -> ReportFile:
    """Write a page about a merged file: all that its record tells, and what else is asked for.

    With the model's code, `data` measures the merge next to its clients, and `image` shows what
    matched units see. The clients are looked for beside the merged file unless they are given.
    `baselines` are other files that `retrain` wrote; of a run in rounds, `work_dir` has the
    clients' layers (the merged file's name + .work unless it was another). `allow_global` are
    classes that the clients' files may name: a record never says so.
    """
    merged, output = Path(merged), Path(output)
    check_report_output(output, inputs=[merged, *clients, *baselines], force=force)
    wishes = Wishes(
        clients,
        None if model is None else _model_code(model),
        image,
        None if data is None else str(data),
        evaluation,
        baselines,
        None if work_dir is None else Path(work_dir),
        allow_global,
    )
    report = make_report(merged, wishes, progress=progress)
    page = render(report, progress=progress)
    write_text(output, page, force=force)
    sections = tuple(name for name in _SECTIONS if getattr(report, name))
    return ReportFile(output, len(page.encode()), report.verdict, sections)


def _model_code(model: Model) -> ModelCode:
    from fedmerge.architecture.model_code import as_model_code  # records alone do without

    return as_model_code(model)


def check_report_output(output: Path, *, inputs: Sequence[str | Path], force: bool) -> None:
    """Refuse a page that can't be drawn or written, before any work."""
    if output.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{output}: a report is a page, let its name end in .html")
    check_drawing()
    check_targets([output], inputs=inputs, force=force)


def make_report(merged: Path, wishes: Wishes, *, progress: Progress = silent) -> Report:
    """Return what the page about a merged file tells."""
    _check_wishes(wishes)
    value = read_record(merged)
    record = consistent_record(value, source=merged.name)
    runs = [_run_record(Path(path)) for path in wishes.baselines]
    if runs and not record.is_trained:
        raise UsageError(
            f"`baseline`: {merged.name} was merged in one shot, so it has no rounds to compare"
        )
    names = short_names(wishes.baselines, taken=[method_of(value)] if runs else ())
    report = _from_record(merged, value, record, dict(zip(names, runs, strict=True)))
    return _with_runs(report, merged, record, wishes, progress)


def _check_wishes(wishes: Wishes) -> None:
    for name, wish in (("`image`", wishes.image), ("`data`", wishes.data)):
        if wish is not None and wishes.model is None:
            raise UsageError(f"{name}: models have to be run for it", "give their code: `model`")


def _run_record(path: Path) -> dict[str, Any]:
    record = read_record(path)
    consistent_record(record, source=path.name)
    if "retrain" not in record:
        raise UsageError(
            f"`baseline={path}`: was merged in one shot, so it has no rounds",
            "baselines are files that `fedmerge retrain` wrote",
        )
    return record


def _from_record(
    merged: Path, value: Mapping[str, Any], record: MergeRecord, others: Mapping[str, Any]
) -> Report:
    """Return the page without what takes a run of models."""
    rounds = rounds_view(value, others) if record.is_trained else None
    scores: list[Scores] = []
    how = NEVER_RUN
    if rounds is not None:
        last = {curve.name: last_metrics(curve) for curve in rounds.curves}
        found = run_scores(last)
        scores += [] if found is None else [found]
        count = len(rounds.labels)
        how = f"After {count} round{'s' * (count != 1)} of {method_of(value)}, the global model"
        how = f"{how} {_reaches(found)}" if found else "no data to evaluate on were given"
    elif value.get("quality"):
        quality = value["quality"]
        scores.append(predicted_scores(quality))
        how = f"Predicted from {quality['samples']} held-out probes ({quality['probes']}), the "
        how += "merge decides as the clients' ensemble does in"
    found_sizes = value.get("frontier")
    frontier = frontier_points(found_sizes, record.parameters) if found_sizes else ()
    entries = record.groups
    return Report(
        title=f"{merged.name}: {len(record.sources)} clients of "
        f"{record.plan.architecture or 'one plan'}",
        verdict=verdict(scores[0] if scores else None, how, _size(record)),
        version=__version__,
        facts=tuple(_facts(value, record)),
        sources=tuple(_sources(value)),
        options=tuple(_options(value)),
        plan=plan_picture(
            record.plan,
            {entry.name: entry.client_widths for entry in entries},
            {entry.name: entry.width for entry in entries},
        ),
        groups=group_views(record),
        clients=len(record.sources),
        scores=tuple(scores),
        frontier=frontier,
        rounds=rounds,
        warnings=tuple(map(str, value["warnings"])),
        notes=tuple(_notes(record, scores, frontier)),
    )


def _reaches(scores: Scores) -> str:
    if scores.metric == ACCURACY:
        return "reaches an accuracy of"
    return f"has a {scores.metric} of"


def _size(record: MergeRecord) -> str:
    return (
        f"it has {record.parameters:,} parameters, {record.growth:.2f} × those of a net as wide "
        "as the widest client"
    )


def _facts(value: Mapping[str, Any], record: MergeRecord) -> list[Fact]:
    method = method_of(value) if record.is_trained else str(record.options.method)
    facts = [
        Fact("method", method),
        Fact("clients", str(len(record.sources))),
        Fact("groups", str(len(record.groups))),
        Fact("parameters", f"{record.parameters:,}"),
        Fact("growth", f"{record.growth:.2f} ×"),
    ]
    if record.is_trained:
        moved = sum(r["bytes_up"] + r["bytes_down"] for r in value["retrain"]["rounds"]) / 1e6
        facts.append(Fact("exchanged", f"{moved:,.2f} MB"))
    return facts


def _sources(value: Mapping[str, Any]) -> list[SourceView]:
    shards = value.get("retrain", {}).get("shards", ())
    samples = {shard["client"]: shard["samples"] for shard in shards}
    return [
        SourceView(s["name"], s["file"], int(s["size"]), s["sha256"], samples.get(s["name"]))
        for s in value["sources"]
    ]


def _options(value: Mapping[str, Any]) -> list[Fact]:
    """Return every option that has a value, those of rounds over those of the match."""
    options = {**value["options"], **value.get("retrain", {}).get("options", {})}
    return [
        Fact(name.replace("_", "-"), v if isinstance(v, str) else json.dumps(v, ensure_ascii=False))
        for name, v in sorted(options.items())
        if v is not None and v != [] and v != {}
    ]


def _notes(record: MergeRecord, scores: Sequence[Scores], frontier: Sequence[object]) -> list[str]:
    """Say what is not on the page, and how it could be."""
    notes = []
    if not scores:
        ask = "`fedmerge report … --model CODE --data FILE` measures it"
        notes.append(f"How good the model is: {NEVER_RUN}; {ask}.")
    if not record.is_trained and not frontier:
        notes.append(
            "What other sizes would give: `fedmerge match … --model CODE --frontier` tries them."
        )
    if has_convolution(record.plan) and record.options.method == "fedma":
        notes.append(UNSEEN)
    return notes


def _with_features(
    report: Report, image: ImageOptions, look: Callable[[], tuple[FeatureMaps, ...]]
) -> Report:
    """Return the page with feature maps; where nobody asked for them, they may fail to be."""
    notes = tuple(note for note in report.notes if note != UNSEEN)
    try:
        return replace(report, features=look(), notes=notes)
    except FedmergeError as error:
        if not image.is_optional:
            raise
        why = f"What matched units see in {image.label}: {error.problem}."
        return replace(report, notes=(*notes, why) if UNSEEN in report.notes else notes)


def _with_runs(
    report: Report, merged: Path, record: MergeRecord, wishes: Wishes, progress: Progress
) -> Report:
    """Return the page with what models do on an image and on data, as far as that is asked for."""
    if wishes.image is None and wishes.data is None:
        return report
    from fedmerge.report.measurements import features_of, measure  # records alone do without

    if wishes.image is not None:
        report = _with_features(report, wishes.image, lambda: features_of(merged, record, wishes))
    if wishes.data is None:
        return report
    scores, how, warnings = measure(merged, record, wishes, progress)
    return replace(
        report,
        scores=(scores, *report.scores),
        verdict=verdict(scores, f"{how} the merge {_reaches(scores)}", _size(record)),
        warnings=(*(w for w in report.warnings if not w.startswith(PREDICTED)), *warnings),
        notes=tuple(note for note in report.notes if NEVER_RUN not in note),
    )
