import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedmerge.errors import TrainingError, UsageError
from fedmerge.training import Shard, count_classes, evaluate, find_task
from tests.unit.training.models import CLASSES, ImageNet, TokenNet, images

CLASSIFY, LANGUAGE = find_task("classification"), find_task("language-model")


def logits(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_classification_measures_cross_entropy_and_accuracy() -> None:
    outputs = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    targets = torch.tensor([0, 1, 1])
    expected = np.mean(
        [math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(3))]
    )
    assert math.isclose(float(CLASSIFY.loss(outputs, targets)), expected, rel_tol=1e-6)
    assert CLASSIFY.metrics(outputs, targets)["accuracy"] == pytest.approx(2 / 3)


def test_pixels_can_be_classified() -> None:
    outputs, targets = logits(2, 5, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)
    assert torch.equal(CLASSIFY.loss(outputs, targets), functional.cross_entropy(outputs, targets))


def test_every_form_of_token_logits_gives_the_same_loss() -> None:
    outputs = logits(3, 4, 7)
    targets = torch.arange(12).reshape(3, 4) % 7
    expected = float(LANGUAGE.loss(outputs, targets))
    forms = [outputs.reshape(12, 7), outputs.transpose(1, 2), (outputs, "state"), [outputs]]
    forms += [{"logits": outputs}, SimpleNamespace(logits=outputs)]
    for form in forms:
        assert float(LANGUAGE.loss(form, targets)) == pytest.approx(expected, rel=1e-6)
    wrong = float(LANGUAGE.loss(outputs.flip(0), targets))
    assert wrong != pytest.approx(expected, rel=1e-3)


def test_bits_per_character_are_those_of_a_uniform_guess() -> None:
    metrics = LANGUAGE.metrics(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64))
    assert metrics["bits_per_character"] == pytest.approx(3)


def test_padding_is_not_counted() -> None:
    outputs = logits(1, 4, 5)
    targets = torch.tensor([[1, 2, -100, -100]])
    short = (outputs[:, :2], targets[:, :2])
    assert torch.equal(LANGUAGE.loss(outputs, targets), LANGUAGE.loss(*short))
    assert LANGUAGE.metrics(outputs, targets) == LANGUAGE.metrics(*short)
    counts = count_classes(LANGUAGE, targets.numpy())
    assert counts is not None
    assert counts.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("outputs", "targets", "problem"),
    [
        (logits(4, 3), torch.tensor([0, 1, 2, 3]), "the class 3, but the model has 3 outputs"),
        (logits(1, 3), torch.tensor([-1]), "the class -1"),
        (logits(4, 3), torch.zeros(4), "y holds float32, expected class numbers"),
        (logits(4, 3), torch.zeros(3, dtype=torch.int64), r"outputs are \(4, 3\), which does not"),
        (logits(4), torch.zeros(4, dtype=torch.int64), r"outputs are \(4,\)"),
        ("text", torch.zeros(4), "the model returns str, expected logits"),
    ],
)
def test_targets_that_do_not_fit_the_outputs_are_told(
    outputs: object, targets: torch.Tensor, problem: str
) -> None:
    with pytest.raises(TrainingError, match=problem):
        CLASSIFY.loss(outputs, targets)


def test_tokens_that_do_not_fit_the_outputs_are_told() -> None:
    with pytest.raises(TrainingError, match=r"outputs are \(2, 3\)"):
        LANGUAGE.loss(logits(2, 3), torch.zeros(4, 5, dtype=torch.int64))


def test_class_counts_are_those_of_the_labels() -> None:
    counts = count_classes(CLASSIFY, np.array([3, 0, 3]))
    assert counts is not None
    assert counts.tolist() == [1, 0, 0, 2]


OWN = """
class Squares:
    def loss(self, outputs, targets):
        return ((outputs[:, 0] - targets) ** 2).mean()
    def metrics(self, outputs, targets):
        return {"largest_error": float((outputs[:, 0] - targets).abs().max())}
made = Squares()
class Incomplete:
    def loss(self, outputs, targets):
        return 0
"""


@pytest.mark.parametrize("name", ["Squares", "made"])
def test_a_task_of_the_users_own(tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    task = find_task(f"{tmp_path}/own.py:{name}")
    shard = Shard("c", np.ones((3, 2), np.float32), np.array([1.0, 2.0, 4.0]))
    with torch.no_grad():
        model = nn.Linear(2, 1)
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    found = evaluate(model, shard, task, batch_size=8)
    assert found.loss == pytest.approx(5 / 3)
    assert found.metrics == {"largest_error": 2.0}
    assert count_classes(task, shard.targets) is None


def test_wrong_tasks_are_usage_errors(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UsageError, match=r"`task` is 'regression', expected classification"):
        find_task("regression")
    with pytest.raises(UsageError, match="has no method 'metrics'"):
        find_task(f"{tmp_path}/own.py:Incomplete")
    with pytest.raises(UsageError, match="there is no such file"):
        find_task(f"{tmp_path}/none.py:task")
    with pytest.raises(TrainingError, match="cannot be loaded: ZeroDivisionError"):
        find_task(f"{tmp_path}/broken.py:task")
    with pytest.raises(TrainingError, match="cannot be imported: ModuleNotFoundError"):
        find_task("no_such_module:task")


def test_evaluation_does_not_depend_on_the_batches() -> None:
    torch.manual_seed(0)
    model, shard = ImageNet(), images()
    whole = evaluate(model, shard, CLASSIFY, batch_size=1000)
    parts = evaluate(model, shard, CLASSIFY, batch_size=7)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.metrics["accuracy"] == pytest.approx(whole.metrics["accuracy"])
    assert whole.samples == 50


def test_evaluation_uses_no_dropout_and_leaves_the_modes_alone() -> None:
    torch.manual_seed(0)
    model = ImageNet().train()
    model.norm.eval()
    before = model.norm.running_mean.clone() if model.norm.running_mean is not None else None
    first, again = (evaluate(model, images(), CLASSIFY) for _ in range(2))
    assert first == again
    assert [model.training, model.norm.training, model.drop.training] == [True, False, True]
    assert before is not None
    assert model.norm.running_mean is not None
    assert torch.equal(model.norm.running_mean, before)


def test_a_language_model_with_a_state_is_evaluated() -> None:
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 5, (6, 9))
    found = evaluate(TokenNet(), Shard("c", tokens[:, :-1], tokens[:, 1:]), LANGUAGE)
    assert found.metrics["bits_per_character"] == pytest.approx(found.loss / math.log(2))
    assert found.loss == pytest.approx(math.log(5), rel=0.1)


def test_samples_that_the_model_cannot_take_are_named() -> None:
    wrong = Shard("c", np.zeros((2, 7), np.float32), np.zeros(2, int), origin="c.npz")
    with pytest.raises(
        TrainingError,
        match=r"c\.npz: the model fails on samples of shape \(2, 7\) and type float32",
    ):
        evaluate(ImageNet(), wrong, CLASSIFY)


def test_a_label_out_of_range_is_found_against_the_outputs() -> None:
    shard = images()
    high = Shard("c", shard.x, shard.y + CLASSES, origin="c.npz")
    with pytest.raises(TrainingError, match=r"c\.npz: y has the class \d, but the model has 3"):
        evaluate(ImageNet(), high, CLASSIFY)
