"""Optimizers, schedulers, accumulated gradients, best models and own steps, against plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from fedmerge.errors import UsageError
from fedmerge.training import Shard, find_task, train_model
from fedmerge.values import TrainSettings
from tests.unit.training.models import images

TASK = find_task("classification")
Batches = list[torch.Tensor]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


def plainly(
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    epochs: int,
    schedule: Callable[[Any], Any] | None = None,
    batch: int = 50,
    every: int = 1,
) -> dict[str, torch.Tensor]:
    """Train as any tutorial does, in the order in which settings with seed 0 shuffle."""
    model = net()
    x, y = images().batch(torch.arange(50).numpy(), "cpu")
    optimizer = make(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    shuffler = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        parts = torch.split(torch.randperm(50, generator=shuffler), batch)
        for start in range(0, len(parts), every):
            group = parts[start : start + every]
            optimizer.zero_grad()
            for rows in group:
                assert isinstance(x, torch.Tensor)
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) / len(group)
                torch.autograd.backward(loss)
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return dict(model.state_dict())


def trained(epochs: int = 3, batch_size: int = 50, **settings: Any) -> dict[str, torch.Tensor]:
    model = net()
    own = TrainSettings(epochs=epochs, batch_size=batch_size, weight_decay=0.0, **settings)
    train_model(model, images(), TASK, own)
    return dict(model.state_dict())


def is_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize(
    ("name", "arguments", "make"),
    [
        ("adamw", None, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
        ("RMSprop", "alpha=0.5", lambda p: torch.optim.RMSprop(p, lr=0.1, alpha=0.5)),
        ("sgd", "nesterov=True", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
        ("adam", "betas=(0.5, 0.6)", lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.6))),
    ],
)
def test_any_optimizer_of_torch_by_name(name: str, arguments: str | None, make: Any) -> None:
    found = trained(optimizer=name, optimizer_args=arguments, learning_rate=0.1)
    assert is_equal(found, plainly(make, epochs=3))
    other = "adagrad" if name != "adagrad" else "sgd"
    assert not is_equal(found, trained(optimizer=other, learning_rate=0.1))


def test_a_scheduler_changes_the_rate_after_every_epoch() -> None:
    found = trained(learning_rate=0.1, scheduler="StepLR", scheduler_args="step_size=1, gamma=0.5")
    expected = plainly(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        epochs=3,
        schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
    )
    assert is_equal(found, expected)
    assert not is_equal(found, trained(learning_rate=0.1))


def test_gradients_of_several_batches_make_one_step() -> None:
    found = trained(epochs=2, batch_size=10, learning_rate=0.1, accumulate=3)  # 5 batches: 3 and 2
    sgd = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    assert is_equal(found, plainly(sgd, epochs=2, batch=10, every=3))
    assert not is_equal(found, plainly(sgd, epochs=2, batch=10))


class Scripted:
    """A task whose held-out loss goes up after the second epoch."""

    def __init__(self) -> None:
        self.losses = iter([3.0, 1.0, 2.0, 2.5, 0.5])

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return nn.functional.cross_entropy(outputs, targets)
        return torch.tensor(next(self.losses))

    def metrics(self, outputs: Any, targets: torch.Tensor) -> Mapping[str, float]:
        return {}


@pytest.mark.parametrize(("patience", "epochs"), [(1, 3), (2, 4), (3, 5)])
def test_the_best_epoch_is_kept_and_no_more_than_patience_are_tried(
    patience: int, epochs: int
) -> None:
    model, shard = net(), images()
    held = Shard("held", shard.x[:5], shard.y[:5])
    settings = TrainSettings(epochs=5, patience=patience, learning_rate=0.1, weight_decay=0.0)
    done = train_model(model, shard, Scripted(), settings, held=held)
    assert len(done.losses) == epochs
    best = 2 if epochs < 5 else 5
    kept = dict(model.state_dict())
    assert is_equal(kept, trained(epochs=best, batch_size=32, learning_rate=0.1))
    assert not is_equal(kept, trained(epochs=3, batch_size=32, learning_rate=0.1))


class OwnStep(Scripted):
    """A task with a step of its own: mixes the samples with each other."""

    def train_step(self, model: nn.Module, x: Any, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model((x + x.flip(0)) / 2), y)


def test_a_tasks_own_step_takes_the_place_of_the_usual_one() -> None:
    model = net()
    settings = TrainSettings(epochs=1, batch_size=50, learning_rate=0.1, weight_decay=0.0)
    usual, own = copy.deepcopy(model), copy.deepcopy(model)
    train_model(usual, images(), Scripted(), settings)
    train_model(own, images(), OwnStep(), settings)
    x, y = images().batch(
        torch.randperm(50, generator=torch.Generator().manual_seed(0)).numpy(), "cpu"
    )
    torch.autograd.backward(OwnStep().train_step(model, x, y))
    layer = model[1]  # type: ignore[index]
    expected = layer.weight.detach() - 0.1 * layer.weight.grad
    assert torch.allclose(own.state_dict()["1.weight"], expected, atol=1e-6)
    assert not torch.allclose(usual.state_dict()["1.weight"], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "adamx"}, "`optimizer` is 'adamx', which is none of torch's"),
        ({"optimizer": "lbfgs"}, "`optimizer` is 'lbfgs', which is none of torch's"),
        ({"optimizer_args": "speed=3"}, "`optimizer` can't be made of its arguments: .*'speed'"),
        ({"scheduler": "nolr"}, "`scheduler` is 'nolr', which is none of torch's"),
        ({"scheduler": "steplr"}, "`scheduler` can't be made of its arguments: .*step_size"),
    ],
)
def test_what_torch_does_not_have_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        trained(**settings)


@pytest.mark.parametrize("text", ["3", "a=b", "**x", "a=1)", "a=open('x')"])
def test_arguments_are_literal_values(text: str) -> None:
    with pytest.raises(UsageError, match=r"`optimizer_args` is .*, expected arguments such as"):
        TrainSettings(optimizer_args=text)
