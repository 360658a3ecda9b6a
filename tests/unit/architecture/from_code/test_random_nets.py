"""Random networks are never planned wrongly (thousands: `python -m benchmarks.fuzz_graph`)."""

import numpy as np
import pytest

from fedmerge.architecture.from_code import plan_model, verify_plan
from tests.random_nets import random_net


@pytest.mark.parametrize("first", range(0, 160, 10))
def test_random_nets_are_planned_soundly(first: int) -> None:
    for seed in range(first, first + 10):
        net, inputs = random_net(seed)
        plan = plan_model(net, inputs)
        assert not [note for note in plan.notes if "no rule" in note]
        verify_plan(net, plan, inputs, rng=np.random.default_rng(seed))


def test_most_random_nets_have_groups() -> None:
    counts = [len(plan_model(*random_net(seed)).groups) for seed in range(60)]
    assert sum(count > 0 for count in counts) >= 50
    assert sum(counts) >= 120
