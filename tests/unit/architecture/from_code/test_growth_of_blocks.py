"""Growth of nets of many like blocks is tried kind by kind, not block by block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import plan_model, probe_growth


class Blocks(nn.Module):
    """Blocks with attention whose heads can't grow and a hidden layer that can; counts runs."""

    runs = 0

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        Blocks.runs += 1
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def probed(depth: int) -> tuple[dict[str, bool], int]:
    """Return which groups can grow, and how often the net ran to tell."""
    torch.manual_seed(0)
    net, inputs = Blocks(depth).eval(), (torch.randn(2, 5, 8),)
    plan = plan_model(net, inputs)
    Blocks.runs = 0
    found = probe_growth(net, plan, inputs, rng=np.random.default_rng(0))
    return {group.name: group.can_grow for group in found.groups}, Blocks.runs


def test_every_block_is_told_what_it_can() -> None:
    grows, _ = probed(4)
    hidden = {name for name in grows if "linear1" in name}
    assert len(hidden) == 4
    assert {name for name, can_grow in grows.items() if can_grow} == hidden
    assert len(grows) > 2 * len(hidden)


def test_runs_do_not_grow_with_the_number_of_blocks() -> None:
    assert probed(3)[1] == probed(9)[1] < 30


class Odd(Blocks):
    """Blocks of which only the first is as wide as its code says."""

    def forward(self, x: Tensor) -> Tensor:
        Blocks.runs += 1
        for number, block in enumerate(self.blocks):
            assert isinstance(block, nn.TransformerEncoderLayer)
            hidden = block.linear1(x).relu()
            x = x + block.linear2(hidden if number else hidden.view(2, 5, 12))
        found: Tensor = self.head(x)
        return found


def test_a_block_unlike_the_others_is_told_apart() -> None:
    torch.manual_seed(0)
    net, inputs = Odd(4).eval(), (torch.randn(2, 5, 8),)
    found = probe_growth(net, plan_model(net, inputs), inputs, rng=np.random.default_rng(0))
    grows = {group.name: group.can_grow for group in found.groups if "linear1" in group.name}
    assert list(grows.values()) == [False, True, True, True]
