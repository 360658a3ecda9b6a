"""What is said of merges that are likely bad, and what is required of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedmerge.api import match
from fedmerge.errors import ArchitectureError, FedmergeError, UsageError
from fedmerge.merging import Merge
from tests.digits import client, images

LIKELY = "the merge is likely worse than its clients, and may be useless: "


def deep(hidden: int) -> nn.Sequential:
    """Return a perceptron with so many hidden layers."""
    layers = [m for _ in range(hidden) for m in (nn.Linear(24, 24), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(24, 10))


def drawn(hidden: int, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return dict(deep(hidden).state_dict())


def shuffled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same net with the units of its first hidden layer in another order."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    moved = {"0.weight": state["0.weight"][order], "0.bias": state["0.bias"][order]}
    return {**state, **moved, "2.weight": state["2.weight"][:, order]}


def doubts(merge: Merge) -> list[str]:
    return [warning for warning in merge.warnings if warning.startswith(LIKELY)]


def test_a_deep_net_whose_units_hardly_match_is_likely_useless() -> None:
    merge = match([drawn(3, 1), drawn(3, 2)])
    assert merge.alike_share is not None
    assert merge.alike_share < 0.25
    (said,) = doubts(merge)
    assert said.startswith(f"{LIKELY}{100 * merge.alike_share:.0f} % of the units in 3 hidden")
    assert "`model`" in said


def test_nothing_is_said_of_copies_and_of_shallow_nets() -> None:
    copies = match([drawn(3, 1), shuffled(drawn(3, 1))])
    assert copies.alike_share == 1
    assert not doubts(copies)
    shallow = match([drawn(2, 1), drawn(2, 2)])
    assert shallow.alike_share is not None
    assert shallow.alike_share < 0.25
    assert not doubts(shallow)


def test_a_merge_of_which_nothing_is_known_is_not_known_to_be_better(tmp_path: Path) -> None:
    output = tmp_path / "g.pt"
    with pytest.raises(FedmergeError, match="nothing tells how good it is") as raised:
        match([client(1), client(2)], output=output, require="better")
    assert raised.value.exit_code == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="`require` is 'best', expected better"):
        match([client(1), client(2)], require="best")  # type: ignore[arg-type]


class Small(nn.Module):
    """A convolution for 8×8 images, and for no others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 6, 3), nn.Linear(6 * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.conv(x).relu().flatten(1))
        return found


def test_real_inputs_say_how_large_the_models_input_is() -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(Small().state_dict())
    merge = match(states, model=Small, probe_data=images()[0][:60], effort="fast")
    assert merge.quality is not None
    assert merge.quality.source == "data"
    with pytest.raises(ArchitectureError, match="runs on no input of shape"):
        match(states, model=Small, effort="fast")
