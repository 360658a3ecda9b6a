"""Images lie in memory as convolutions like it, where the model's code does not mind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedmerge.probes import (
    ProbedClients,
    ProbeOptions,
    Probes,
    augmentation_for,
    make_probes,
)


class Net(nn.Module):
    """A convolution whose activations are flattened or viewed."""

    def __init__(self, *, views: bool) -> None:
        super().__init__()
        self.conv, self.layer, self.views = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2), views

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv(x)
        rows = made.view(len(made), -1) if self.views else made.flatten(1)
        found: Tensor = self.layer(rows)
        return found


def probes_for(model: nn.Module, *shape: int) -> Probes:
    like = (torch.randn(2, *shape),)
    options = ProbeOptions("noise", count=20)
    return make_probes(ProbedClients([model.eval()], like, options, seed=0, device="cpu"))


def is_last(probes: Probes) -> bool:
    batch = next(probes.batches(5, "cpu"))[0]
    assert torch.equal(batch, probes.inputs[0][:5])
    return batch.is_contiguous(memory_format=torch.channels_last)


def test_convolutions_get_images_with_channels_last() -> None:
    probes = probes_for(Net(views=False), 3, 8, 8)
    kept, held_out = probes.split(5, seed=0)
    changed = augmentation_for(probes).changed(probes, seed=0)
    every = (probes, kept, held_out, kept.first(9), kept.joined(held_out), changed)
    assert all(map(is_last, every))


def test_code_that_views_activations_gets_them_as_it_expects() -> None:
    assert not is_last(probes_for(Net(views=True), 3, 8, 8))


def test_nets_without_convolutions_get_them_as_they_are() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2))
    assert not is_last(probes_for(net, 3, 8, 8))
