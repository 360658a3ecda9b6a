import pytest
import torch

from fedmerge.probes import Probes

PROBES = Probes((torch.arange(10.0)[:, None] * torch.ones(3), torch.arange(10)), "noise")


def test_batches_hold_all_samples_once_in_order() -> None:
    batches = list(PROBES.batches(4, "cpu"))
    assert [len(inputs[0]) for inputs in batches] == [4, 4, 2]
    assert torch.equal(torch.cat([inputs[1] for inputs in batches]), torch.arange(10))
    assert all(torch.equal(floats[:, 0], whole.float()) for floats, whole in batches)


def test_a_split_is_disjoint_complete_and_fixed_by_its_seed() -> None:
    kept, held_out = PROBES.split(3, seed=1)
    assert (len(kept), len(held_out)) == (7, 3)
    assert sorted([*kept.inputs[1].tolist(), *held_out.inputs[1].tolist()]) == list(range(10))
    assert torch.equal(kept.inputs[0][:, 0], kept.inputs[1].float())  # inputs stay together
    assert torch.equal(PROBES.split(3, seed=1)[1].inputs[1], held_out.inputs[1])
    assert not torch.equal(PROBES.split(3, seed=2)[1].inputs[1], held_out.inputs[1])


def test_joined_probes_name_each_source_once() -> None:
    data = Probes(PROBES.inputs, "data")
    both = PROBES.joined(data).joined(PROBES)
    assert len(both) == 30
    assert both.source == "noise and data"
    assert PROBES.joined(PROBES).source == "noise"
    assert torch.equal(both.inputs[1], torch.arange(10).repeat(3))


def test_drawn_probes_are_different_ones_of_all() -> None:
    drawn = PROBES.drawn(4, torch.Generator().manual_seed(1))
    assert len(drawn) == len(set(drawn.inputs[1].tolist())) == 4
    assert torch.equal(drawn.inputs[0][:, 0], drawn.inputs[1].float())
    assert len(PROBES.drawn(99, torch.Generator().manual_seed(1))) == len(PROBES)
    assert torch.equal(PROBES.first(3).inputs[1], torch.arange(3))


def test_inputs_of_different_lengths_are_no_probes() -> None:
    with pytest.raises(AssertionError, match="one row per sample"):
        Probes((torch.zeros(3), torch.zeros(4)), "data")
