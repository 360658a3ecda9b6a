"""Corrections on probes: copies stay what they are, other merges get their owners' moments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedmerge.types.progress import silent
from fedmerge.workflow.clients import open_clients
from fedmerge.workflow.merge import Merge
from fedmerge.workflow.oneshot import fit
from fedmerge.workflow.oneshot.correct import Corrector
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.oneshot import set_scene
from fedmerge.workflow.oneshot.options import ProbeOptions
from fedmerge.workflow.oneshot.scene import Scene
from fedmerge.workflow.oneshot.spread import Spread, SpreadSum, owners_spreads
from fedmerge.workflow.oneshot.targets import used_once
from fedmerge.workflow.options import MatchOptions
from fedmerge.workflow.prepared import prepare
from tests.unit.workflow.oneshot.test_fit import (
    SAME,
    State,
    code,
    copies,
    fresh,
    loaded,
    merged,
    outputs,
)

CORRECTED: dict[str, Any] = {
    "correct": "moments",
    "batch_norm": "reestimate",
    "merge_units": "mean",
    "lead": "none",
}
CLOSE = 1e-4  # relative: single precision, over all probes


def scene_of(states: list[State], name: str, **options: Any) -> Scene:
    given = MatchOptions(**options)
    prepared = prepare(open_clients(states, given.reading), given, model=code(name))
    probes = ProbeOptions("noise", count=60)
    return set_scene(Models(prepared, prepared.model, "cpu"), given, probes, silent)


def corrector(scene: Scene, merge: Merge) -> Corrector:
    few = next(scene.probes.batches(2, "cpu"))
    weights = used_once(scene.models, merge, few, scene._weights)
    return Corrector(scene.models, merge, scene.probes, weights, seed=0)


def spreads_in(scene: Scene, merge: Merge, name: str) -> Spread:
    """Return how the outputs of a merge's layer vary on the probes, layer and all before it."""
    arrays = {tensor: merge.read(tensor) for tensor in merge.plan.tensors}
    model, total = scene.models.merged(arrays), SpreadSum()
    own = next(m for m, n in scene.models.own_names.items() if n == name)
    layer = model.get_submodule(own.rpartition(".")[0])
    layer.register_forward_hook(lambda _, __, result: total.add(_rows(result)))
    for batch in scene.probes.batches(16, "cpu"):
        model(*batch)
    return total.result()


def _rows(values: torch.Tensor) -> torch.Tensor:
    return values.movedim(1, -1).reshape(-1, values.shape[1])


@pytest.mark.parametrize("name", ["mlp", "vgg", "lstm, 2 layers", "gru, 2 layers", "shared layer"])
def test_copies_are_merged_to_the_same_function(name: str) -> None:
    model = fresh(name, 0)
    options = {**CORRECTED, "batch_norm": "mean"}
    merge = merged(copies(model, name), name, max_growth=1, **options)
    wanted = outputs(model, name)
    found = outputs(loaded(name, merge.state_dict()), name)
    assert (found - wanted).abs().max() <= 10 * SAME * wanted.abs().max()


def test_units_get_their_owners_means_and_variances_front_to_back() -> None:
    states = [dict(fresh("lenet", seed).state_dict()) for seed in range(3)]
    scene = scene_of(states, "lenet", max_growth=1, **CORRECTED)
    matched = scene.matched(1.0, silent)
    (corrected,) = scene.ways(matched, None, silent)
    weights = sorted(corrector(scene, matched).weights)
    wanted = owners_spreads(scene.models, matched, scene.probes, weights=weights)
    hidden = [name for name in wanted if matched.plan.tensors[name].produces]
    assert len(hidden) >= 3
    for name in hidden:
        target = wanted[name]["outputs"]
        own, plain = (spreads_in(scene, m, name) for m in (corrected.merge, matched))
        np.testing.assert_allclose(own.variance, target.variance, rtol=CLOSE)
        np.testing.assert_allclose(own.mean, target.mean, atol=CLOSE * target.variance.max() ** 0.5)
        assert not np.allclose(plain.variance, target.variance, rtol=0.1)
    last = next(name for name in wanted if name not in hidden)
    np.testing.assert_array_equal(corrected.merge.read(last), matched.read(last))


def test_batch_norms_get_the_statistics_of_what_they_read() -> None:
    name = "mlp with norms"
    states = [dict(fresh(name, seed).state_dict()) for seed in range(3)]
    scene = scene_of(states, name, max_growth=1, **{**CORRECTED, "correct": "none"})
    matched = scene.matched(1.0, silent)
    (found,) = scene.ways(matched, None, silent)
    norms = matched.plan.norms
    assert set(found.merge.fitted) == {n for norm in norms for n in (norm.mean, norm.variance)}
    for norm in norms:
        own = spreads_in(scene, found.merge, norm.producer)
        np.testing.assert_allclose(found.merge.read(norm.mean), own.mean, atol=1e-5)
        np.testing.assert_allclose(found.merge.read(norm.variance), own.variance, rtol=CLOSE)
        assert not np.allclose(matched.read(norm.variance), own.variance, rtol=0.1)


@pytest.mark.parametrize("name", ["lenet", "gru, 2 layers"])
def test_units_of_the_lead_keep_their_weights_to_the_bit(name: str) -> None:
    states = [dict(fresh(name, seed).state_dict()) for seed in range(2)]
    scene = scene_of(states, name, max_growth=1.5, **CORRECTED)
    matched = scene.matched(1.5, silent)
    (led,) = scene.ways(matched, 0, silent)
    plain = replace(led.merge, fitted={}, options=replace(led.merge.options, correct="none"))
    changed = 0
    for tensor, planned in matched.plan.tensors.items():
        if tensor in led.merge.fitted and planned.produces:
            kept = corrector(scene, led.merge)._is_kept(planned)
            before, after = plain.read(tensor), led.merge.read(tensor)
            np.testing.assert_array_equal(after[kept], before[kept])
            changed += int((after[~kept] != before[~kept]).sum())
    assert changed > 0


def test_a_layer_that_reads_too_much_to_be_fitted_is_corrected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = [dict(fresh("lenet", seed).state_dict()) for seed in range(3)]
    monkeypatch.setattr(fit, "MOST_INPUTS", 0)
    options = {**CORRECTED, "merge_units": "fit", "symmetries": False}  # what is alike is held too
    fitted = merged(states, "lenet", max_growth=1, **options)
    mean = merged(states, "lenet", max_growth=1, **CORRECTED, symmetries=False)
    assert set(fitted.fitted) == set(mean.fitted) != set()
    for tensor, values in mean.fitted.items():
        np.testing.assert_array_equal(fitted.read(tensor), values)
    plain = merged(states, "lenet", max_growth=1, **{**options, "correct": "none"})
    assert plain.fitted == {}
