"""Images lie in memory as convolutions like it, where the model's code does not mind."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedmerge.probes import (
    STEPS,
    STEPS_TO_STATISTICS,
    ProbedClients,
    ProbeOptions,
    Probes,
    Source,
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


def probes_for(model: nn.Module, *shape: int, source: Source = "noise") -> Probes:
    like = (torch.randn(2, *shape),)
    options = ProbeOptions(source, count=20)
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


def test_convolutions_get_inputs_that_they_make_so_too_while_these_are_made() -> None:
    class Seen(Net):
        layouts: list[bool] = []  # noqa: RUF012, of all of its kind

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 20:
                self.layouts.append(x.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x)

    made = probes_for(Seen(views=False), 3, 8, 8, source="synthetic")
    assert len(Seen.layouts) == STEPS
    assert all(Seen.layouts)
    assert is_last(made)
    assert made.inputs[0].is_contiguous()  # as others are kept


def test_inputs_take_longer_to_meet_the_statistics_of_batch_norms() -> None:
    def steps_of(*layers: nn.Module) -> int:
        clients = [nn.Sequential(*layers)]
        return ProbedClients(clients, (), ProbeOptions(), seed=0, device="cpu").steps

    assert steps_of(nn.Linear(3, 3)) == STEPS
    assert steps_of(nn.BatchNorm1d(3, track_running_stats=False)) == STEPS
    assert steps_of(nn.Linear(3, 3), nn.BatchNorm1d(3)) == STEPS_TO_STATISTICS > STEPS


def test_code_that_views_activations_gets_them_as_it_expects() -> None:
    assert not is_last(probes_for(Net(views=True), 3, 8, 8))


def test_nets_without_convolutions_get_them_as_they_are() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2))
    assert not is_last(probes_for(net, 3, 8, 8))
