"""What was tried for one-shot merges: trials change what is fitted to, and nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks.oneshot_suites import DEVELOPMENT
from benchmarks.oneshot_trials import COPIES, SYNTHETIC, TRIALS, fitted_to, mixed, synthetic
from fedmerge.architecture import ModelCode
from fedmerge.merging import (
    HELD_OUT,
    Answers,
    MatchOptions,
    by_probes,
    distillation,
    open_clients,
    prepare,
    probe_clients,
)
from fedmerge.probes import NOISE_SHARE, ProbeOptions
from fedmerge.values import silent
from tests import digits

CODE = ModelCode(digits.MODEL, {}, ((2, 1, 8, 8),))
NOISE = ProbeOptions("noise", count=100)
KEPT = int((1 - HELD_OUT) * 100)


def asked(folder: Path, way: AbstractContextManager[object]) -> Answers:
    """Let two untrained clients answer noise."""
    files = []
    for seed in range(2):
        torch.manual_seed(seed)
        state = dict(digits.build().state_dict())
        files.append(digits.save(state, folder / f"{seed}.pt"))
    options = MatchOptions()
    session = prepare(open_clients(files, options.reading), options, model=CODE)
    with way:
        return probe_clients(session, NOISE, silent)


@pytest.mark.parametrize(
    ("way", "count"),
    [
        (nullcontext(), KEPT),
        (fitted_to(mixed), KEPT * (1 + COPIES)),
        (fitted_to(synthetic), KEPT + SYNTHETIC * (1 + NOISE_SHARE)),
    ],
    ids=["as it is", "mixed", "synthetic"],
)
def test_merges_are_fitted_to_more_and_judged_by_the_same(
    way: AbstractContextManager[object], count: float, tmp_path: Path
) -> None:
    usual = asked(tmp_path, nullcontext())
    tried = asked(tmp_path, way)
    assert len(tried.probes) == count
    torch.testing.assert_close(tried.probes.inputs[0][:KEPT], usual.probes.inputs[0])
    torch.testing.assert_close(tried.held_out.inputs, usual.held_out.inputs)
    torch.testing.assert_close(tried.ensemble, usual.ensemble)


def _changeable() -> tuple[object, int]:
    return vars(by_probes)["collect_answers"], distillation.MIXTURES


def test_trials_are_of_development_clients_and_leave_nothing_changed() -> None:
    usual = _changeable()
    during = set()
    for trial in TRIALS:
        assert set(trial.cases) <= set(DEVELOPMENT)
        for way in trial.ways.values():
            with way():
                during.add(_changeable())
    assert len(during) == 1 + sum(len(trial.ways) - 1 for trial in TRIALS)
    assert _changeable() == usual
