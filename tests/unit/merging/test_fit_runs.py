"""A fit in one run: as layer by layer from the inputs, and with runs that grow with the depth."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.api import match
from fedmerge.architecture import ModelCode
from fedmerge.merging import (
    ClientModules,
    Fitter,
    MatchOptions,
    Merge,
    fit,
    steady_weights,
    targets,
)
from fedmerge.private_torch import load_compiler
from fedmerge.probes import Call, ProbeOptions, Probes, names_of, noise_probes, run_heard
from fedmerge.user_code import StopRun
from tests.model_zoo import ZOO
from tests.unit.merging.test_fit import code, fresh

Array: TypeAlias = np.ndarray[Any, Any]

NETS = [
    *("mlp", "mlp with norms", "vgg", "resnet B", "densenet", "u-net", "gpt"),
    *("lstm, 2 layers, both directions", "gru, 2 layers", "tied language model"),
]
CLOSE = 1e-5  # of a tensor's largest number: sums in another order


def probes_for(name: str) -> tuple[Probes, Probes]:
    tokens = ZOO[name].tokens or None
    made = noise_probes(ZOO[name].inputs(), 300, mean=0.0, std=1.0, seed=0, tokens=tokens)
    return made.split(60, seed=0)


def fitter_of(merge: Merge, probes: Probes, held_out: Probes) -> Fitter:
    """Return what fits a merge's layers, as `fit_merges` makes it."""
    modules = ClientModules(merge.session)
    few = next(probes.batches(2, "cpu"))
    weights = targets.used_once(modules, merge, few, steady_weights(modules, few))
    wanted = [
        targets.collect_targets(modules, [merge], own, weights=weights, seed=0)[0]
        for own in (probes, held_out)
    ]
    return Fitter(modules, merge, probes, held_out, wanted)


def calls_from_the_inputs(
    fitter: Fitter, name: str, changed: Mapping[str, Array]
) -> dict[int, Call]:
    """Return a layer's call in every batch, of runs that end there."""
    arrays = {key: fitter.merge.read(key) for key in fitter.merge.plan.tensors}
    model = fitter.modules.merged({**arrays, **changed})
    found: dict[int, Call] = {}
    batches = [*fitter.probes.batches(128, "cpu"), *fitter.held_out.batches(128, "cpu")]
    for number, batch in enumerate(batches):

        def hear(call: Call, number: int = number) -> None:
            if fitter.modules.own_names[names_of(call)[0]] == name:
                found[number] = call
                raise StopRun

        run_heard(model, batch, hear)
    return found


def fitted_from_the_inputs(fitter: Fitter, *, is_updated: bool = True) -> dict[str, Array]:
    """Fit layer by layer, each on runs from the inputs through the layers fitted before."""
    arrays = {name: fitter.merge.read(name) for name in fitter.merge.plan.tensors}
    changed: dict[str, Array] = {}
    for name in fitter.targets[0]:
        calls = calls_from_the_inputs(fitter, name, changed if is_updated else {})
        changed |= fitter._fitted(name, calls, arrays)
    return changed


def apart(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    """Return by how much tensors differ at most, as a share of their largest numbers."""
    assert set(one) == set(other)
    return max(
        float(np.abs(one[name] - other[name]).max() / np.abs(other[name]).max().clip(1e-9))
        for name in one
    )


@pytest.mark.parametrize("name", NETS)
def test_one_run_fits_as_runs_from_the_inputs_do(name: str) -> None:
    states = [dict(fresh(name, seed).state_dict()) for seed in (1, 2)]
    options = MatchOptions(merge_units="mean", lead="none")
    merge = match(states, options, model=code(name), probes=ProbeOptions("noise", count=20))
    fitter = fitter_of(merge, *probes_for(name))
    slow = fitted_from_the_inputs(fitter)
    assert len(slow) > 2
    assert apart(fitter.fit(), slow) < CLOSE
    assert apart(fitted_from_the_inputs(fitter, is_updated=False), slow) > 1000 * CLOSE


class Keeper(nn.Module):
    """A net that keeps what it computed from one layer to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 7)
        self.three = nn.Linear(15, 3)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.one(x).relu()
        found = self.two(self.kept).relu()
        out: Tensor = self.three(torch.cat([self.kept, found], 1))
        return out


def test_batches_that_wait_for_each_other_keep_their_own_values() -> None:
    merge = merge_of_nets(Keeper, (2, 6))
    fitter = fitter_of(merge, *noise_of((2, 6)))
    assert apart(fitter.fit(), fitted_from_the_inputs(fitter)) < CLOSE


class Counted(nn.Linear):
    """A layer that counts how often any of its kind runs."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.runs += 1
        return super().forward(x)


def deep(depth: int) -> nn.Module:
    hidden = [part for _ in range(depth) for part in (Counted(8, 8), nn.ReLU())]
    return nn.Sequential(Counted(6, 8), nn.ReLU(), *hidden, nn.Linear(8, 3))


def merge_of_nets(build_net: Any, shape: tuple[int, ...]) -> Merge:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(dict(build_net().state_dict()))
    options = MatchOptions(merge_units="mean", lead="none", max_growth=1)
    net_code = ModelCode(build_net, {}, (shape,))
    return match(states, options, model=net_code, probes=ProbeOptions("noise", count=20))


def noise_of(shape: tuple[int, ...], count: int = 300) -> tuple[Probes, Probes]:
    made = noise_probes((torch.zeros(shape),), count, mean=0.0, std=1.0, seed=0, tokens=None)
    return made.split(count // 5, seed=0)


def runs_of_layers(depth: int) -> int:
    """Return how often layers run when a net of some depth is fitted."""
    merge = merge_of_nets(lambda: deep(depth), (2, 6))
    fitter = fitter_of(merge, *noise_of((2, 6)))
    Counted.runs = 0
    assert len(fitter.fit()) == 2 * (depth + 2)
    return Counted.runs


def test_a_fit_runs_as_many_layers_as_there_are() -> None:
    batches = 3  # 240 and 60 probes
    assert [runs_of_layers(depth) for depth in (3, 6, 12)] == [batches * d for d in (4, 7, 13)]


def test_probes_that_take_too_much_memory_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = merge_of_nets(lambda: deep(3), (2, 6))
    modules = ClientModules(merge.session)
    probes = noise_of((2, 6))
    assert fit._held_at_once(modules, merge, *probes) == probes
    monkeypatch.setattr(fit, "MOST_HELD", 100 * 2 * 8 * 4)  # two layers' outputs of 100 samples
    kept, held_out = fit._held_at_once(modules, merge, *probes)
    assert 40 <= len(kept) <= 240
    assert 16 <= len(held_out) < 60
    assert torch.equal(kept.inputs[0], probes[0].inputs[0][: len(kept)])


def test_a_failure_of_the_fit_leaves_no_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = merge_of_nets(lambda: deep(3), (2, 6))
    fitter = fitter_of(merge, *noise_of((2, 6)))
    before = threading.active_count()

    def fail(*_: Any) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(Fitter, "_fitted", fail)
    with pytest.raises(KeyError, match="a bug of ours"):
        fitter.fit()
    assert threading.active_count() == before


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 60), nn.ReLU(), nn.Linear(60, 3))


def test_a_layer_that_reads_more_than_there_are_rows_is_fitted_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitter = fitter_of(merge_of_nets(wide, (2, 6)), *noise_of((2, 6), 50))
    told: list[int] = []
    plain = vars(fit)["few_rows"]

    def counted(inputs: Tensor, targets: Tensor, **options: bool) -> Any:
        told.append(len(inputs))
        return plain(inputs, targets, **options)

    monkeypatch.setattr(fit, "few_rows", counted)
    by_rows = fitter.fit()
    assert told == [40, 10]
    for name in ("_are_few", "_only_judge"):
        monkeypatch.setattr(fit, name, lambda call, rows: False)
    by_moments = fitter.fit()
    assert told == [40, 10]
    assert apart(by_rows, by_moments) < 1e-3


def test_a_fit_leaves_the_compiler_and_the_output_as_they_were() -> None:
    load_compiler()
    fitter = fitter_of(merge_of_nets(lambda: deep(3), (2, 6)), *noise_of((2, 6)))
    before = sys.stdout
    fitter.fit()
    assert sys.stdout is before
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert len(compiled) == 1
