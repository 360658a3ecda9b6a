"""Clients of different widths: every layer may differ."""

import pytest
import torch

from fedmerge.api import match
from fedmerge.errors import ArchitectureError
from fedmerge.merging import MatchOptions
from tests.clients import loaded, permuted, widened
from tests.zoo import ZOO, run

# A net that ties embedding and decoder, or normalises over its units, can't be widened like this.
WIDENABLE = [name for name in ZOO if "tied" not in name and "layer norm" not in name]


@pytest.mark.parametrize("name", WIDENABLE)
def test_wider_copies_merge_back_to_the_function_at_the_widest_width(name: str) -> None:
    entry = ZOO[name]
    state = entry.fresh(seed=1).state_dict()
    clients = [state, *(permuted(widened(state, extra, extra), extra)[0] for extra in (1, 3))]
    merge = match(clients, MatchOptions(max_growth=1.0))
    assert all(group.width == max(group.client_widths) for group in merge.groups)
    expected = run(loaded(entry, state), entry.inputs())
    wide = run(loaded(entry, clients[2]), entry.inputs())
    assert torch.allclose(wide, expected, rtol=0, atol=1e-9)
    merged = run(loaded(entry, merge.state_dict()), entry.inputs())
    assert torch.allclose(merged, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [n for n in WIDENABLE if ZOO[n].exact_ensemble])
def test_nothing_matched_is_the_ensemble_of_different_widths_too(name: str) -> None:
    entry = ZOO[name]
    states = [widened(entry.fresh(seed=s).state_dict(), s, s) for s in range(3)]
    merge = match(states, MatchOptions(match_threshold=1.0, max_growth="none"))
    outputs = torch.stack([run(loaded(entry, state), entry.inputs()) for state in states])
    merged = run(loaded(entry, merge.state_dict()), entry.inputs())
    assert torch.allclose(merged, outputs.mean(0), rtol=0, atol=1e-9)


def test_an_element_wise_average_refuses_different_widths() -> None:
    state = ZOO["mlp"].fresh(seed=1).state_dict()
    with pytest.raises(ArchitectureError, match=r"'0.weight' is 10×6, expected 8×6 as in client-1"):
        match([state, widened(state, 2, 0)], MatchOptions(method="average"))
