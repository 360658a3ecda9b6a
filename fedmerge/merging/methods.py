"""The methods of a one-shot merge: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from fedmerge.errors import UsageError
from fedmerge.merging.by_weights import merge_by_weights, with_doubt
from fedmerge.merging.options import needs_probes
from fedmerge.merging.result import Merge, average
from fedmerge.merging.session import Session
from fedmerge.probes.options import ProbeOptions
from fedmerge.values.wording import Progress

if TYPE_CHECKING:
    pass

Method: TypeAlias = Callable[[Session, ProbeOptions, Progress], Merge]


def merge_session(
    session: Session, probing: ProbeOptions, progress: Progress, *, as_program: bool = False
) -> Merge:
    """Merge a session's clients by the method of its options; an ensemble also as a program."""
    if as_program:
        from fedmerge.merging.ensemble_program import branched  # most do without

        is_probed(session, probing)
        return branched(session)
    return METHODS[session.options.method](session, probing, progress)


def matched_average(session: Session, probing: ProbeOptions, progress: Progress) -> Merge:
    """Match units, by what clients do where they can be run, and average what matches."""
    if session.base is not None:
        from fedmerge.merging.fine_tunes import base_and_change, merge_fine_tunes

        if is_probed(session, probing):
            return merge_fine_tunes(session, probing, progress)
        return base_and_change(session)
    if not is_probed(session, probing):
        if session.model is not None:
            session.model.forget()  # which takes as much memory as a client
        return with_doubt(merge_by_weights(session, progress))
    from fedmerge.merging.by_probes import merge_by_probes  # files alone do without

    return merge_by_probes(session, probing, progress)


def element_wise_average(session: Session, probing: ProbeOptions, progress: Progress) -> Merge:
    """Average element by element; nothing is matched, and nothing run."""
    is_probed(session, probing)  # which refuses wishes that it does not fulfil
    if session.base is None:
        return average(session)
    from fedmerge.merging.fine_tunes import base_and_change  # most averages do without

    return base_and_change(session)


def side_by_side(session: Session, probing: ProbeOptions, progress: Progress) -> Merge:
    """Keep all units apart: one net that computes every client's hidden units."""
    is_probed(session, probing)
    return merge_by_weights(session, progress)


def transported_average(session: Session, probing: ProbeOptions, progress: Progress) -> Merge:
    """Couple units softly by their weights, transport them to one client's, and average."""
    from fedmerge.merging.transport import merge_by_transport  # most merges do without

    is_probed(session, probing)
    return merge_by_transport(session, progress)


METHODS: Mapping[str, Method] = {
    "fedma": matched_average,
    "ot": transported_average,
    "average": element_wise_average,
    "ensemble": side_by_side,
}


def is_probed(session: Session, probing: ProbeOptions, *wishes: str) -> bool:
    """Return whether the clients are run: they can be, and no fixed prior is asked for.

    Wishes are what else only clients that are run can fulfil.
    """
    options = session.options
    wished = [*wishes, *needs_probes(options), *probing.asked_for]
    if wished and not session.can_run:
        raise UsageError(
            f"{wished[0]}: the clients have to be run for it",
            "give the model's code with `model`, or a .pt2 file",
        )
    is_fixed = options.method != "fedma" or options.preset is not None or options.sigma is not None
    is_off = probing.source == "none" or is_fixed
    if wished and is_off:
        raise UsageError(
            f"{wished[0]}: the clients are not run with `probe=none`, a fixed prior, "
            "or a `method` other than fedma"
        )
    return session.can_run and not is_off and bool(session.plan.groups)


def average_to_beat(session: Session) -> Merge:
    """Return the element-wise average that a match with these options has to beat.

    Clients and classes count as they do in the match; what else it does to units is its own.
    """
    nothing: dict[str, Any] = dict.fromkeys(_OF_THE_MATCH)
    return average(session.with_options(method="average", **nothing))


_OF_THE_MATCH = (
    *("preset", "match_threshold", "max_growth", "max_params", "gamma", "sigma", "sigma0"),
    *("merge_units", "lead", "regularisation"),
)
