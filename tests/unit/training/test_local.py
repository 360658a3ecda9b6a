import random
from collections.abc import Collection

import numpy as np
import pytest
import torch
from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.training import (
    Shard,
    Trained,
    evaluate,
    find_task,
    load_arrays,
    read_arrays,
    train_model,
)
from fedmerge.user_code import seeded
from fedmerge.values import Arrays, Place, TrainSettings
from tests.unit.training.models import ImageNet, TokenNet, images, start_arrays

TASK = find_task("classification")
QUICK = TrainSettings(epochs=2, batch_size=16)


def net(seed: int = 0) -> ImageNet:
    model = ImageNet()
    load_arrays(model, start_arrays(seed))
    return model


def train(
    settings: TrainSettings = QUICK, frozen: Collection[str] = (), model: nn.Module | None = None
) -> Trained:
    return train_model(model or net(), images(), TASK, settings, frozen=frozen)


def same(left: Arrays, right: Arrays) -> bool:
    assert list(left) == list(right)
    return all(left[name].tobytes() == right[name].tobytes() for name in left)


def test_training_learns() -> None:
    model = net()
    before = evaluate(model, images(), TASK)
    trained = train(TrainSettings(epochs=15, batch_size=16), model=model)
    after = evaluate(model, images(), TASK)
    assert after.metrics["accuracy"] > 0.9 > before.metrics["accuracy"] + 0.2
    assert trained.losses[-1] < trained.losses[0] / 2
    assert (trained.samples, len(trained.losses)) == (50, 15)


def test_the_seed_decides_every_bit() -> None:
    torch.manual_seed(1)
    first = train()
    torch.manual_seed(2)  # what others draw does not matter
    assert same(first.arrays, train().arrays)
    assert first.losses == train().losses
    assert not same(first.arrays, train(TrainSettings(epochs=2, batch_size=16, seed=1)).arrays)


def test_training_leaves_random_numbers_threads_and_modes_as_they_were() -> None:
    def draws() -> tuple[object, ...]:
        return float(torch.rand(1)), random.random(), float(np.random.rand())  # noqa: NPY002

    def seed_all() -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002

    model, threads = net().eval(), torch.get_num_threads()
    seed_all()
    expected = draws()
    seed_all()
    train_model(
        model, images(), TASK, QUICK, frozen=["conv.weight"], place=Place(threads=threads + 1)
    )
    assert draws() == expected
    assert torch.get_num_threads() == threads
    assert not model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_so_many_threads_are_used_as_the_place_allows() -> None:
    class Watching(ImageNet):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return super().forward(images)

    seen: set[int] = set()
    train_model(Watching(), images(), TASK, QUICK, place=Place(threads=2))
    assert seen == {2}


FIRST = ("conv.weight", "conv.bias")
NORM = ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var")


def test_frozen_tensors_stay_and_all_others_come_back() -> None:
    model, start = net(), start_arrays(0)
    trained = train(frozen=FIRST, model=model)
    assert set(trained.arrays) == set(start) - set(FIRST)
    now = read_arrays(model)
    assert all(np.array_equal(now[name], start[name]) for name in FIRST)
    assert not np.array_equal(now["hidden.weight"], start["hidden.weight"])
    assert not np.array_equal(now["norm.running_mean"], start["norm.running_mean"])


@pytest.mark.parametrize("frozen", [NORM, ("norm.weight",), ("norm.running_mean",)])
def test_a_frozen_batch_norm_keeps_and_uses_its_statistics(frozen: tuple[str, ...]) -> None:
    model, start = net(), start_arrays(0)
    train(frozen=frozen, model=model)
    now = read_arrays(model)
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert np.array_equal(now[name], start[name])
    assert not np.array_equal(now["conv.weight"], start["conv.weight"])


def test_only_the_last_layer_can_be_trained() -> None:
    last = ("out.weight", "out.bias")
    trained = train(frozen=[name for name in start_arrays(0) if name not in last])
    assert set(trained.arrays) == set(last)
    assert not np.array_equal(trained.arrays["out.weight"], start_arrays(0)["out.weight"])


def test_one_layer_of_a_recurrent_net_can_be_frozen() -> None:
    model = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps: torch.Tensor = self.rnn(x)[0]
            assert self.rnn.training  # its dropout works, and cuDNN needs it for gradients
            return steps[:, -1]

    data = np.random.default_rng(0).normal(size=(20, 5, 3)).astype(np.float32)
    shard = Shard("c", data, np.arange(20) % 4)
    frozen = [f"rnn.{name}" for name, _ in model.named_parameters() if name.endswith("l0")]
    trained = train_model(Last(), shard, TASK, QUICK, frozen=frozen)
    assert {name[-2:] for name in trained.arrays} == {"l1"}


def test_a_language_model_is_trained() -> None:
    rng = np.random.default_rng(0)
    text = (rng.integers(0, 5, (40, 1)) + np.arange(9)) % 5  # the next token is the next number
    shard = Shard("c", text[:, :-1], text[:, 1:])
    task = find_task("language-model")
    model = TokenNet()
    settings = TrainSettings(learning_rate=0.8, epochs=15, batch_size=8)
    trained = train_model(model, shard, task, settings)
    assert evaluate(model, shard, task).metrics["accuracy"] > 0.95
    assert trained.losses[-1] < 0.3 < trained.losses[0]


def plain_net() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def by_hand(settings: TrainSettings, steps: int) -> list[nn.Parameter]:
    """One batch of everything per step: no shuffling can matter, so the formulas can be checked."""
    model = plain_net()
    x, y = images().batch(np.arange(50), "cpu")
    weights = list(model.parameters())
    start = [w.detach().clone() for w in weights]
    momentum = [torch.zeros_like(w) for w in weights]
    for _ in range(steps):
        gradients = torch.autograd.grad(TASK.loss(model(x), y), weights)
        with torch.no_grad():
            for w, s, m, g in zip(weights, start, momentum, gradients, strict=True):
                full = g + settings.proximal * (w - s) + settings.weight_decay * w
                m.mul_(settings.momentum).add_(full)
                w.sub_(settings.learning_rate * m)
    return weights


@pytest.mark.parametrize(
    ("momentum", "decay", "proximal"), [(0.0, 0.0, 0.0), (0.9, 0.01, 0.0), (0.9, 0.0, 0.5)]
)
def test_steps_are_those_of_the_formulas(momentum: float, decay: float, proximal: float) -> None:
    settings = TrainSettings(
        epochs=4, batch_size=64, momentum=momentum, weight_decay=decay, proximal=proximal
    )
    trained = train_model(plain_net(), images(), TASK, settings)
    for found, expected in zip(trained.arrays.values(), by_hand(settings, 4), strict=True):
        assert np.allclose(found, expected.detach(), atol=1e-6)


def distance(settings: TrainSettings) -> float:
    trained, start = train(settings).arrays, start_arrays(0)
    return sum(float(((trained[name] - start[name]) ** 2).sum()) for name in FIRST)


def test_the_proximal_term_keeps_weights_near_their_start() -> None:
    free = TrainSettings(epochs=5, batch_size=16)
    held = TrainSettings(epochs=5, batch_size=16, proximal=10.0)
    assert distance(held) < distance(free) / 2


def test_the_gradient_can_be_clipped() -> None:
    settings = TrainSettings(epochs=1, batch_size=64, momentum=0, weight_decay=0, clip_norm=1e-3)
    trained, start = train_model(plain_net(), images(), TASK, settings), plain_net()
    moved = [
        torch.from_numpy(a) - p.detach()
        for a, p in zip(trained.arrays.values(), start.parameters(), strict=True)
    ]
    norm = float(torch.cat([m.flatten() for m in moved]).norm())
    assert norm == pytest.approx(settings.learning_rate * 1e-3, rel=1e-2)


def test_adam_is_another_optimizer() -> None:
    adam = train(TrainSettings(optimizer="adam", learning_rate=1e-3, epochs=1, batch_size=64))
    moved = np.abs(adam.arrays["out.bias"] - start_arrays(0)["out.bias"])
    assert np.allclose(moved, 1e-3, rtol=1e-3)  # its first step is the rate, whatever the gradient


@pytest.mark.parametrize(
    ("samples", "size", "expected"),
    [(50, 16, [16, 16, 16, 2]), (49, 16, [16, 16, 17]), (1, 16, [1]), (16, 16, [16])],
)
def test_every_sample_is_seen_once_per_epoch_and_no_batch_is_a_single_one(
    samples: int, size: int, expected: list[int]
) -> None:
    seen: list[torch.Tensor] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            logits: torch.Tensor = self.linear(x)
            return logits

    shard = Shard("c", np.arange(samples, dtype=np.float32)[:, None], np.zeros(samples, int))
    settings = TrainSettings(epochs=2, batch_size=size, learning_rate=1e-9)
    train_model(Watching(), shard, TASK, settings)
    assert [len(x) for x in seen] == expected * 2
    epochs = [
        torch.cat(half).flatten().tolist()
        for half in (seen[: len(seen) // 2], seen[len(seen) // 2 :])
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(samples))] * 2
    assert epochs[0] != epochs[1] or samples == 1


def test_progress_counts_all_batches() -> None:
    heard: list[tuple[str, float, int]] = []
    train_model(net(), images(), TASK, QUICK, progress=lambda *event: heard.append(event))
    assert heard == [("training", number, 8) for number in range(1, 9)]


def test_a_loss_that_explodes_is_told_with_its_epoch() -> None:
    settings = TrainSettings(learning_rate=1e30, epochs=3, batch_size=16)
    with pytest.raises(TrainingError, match=r"images\.npz: the loss became NaN .* in epoch 1"):
        train(settings)


def test_weights_that_explode_in_the_last_step_are_told() -> None:
    bright = Shard("bright", images().x * np.float32(1e12), images().y)
    settings = TrainSettings(learning_rate=1e30, epochs=1, batch_size=64, weight_decay=0)
    with pytest.raises(TrainingError, match=r"bright: '1\.weight' has become NaN or infinite"):
        train_model(plain_net(), bright, TASK, settings)


def test_nan_in_the_samples_is_told() -> None:
    shard = images()
    shard.x[:][3] = np.nan
    with pytest.raises(TrainingError, match="the loss became NaN"):
        train_model(net(), shard, TASK, QUICK)


def test_nothing_to_train_is_told() -> None:
    with pytest.raises(TrainingError, match="every parameter is frozen"):
        train(frozen=list(start_arrays(0)))


def test_an_unknown_frozen_tensor_is_told() -> None:
    with pytest.raises(TrainingError, match=r"the model has no 'conv9\.weight' to freeze"):
        train(frozen=["conv9.weight"])


def test_a_loss_that_is_no_number_is_told() -> None:
    class PerSample:
        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return outputs.sum(1)

        def metrics(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
            return {}

    with pytest.raises(TrainingError, match=r"the task's loss is no scalar: \(16,\)"):
        train_model(net(), images(), PerSample(), QUICK)


def test_what_the_user_froze_stays_frozen() -> None:
    model = net()
    model.conv.weight.requires_grad_(False)
    trained = train(model=model)
    assert np.array_equal(trained.arrays["conv.weight"], start_arrays(0)["conv.weight"])
    assert not model.conv.weight.requires_grad
