"""Merge fine-tunes of a base model that is given: its weights plus what clients changed of them."""

from __future__ import annotations

from collections.abc import Iterator
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
)
from fedmerge.merging.options import needs_probes
from fedmerge.merging.result import Merge, average
from fedmerge.merging.session import Session
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.wording import Progress

WHOLE = 1.0  # scale of the clients' mean change where nothing tells more
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # that are tried on probes


def base_and_change(session: Session, scale: float | None = None) -> Merge:
    """Return the base plus the clients' mean change of it, scaled as the user says, or whole."""
    scale = session.options.scale if scale is None else scale
    options = replace(session.options, scale=WHOLE if scale is None else scale)
    return average(replace(session, options=options))


def merge_fine_tunes(session: Session, probing: ProbeOptions, progress: Progress) -> Merge:
    """Return the base and change, at the scale or fitted as comes nearest to the ensemble.

    Where the user asks for no probes and the model can't be run, the change is added as it is.
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
    candidates = list(_candidates(answers, progress))
    chosen = best_candidate(candidates, answers)
    quality = quality_of(chosen, candidates, answers)
    return replace(
        chosen.merge,
        quality=quality,
        probes=probing.to_json(),
        warnings=(*chosen.merge.warnings, *quality.warnings()),
    )


def _candidates(answers: Answers, progress: Progress) -> Iterator[Candidate]:
    """Yield the ways to merge that the user left open, the plainest one first."""
    session, options = answers.session, answers.session.options
    if options.merge_units != "fit-in-place":
        scales = SCALES if options.scale is None else (options.scale,)
        for scale in sorted(scales, key=lambda scale: abs(scale - WHOLE)):
            label = f"base + {scale:g} × mean change"
            yield candidate_of(answers, label, base_and_change(session, scale))
    if options.scale is None and options.merge_units in (None, "fit-in-place"):
        yield fit_in_place(answers, progress)
