"""Both ends of the size dial are exact: the ensemble, and never wider than the clients."""

import pytest
import torch

from fedmerge.api import match
from fedmerge.errors import UsageError
from fedmerge.merging import MatchOptions
from tests.clients import loaded
from tests.zoo import ZOO, Entry, run

APART = MatchOptions(match_threshold=1.0, max_growth="none")


def independent(entry: Entry, count: int = 3) -> list[dict[str, torch.Tensor]]:
    return [entry.fresh(seed=seed).state_dict() for seed in range(count)]


@pytest.mark.parametrize("name", [n for n, entry in ZOO.items() if entry.exact_ensemble])
def test_with_nothing_matched_the_output_is_the_mean_of_the_clients_outputs(name: str) -> None:
    entry = ZOO[name]
    states = independent(entry)
    merge = match(states, APART)
    assert all(group.match_rate == 0 for group in merge.groups)
    assert all(group.width == sum(group.client_widths) for group in merge.groups)
    outputs = torch.stack([run(loaded(entry, state), entry.inputs()) for state in states])
    merged = run(loaded(entry, merge.state_dict()), entry.inputs())
    assert torch.allclose(merged, outputs.mean(0), rtol=0, atol=1e-9)
    assert not torch.allclose(merged, outputs[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", list(ZOO))
def test_a_growth_of_one_never_widens_anything(name: str) -> None:
    entry = ZOO[name]
    states = independent(entry)
    merge = match(states, MatchOptions(max_growth=1.0))
    assert merge.growth == 1
    assert {k: t.shape for k, t in merge.state_dict().items()} == {
        k: t.shape for k, t in states[0].items()
    }
    free = match(states, MatchOptions(max_growth="none"))
    can_grow = any(group.can_grow for group in merge.plan.groups)
    assert (free.growth > 1) == can_grow


@pytest.mark.parametrize("budget", [1.3, 1.5, 2.5])
def test_the_size_budget_is_kept_and_used(budget: float) -> None:
    states = independent(ZOO["lenet"], 4)
    merge = match(states, MatchOptions(max_growth=budget))
    assert 1 < merge.growth <= budget
    assert merge.width_limit is not None
    assert all(g.width <= merge.width_limit * max(g.client_widths) for g in merge.groups)


def test_a_larger_budget_gives_a_larger_model() -> None:
    states = independent(ZOO["lenet"], 4)
    growths = [match(states, MatchOptions(max_growth=x)).growth for x in (1.0, 1.2, 2.0, 4.0)]
    assert growths == sorted(growths)
    assert growths[0] < growths[-1]


@pytest.mark.parametrize(
    "options",
    [
        {"sigma": 1.0},
        {"sigma": 1.0, "sigma0": 1.0, "match_threshold": 0.5},
        {"sigma": 1.0, "sigma0": 1.0, "max_growth": 1.5},
        {"preset": "paper", "match_threshold": 0.5},
        {"preset": "paper", "max_growth": 2.0},
        {"match_threshold": 0.0},
        {"match_threshold": 1.5},
        {"max_growth": 0.5},
        {"max_growth": "much"},
        {"gamma": 0.0},
        {"sweeps": -1},
        {"client_weight": {"a": 0.0}},
        {"dtype": "int8"},
    ],
)
def test_dials_that_make_no_sense_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"^`"):
        MatchOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-20, 1e20, 1e30])
def test_very_small_and_very_large_weights_are_matched_alike(scale: float) -> None:
    states = [
        {name: (scale * tensor).float() for name, tensor in state.items()}
        for state in independent(ZOO["mlp"])
    ]
    plain = [{name: (t / scale).float() for name, t in state.items()} for state in states]
    merged, expected = match(states), match(plain)
    assert [group.width for group in merged.groups] == [group.width for group in expected.groups]
