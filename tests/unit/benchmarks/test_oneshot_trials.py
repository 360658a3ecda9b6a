"""What was tried for one-shot merges: trials change what is fitted to, and nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks.oneshot_suites import DEVELOPMENT
from benchmarks.oneshot_trials import COPIES, SYNTHETIC, TRIALS, fitted_to, mixed, synthetic
from fedmerge.types.progress import silent
from fedmerge.workflow.clients import open_clients
from fedmerge.workflow.models import ModelCode
from fedmerge.workflow.oneshot import distill
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.oneshot import set_scene
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.oneshot.probes import NOISE_SHARE
from fedmerge.workflow.oneshot.scene import HELD_OUT, Scene
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.prepared import prepare
from tests import digits

CODE = ModelCode(digits.MODEL, {}, ((2, 1, 8, 8),))
NOISE = ProbeOptions("noise", count=100)
KEPT = int((1 - HELD_OUT) * 100)


def scene(folder: Path, way: AbstractContextManager[object]) -> Scene:
    """Let two untrained clients answer noise."""
    files = []
    for seed in range(2):
        torch.manual_seed(seed)
        state = dict(digits.build().state_dict())
        files.append(digits.save(state, folder / f"{seed}.pt"))
    options = MatchOptions()
    prepared = prepare(open_clients(files, options.reading), options, model=CODE)
    with way:
        return set_scene(Models(prepared, CODE, "cpu"), options, NOISE, silent)


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
    usual = scene(tmp_path, nullcontext())
    tried = scene(tmp_path, way)
    assert len(tried.probes) == count
    torch.testing.assert_close(tried.probes.inputs[0][:KEPT], usual.probes.inputs[0])
    torch.testing.assert_close(tried.held_out.inputs, usual.held_out.inputs)
    torch.testing.assert_close(tried.ensemble, usual.ensemble)


def test_trials_are_of_development_clients_and_leave_nothing_changed() -> None:
    usual = (Scene.on, distill.MIXTURES)
    during = set()
    for trial in TRIALS:
        assert set(trial.cases) <= set(DEVELOPMENT)
        for way in trial.ways.values():
            with way():
                during.add((Scene.on, distill.MIXTURES))
    assert len(during) == 1 + sum(len(trial.ways) - 1 for trial in TRIALS)
    assert (Scene.on, distill.MIXTURES) == usual
