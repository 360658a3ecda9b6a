from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.errors import ArchitectureError, CheckpointError, TrainingError, UsageError
from fedmerge.merging import EvaluationOptions, evaluate
from tests import digits
from tests.clients import permuted

CODE = fedmerge.ModelCode(digits.MODEL)
LOOSE = 1e-5  # float32 sums in another order


class Squares:
    """A task of the user's own: nothing that is called accuracy."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs.argmax(1) - targets) ** 2).float().mean()

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, float]:
        return {"largest": float(outputs.mean())}


def test_loss_and_accuracy_are_those_of_the_models_logits(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    scores = evaluate(files, digits.save_test(tmp_path), model=CODE)
    assert [score.model for score in scores] == ["c1", "c2", "c3"]
    for number, score in enumerate(scores, start=1):
        loss, accuracy = digits.quality(digits.logits(digits.client(number)))
        assert score.evaluation.loss == pytest.approx(loss, abs=LOOSE)
        assert score.evaluation.metrics["accuracy"] == pytest.approx(accuracy, abs=1e-9)
        assert score.evaluation.samples == len(digits.images()[0]) - digits.TRAINED
        assert score.parameters == 64 * 16 + 16 + 16 * 10 + 10
    assert len({score.evaluation.loss for score in scores}) == 3


def test_a_permuted_copy_is_as_good(tmp_path: Path) -> None:
    state = digits.client(1)
    copy = permuted(state, seed=1)[0]
    wrong = {**copy, "3.weight": state["3.weight"]}  # whose last layer reads other units
    files = [
        digits.save(own, tmp_path / f"{name}.pt")
        for name, own in (("own", state), ("copy", copy), ("wrong", wrong))
    ]
    own, same, other = evaluate(files, digits.save_test(tmp_path), model=CODE)
    assert same.evaluation.loss == pytest.approx(own.evaluation.loss, abs=LOOSE)
    assert same.evaluation.metrics == own.evaluation.metrics
    assert other.evaluation.metrics["accuracy"] < own.evaluation.metrics["accuracy"] - 0.2


def test_a_grown_file_is_evaluated_at_its_own_widths(tmp_path: Path) -> None:
    clients = digits.save_clients(tmp_path)
    merge = fedmerge.match(clients, output=tmp_path / "global.pt")
    [score] = evaluate([tmp_path / "global.pt"], digits.save_test(tmp_path), model=CODE)
    assert merge.growth > 1.1
    assert score.parameters == merge.parameters
    loss, accuracy = digits.quality(digits.logits(merge.state_dict()))
    assert score.evaluation.loss == pytest.approx(loss, abs=LOOSE)
    assert score.evaluation.metrics["accuracy"] == pytest.approx(accuracy, abs=1e-9)


def test_bytes_are_normalised_and_test_columns_found(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path, 2)
    x, y = digits.images()
    pixels = np.round(x * 255).astype(np.uint8)
    start = digits.TRAINED
    np.savez(
        tmp_path / "all.npz",
        x_train=pixels[:start],  # of which no sample may be used
        y_train=y[:start],
        x_test=pixels[start:],
        y_test=y[start:].astype(np.uint8),
    )
    np.savez(tmp_path / "ready.npz", x=pixels[start:].astype(np.float32) / 255, y=y[start:])
    options = EvaluationOptions(preparation=fedmerge.Preparation((0.0,), (1.0,)))
    found = evaluate(files, tmp_path / "all.npz", model=CODE, options=options)
    assert found == evaluate(files, tmp_path / "ready.npz", model=CODE)


def test_the_batch_size_changes_no_result(tmp_path: Path) -> None:
    files, data = digits.save_clients(tmp_path, 1), digits.save_test(tmp_path)
    [whole] = evaluate(files, data, model=CODE)
    [parts] = evaluate(files, data, model=CODE, options=EvaluationOptions(batch_size=11))
    assert parts.evaluation.loss == pytest.approx(whole.evaluation.loss, abs=LOOSE)
    assert parts.evaluation.metrics == pytest.approx(whole.evaluation.metrics, abs=1e-9)
    with pytest.raises(UsageError, match="`batch_size` is 0, expected a whole number from 1"):
        EvaluationOptions(batch_size=0)


def test_the_users_own_task_and_data_are_called(tmp_path: Path) -> None:
    x, y = (array[digits.TRAINED :] for array in digits.images())
    np.savez(tmp_path / "hidden.npz", x=x, y=y)
    code = (
        f"import numpy as np\n\ndef load(client):\n    assert client == 'evaluation'\n"
        f"    data = np.load({str(tmp_path / 'hidden.npz')!r})\n    return data['x'], data['y']\n"
    )
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    files = digits.save_clients(tmp_path, 1)
    options = EvaluationOptions(task=f"{__name__}:Squares")
    [score] = evaluate(files, f"{tmp_path / 'own.py'}:load", model=CODE, options=options)
    predicted = digits.logits(digits.client(1)).argmax(1).numpy()
    assert score.evaluation.loss == pytest.approx(float(((predicted - y) ** 2).mean()), rel=1e-5)
    assert list(score.evaluation.metrics) == ["largest"]


class Scaled(nn.Module):
    """A convolution whose padding fits its own kernel only, and an axis that code alone gives."""

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, kernel, padding=1)
        self.out = nn.LazyLinear(10)
        self(torch.zeros(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.conv(x).amax((2, 3)))
        return logits


def test_a_kernel_of_another_size_than_the_codes_is_refused(tmp_path: Path) -> None:
    file = digits.save(dict(Scaled(5).state_dict()), tmp_path / "five.pt")
    data = digits.save_test(tmp_path)
    found = "five: 'conv.weight' has a 5×5 kernel in the file and 3×3 in the model"
    with pytest.raises(ArchitectureError, match=found):
        evaluate([file], data, model=fedmerge.ModelCode(f"{__name__}:Scaled"))
    same = fedmerge.ModelCode(f"{__name__}:Scaled", {"kernel": 5})
    assert evaluate([file], data, model=same)[0].parameters == 2 * 25 + 2 + 2 * 10 + 10


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    file = digits.save(dict(nn.Linear(64, 10).state_dict()), tmp_path / "flat.pt")
    with pytest.raises(ArchitectureError, match=r"flat: .*compared with the model"):
        evaluate([file], digits.save_test(tmp_path), model=CODE)


def test_data_are_looked_at_before_models(tmp_path: Path) -> None:
    np.savez(tmp_path / "odd.npz", images=np.zeros(3))
    with pytest.raises(TrainingError, match="expected 'x' and 'y' or 'x_test' and 'y_test'"):
        evaluate(["missing.pt"], tmp_path / "odd.npz", model=CODE)
    with pytest.raises(CheckpointError, match=r"missing.pt: no such file"):
        evaluate(["missing.pt"], digits.save_test(tmp_path), model=CODE)


def test_labels_beyond_the_outputs_are_refused_with_the_datas_name(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path, 1)
    x, y = digits.images()
    np.savez(tmp_path / "high.npz", x=x, y=y + 1)
    with pytest.raises(
        TrainingError, match=r"high.npz: y has the class 10, but the model has 10 outputs"
    ):
        evaluate(files, tmp_path / "high.npz", model=CODE)
