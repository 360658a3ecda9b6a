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


def test_mixtures_lie_between_two_samples_of_all_inputs() -> None:
    probes = Probes((torch.arange(10.0)[:, None] * torch.ones(3), -torch.arange(10.0)), "data")
    mixed = probes.mixed(2, seed=1)
    assert len(mixed) == 30
    assert torch.equal(mixed.inputs[0][:10], probes.inputs[0])
    made = mixed.inputs[0][10:]
    torch.testing.assert_close(made[:, 0], -mixed.inputs[1][10:])  # the same share of every input
    assert made.min() >= 0
    assert made.max() <= 9
    assert not torch.equal(made[:10], made[10:])
    assert (made[:, 0] != made[:, 0].round()).sum() > 10  # none is a sample again, but by chance
    assert torch.equal(probes.mixed(2, seed=1).inputs[0], mixed.inputs[0])
    assert not torch.equal(probes.mixed(2, seed=2).inputs[0], mixed.inputs[0])


def test_tokens_are_not_mixed() -> None:
    assert PROBES.mixed(2, seed=1) is PROBES


def test_inputs_of_different_lengths_are_no_probes() -> None:
    with pytest.raises(AssertionError, match="one row per sample"):
        Probes((torch.zeros(3), torch.zeros(4)), "data")
