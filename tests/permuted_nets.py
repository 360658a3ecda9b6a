"""A small net and copies of it whose hidden units stand in another order."""

from collections.abc import Mapping

import torch
from torch import nn

State = dict[str, torch.Tensor]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def trained() -> State:
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in net().state_dict().items()}


def permuted(state: Mapping[str, torch.Tensor], seed: int) -> State:
    """The same function, its hidden units in another order."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randperm(8, generator=generator) for _ in range(2))
    return {
        "0.weight": state["0.weight"][first],
        "0.bias": state["0.bias"][first],
        "2.weight": state["2.weight"][second][:, first],
        "2.bias": state["2.bias"][second],
        "4.weight": state["4.weight"][:, second],
        "4.bias": state["4.bias"],
    }


def outputs(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    model = net()
    model.load_state_dict(state)
    with torch.no_grad():
        found: torch.Tensor = model(torch.randn(50, 4, generator=torch.Generator().manual_seed(9)))
    return found
