import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedmerge.errors import TrainingError
from fedmerge.training import PADDING, Shard, evaluate, evaluate_ensemble, find_task
from tests.unit.training.models import TokenNet

CLASSIFY, LANGUAGE = find_task("classification"), find_task("language-model")
SAMPLES, CLASSES = 50, 3


def shard() -> Shard:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(SAMPLES, 4)).astype(np.float32)
    return Shard("data", x, rng.integers(0, CLASSES, SAMPLES))


def models(count: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, CLASSES)) for _ in range(count)]


def builds(given: list[nn.Module]) -> list[Callable[[], nn.Module]]:
    return [lambda model=model: model for model in given]  # type: ignore[misc]


def by_hand(given: list[nn.Module], weights: list[float]) -> tuple[float, float]:
    x, y = torch.from_numpy(shard().x), torch.from_numpy(shard().y)
    shares = torch.tensor(weights) / sum(weights)
    with torch.no_grad():
        logits = torch.einsum("k,knc->nc", shares, torch.stack([model(x) for model in given]))
    loss = float(nn.functional.cross_entropy(logits, y))
    return loss, int((logits.argmax(1) == y).sum()) / SAMPLES


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [5.0, 1.0, 0.5]])
def test_the_ensemble_is_the_weighted_mean_of_the_logits(weights: list[float]) -> None:
    given = models()
    found = evaluate_ensemble(builds(given), shard(), CLASSIFY, weights=weights, batch_size=7)
    loss, accuracy = by_hand(given, weights)
    assert found.together.loss == pytest.approx(loss, abs=1e-6)
    assert found.together.metrics["accuracy"] == pytest.approx(accuracy, abs=1e-9)


def test_weights_change_the_ensemble() -> None:
    given = models()
    even = evaluate_ensemble(builds(given), shard(), CLASSIFY)
    skewed = evaluate_ensemble(builds(given), shard(), CLASSIFY, weights=[5.0, 1.0, 0.5])
    assert abs(even.together.loss - skewed.together.loss) > 1e-3
    assert even.alone == skewed.alone


def test_every_model_alone_is_evaluated_as_without_the_others() -> None:
    given = models()
    found = evaluate_ensemble(builds(given), shard(), CLASSIFY, batch_size=7)
    expected = [evaluate(model, shard(), CLASSIFY, batch_size=7) for model in given]
    assert list(found.alone) == expected
    assert len({own.loss for own in found.alone}) == len(given)


@pytest.mark.parametrize(("held", "blocks"), [(10**6, 1), (2 * 7 * CLASSES, 4), (1, 8)])
def test_what_is_held_at_once_changes_no_result(held: int, blocks: int) -> None:
    given, built = models(), [0]

    def build() -> nn.Module:
        built[0] += 1
        return given[(built[0] - 1) % len(given)]

    found = evaluate_ensemble([build] * len(given), shard(), CLASSIFY, batch_size=7, held=held)
    assert built[0] == blocks * len(given)
    assert found == evaluate_ensemble(builds(given), shard(), CLASSIFY, batch_size=7)


def test_one_model_is_in_memory_at_a_time() -> None:
    alive: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        assert not [model for model in alive if model() is not None]
        model = nn.Linear(4, CLASSES)
        alive.append(weakref.ref(model))
        return model

    evaluate_ensemble([build] * 3, shard(), CLASSIFY, batch_size=7, held=1)
    assert len(alive) == 3 * 8


def test_states_beside_the_logits_are_not_averaged() -> None:
    torch.manual_seed(0)
    given: list[nn.Module] = [TokenNet(), TokenNet()]
    given[1].rnn = nn.LSTM(4, 9, batch_first=True)  # whose states are wider
    given[1].out = nn.Linear(9, 5)
    text = np.random.default_rng(0).integers(0, 5, (6, 8))
    found = evaluate_ensemble(builds(given), Shard("t", text[:, :-1], text[:, 1:]), LANGUAGE)
    x, y = torch.from_numpy(text[:, :-1]), torch.from_numpy(text[:, 1:])
    with torch.no_grad():
        mean = sum(model(x)[0] for model in given) / 2
    loss = nn.functional.cross_entropy(mean.flatten(0, 1), y.flatten())
    assert found.together.loss == pytest.approx(float(loss), abs=1e-6)
    assert found.together.metrics["bits_per_character"] == pytest.approx(
        float(loss) / np.log(2), abs=1e-6
    )


class TwoHeads(nn.Module):
    def __init__(self, seed: int, width: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(4, 1), nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"one": self.one(x), "rest": (self.two(x), "text", torch.arange(3))}


class HeadsTask:
    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        assert outputs["rest"][1] == "text"
        assert outputs["rest"][2].tolist() == [0, 1, 2]
        loss: torch.Tensor = (outputs["one"] * outputs["rest"][0]).mean()
        return loss

    def metrics(self, outputs: Any, targets: torch.Tensor) -> Mapping[str, float]:
        return {"one": float(outputs["one"].mean())}


def heads(x: torch.Tensor) -> Callable[[nn.Module], tuple[torch.Tensor, torch.Tensor]]:
    return lambda model: (model(x)["one"], model(x)["rest"][0])


def test_the_users_own_task_gets_the_means_of_all_outputs() -> None:
    given: list[nn.Module] = [TwoHeads(1), TwoHeads(2)]
    found = evaluate_ensemble(builds(given), shard(), HeadsTask())
    x = torch.from_numpy(shard().x)
    with torch.no_grad():
        one, two = (torch.stack(parts).mean(0) for parts in zip(*map(heads(x), given), strict=True))
    assert found.together.loss == pytest.approx(float((one * two).mean()), abs=1e-6)
    assert found.together.metrics["one"] == pytest.approx(float(one.mean()), abs=1e-6)


def test_outputs_of_different_shapes_have_no_mean() -> None:
    given: list[nn.Module] = [TwoHeads(1, width=2), TwoHeads(2, width=3)]
    with pytest.raises(TrainingError, match="data: the models' outputs differ in shape"):
        evaluate_ensemble(builds(given), shard(), HeadsTask())


def test_a_batch_of_padding_alone_counts_nothing() -> None:
    text = np.random.default_rng(0).integers(0, 5, (8, 6))
    targets = text.copy()
    targets[4:] = PADDING
    torch.manual_seed(0)
    model = TokenNet()
    found = evaluate(model, Shard("t", text, targets), LANGUAGE, batch_size=4)
    counted = evaluate(model, Shard("t", text[:4], targets[:4]), LANGUAGE, batch_size=4)
    assert found.loss == pytest.approx(counted.loss, abs=1e-9)
    assert found.metrics == pytest.approx(counted.metrics, abs=1e-9)
    with pytest.raises(TrainingError, match="t: y has nothing to be predicted"):
        evaluate(model, Shard("t", text[4:], targets[4:]), LANGUAGE)
