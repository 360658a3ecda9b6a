"""Merge fine-tunes of a base model that is given: its weights plus what clients changed of them."""

from __future__ import annotations

from dataclasses import replace

from fedmerge.errors import FedmergeError, UsageError
from fedmerge.merging.answers import Answers
from fedmerge.merging.by_probes import probe_clients
from fedmerge.merging.candidates import (
    Candidate,
    best_candidate,
    candidate_of,
    fit_in_place,
    quality_of,
    works,
)
from fedmerge.merging.options import needs_probes
from fedmerge.merging.result import Merge, average
from fedmerge.merging.session import Session
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.wording import Progress

WHOLE = 1.0  # scale of the clients' mean change where nothing tells more
SCALES = (0.25, 0.5, 0.75, 1.25)  # that are tried where the whole change does not work


def base_and_change(session: Session, scale: float | None = None) -> Merge:
    """Return the base plus the clients' mean change of it, scaled as the user says, or whole."""
    scale = session.options.scale if scale is None else scale
    options = replace(session.options, scale=WHOLE if scale is None else scale)
    return average(replace(session, options=options))


def merge_fine_tunes(session: Session, probing: ProbeOptions, progress: Progress) -> Merge:
    """Return the base and the mean change, and where that does not work what does.

    That is another scale, or the average fitted on probes: what is nearest to the ensemble. Where
    the user asks for no probes and the model can't be run, the change is added as it is.
    """
    try:
        answers = probe_clients(session, probing, progress)
    except UsageError:
        raise
    except FedmergeError as error:
        if probing.asked_for or needs_probes(session.options):
            raise
        note = f"the mean change is added as it is, as no probes run: {error.brief}"
        merge = base_and_change(session)
        return replace(merge, warnings=(*merge.warnings, note))
    candidates = _candidates(answers, progress)
    chosen = best_candidate(candidates, answers)
    quality = quality_of(chosen, candidates, answers)
    return replace(
        chosen.merge,
        quality=quality,
        probes=probing.to_json(),
        warnings=(*chosen.merge.warnings, *quality.warnings()),
    )


def _candidates(answers: Answers, progress: Progress) -> list[Candidate]:
    """Return the ways to merge that the user left open: where the mean change works, it alone.

    As an average of clients that share their start, it may be better than their ensemble. Being
    less alike says nothing against it then.
    """
    options = answers.session.options
    if options.merge_units == "fit-in-place":
        return [fit_in_place(answers, progress)]
    scale = WHOLE if options.scale is None else options.scale
    plain = _changed(answers, scale)
    is_open = options.scale is None and options.merge_units is None
    if not is_open or works(plain, answers, in_place=True):
        return [plain]
    return [
        plain,
        *(_changed(answers, other) for other in SCALES),
        fit_in_place(answers, progress),
    ]


def _changed(answers: Answers, scale: float) -> Candidate:
    merge = base_and_change(answers.session, scale)
    return candidate_of(answers, f"base + {scale:g} × mean change", merge)
