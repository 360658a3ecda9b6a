from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.errors import UsageError
from fedmerge.measuring import compare
from fedmerge.merging import Comparison, EvaluationOptions, Row, evaluate
from tests import digits
from tests.clients import permuted

CODE = fedmerge.ModelCode(digits.MODEL)
LOOSE = 1e-5  # float32 sums in another order
APART: dict[str, Any] = {"match_threshold": 1.0, "max_growth": "none"}  # nothing is matched
KINDS = ["client", "client", "client", "mean", "best", "average", "ensemble", "match"]


def compared(folder: Path, sources: list[Any], merged: Any = (), **options: Any) -> Comparison:
    data = digits.save_test(folder)
    matching = fedmerge.MatchOptions(**options)
    return compare(sources, data, model=CODE, options=matching, merged=merged)


def row(found: Comparison, kind: str) -> Row:
    [only] = [row for row in found.rows if row.kind == kind]
    return only


def accuracy(found: Row) -> float:
    assert found.evaluation is not None
    return found.evaluation.metrics["accuracy"]


def loss(found: Row) -> float:
    assert found.evaluation is not None
    return found.evaluation.loss


def test_the_rows_are_what_a_merge_has_to_beat(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    found = compared(tmp_path, files)
    assert [row.kind for row in found.rows] == KINDS
    clients = found.rows[:3]
    alone = evaluate(files, digits.save_test(tmp_path), model=CODE)
    assert [row.evaluation for row in clients] == [score.evaluation for score in alone]
    assert [row.growth for row in clients] == [1.0] * 3
    best = max(clients, key=accuracy)
    assert found.best_client == best.model
    assert row(found, "best").model == f"best client ({best.model})"
    assert row(found, "best").evaluation == best.evaluation
    assert accuracy(row(found, "mean")) == pytest.approx(sum(map(accuracy, clients)) / 3)
    assert loss(row(found, "mean")) == pytest.approx(sum(map(loss, clients)) / 3)
    assert row(found, "mean").parameters is None


def test_the_ensemble_is_the_mean_of_the_clients_logits(tmp_path: Path) -> None:
    found = row(compared(tmp_path, digits.save_clients(tmp_path)), "ensemble")
    mean = torch.stack([digits.logits(digits.client(k)) for k in (1, 2, 3)]).mean(0)
    assert (loss(found), accuracy(found)) == pytest.approx(digits.quality(mean), abs=LOOSE)
    assert found.growth == pytest.approx(3.0)


def test_the_average_is_the_mean_of_the_clients_tensors(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    found = row(compared(tmp_path, files), "average")
    states = [digits.client(k) for k in (1, 2, 3)]
    mean = {name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]}
    expected = digits.quality(digits.logits(mean))
    assert (loss(found), accuracy(found)) == pytest.approx(expected, abs=LOOSE)
    paper = row(compared(tmp_path, files, preset="paper"), "average")
    assert paper == found  # the paper's shrinkage belongs to its match


def test_permuted_copies_match_to_the_same_quality_but_do_not_average_so(tmp_path: Path) -> None:
    state = digits.client(1)
    copies: list[Any] = [state, *(permuted(state, seed)[0] for seed in (1, 2))]
    found = compared(tmp_path, copies)
    assert [accuracy(row) for row in found.rows[:3]] == [accuracy(found.rows[0])] * 3
    match = row(found, "match")
    assert match.growth == 1.0
    assert accuracy(match) == accuracy(found.rows[0])
    assert loss(match) == pytest.approx(loss(found.rows[0]), abs=LOOSE)
    assert accuracy(row(found, "average")) < accuracy(match) - 0.05
    assert not found.warnings


def test_a_client_that_passes_for_a_merge_is_named(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    found = compared(tmp_path, files, merged=[files[1]])
    copy, matched = row(found, "global"), row(found, "match")
    assert (copy.copied_client, matched.copied_client) == (files[1].stem, None)
    assert f"{copy.model} is client {files[1].stem}: nothing of the others is in it" in [
        *found.warnings
    ]
    clients = [own.pull for own in found.rows if own.kind == "client"]
    assert copy.pull == clients[1]
    assert max(own for own in clients if own is not None) == 0.0  # of the nearest


@pytest.mark.parametrize("weights", [{}, {"c1": 4.0}], ids=["even", "weighted"])
def test_with_nothing_matched_the_match_is_the_ensemble(
    tmp_path: Path, weights: Mapping[str, float]
) -> None:
    files = digits.save_clients(tmp_path)
    found = compared(tmp_path, files, client_weight=weights, **APART)
    match, ensemble = row(found, "match"), row(found, "ensemble")
    assert loss(match) == pytest.approx(loss(ensemble), abs=LOOSE)
    assert accuracy(match) == accuracy(ensemble)
    assert match.pull == pytest.approx(1, abs=LOOSE)
    has_lead = accuracy(ensemble) > accuracy(row(found, "best"))
    assert match.gain == ensemble.gain == (1.0 if has_lead else None)
    assert has_lead is not bool(weights)  # both cases are seen
    matched = row(compared(tmp_path, files, client_weight=weights), "match")
    assert abs(loss(matched) - loss(ensemble)) > 1e-2


def test_a_merged_file_is_a_row_like_the_match_that_wrote_it(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    code = replace(CODE, input_shapes=((2, 1, 8, 8),), input_dtypes=("float32",))  # as the data's
    options = fedmerge.MatchOptions(seed=3)
    merge = fedmerge.match(files, options, model=code, output=tmp_path / "global.pt")
    found = compared(tmp_path, files, [tmp_path / "global.pt", files[0]], seed=3)
    match, one, other = found.rows[-3:]
    assert (one.kind, one.model, other.model) == ("global", "global", "c1")
    assert one.evaluation == match.evaluation
    assert one.growth == match.growth == merge.growth > 1.1
    assert other.evaluation == found.rows[0].evaluation != one.evaluation


def test_clients_of_different_widths_have_no_average(tmp_path: Path) -> None:
    sources: list[Any] = [digits.client(1), digits.client(2, hidden=24)]
    found = compared(tmp_path, sources)
    average = row(found, "average")
    assert average.evaluation is None
    assert "different widths (16, 24)" in average.reason
    assert found.rows[0].growth == pytest.approx((75 * 16 + 10) / (75 * 24 + 10))
    assert found.rows[1].growth == 1.0
    mean = (digits.logits(digits.client(1)) + digits.logits(digits.client(2, hidden=24))) / 2
    assert loss(row(found, "ensemble")) == pytest.approx(digits.quality(mean)[0], abs=LOOSE)


def test_a_merge_that_is_worse_than_the_best_client_is_warned_about(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    empty = {name: torch.zeros_like(tensor) for name, tensor in digits.client(1).items()}
    bad = digits.save(empty, tmp_path / "bad.pt")
    found = compared(tmp_path, files, [bad], **APART)
    [warning] = found.warnings  # the match is the ensemble, which is better
    best = f"{100 * accuracy(row(found, 'best')):.1f} %"
    assert warning == (
        f"bad is worse than the best client: {100 * accuracy(found.rows[-1]):.1f} %, "
        f"{found.best_client} {best}"
    )
    assert accuracy(row(found, "match")) > accuracy(row(found, "best"))


def test_growth_counts_kept_tensors_as_the_merge_does(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    keep: dict[str, Any] = {"keep": ("3.*",)}
    found = row(compared(tmp_path, files, **keep), "match")
    merge = fedmerge.match(files, fedmerge.MatchOptions(**keep))
    assert (found.growth, found.parameters) == (merge.growth, merge.parameters)


class Reader(nn.Module):
    """A language model that returns its logits and its state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5)
        self.rnn = nn.LSTM(5, 7, batch_first=True)
        self.out = nn.Linear(7, 6)

    def forward(self, text: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        features, state = self.rnn(self.embed(text), state)
        return self.out(features), state


def test_language_models_are_compared_by_bits_per_character(tmp_path: Path) -> None:
    files = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        files.append(digits.save(dict(Reader().state_dict()), tmp_path / f"r{seed}.pt"))
    text = np.random.default_rng(0).integers(0, 6, (9, 12))
    np.savez(tmp_path / "text.npz", x=text[:, :-1], y=text[:, 1:])
    found = compare(
        files,
        tmp_path / "text.npz",
        model=fedmerge.ModelCode(f"{__name__}:Reader", state=((1, 1),)),
        options=fedmerge.MatchOptions(**APART),
        evaluation=EvaluationOptions(task="language-model"),
    )
    match, ensemble = row(found, "match"), row(found, "ensemble")
    assert match.evaluation is not None
    bits = match.evaluation.metrics["bits_per_character"]
    assert bits == pytest.approx(loss(match) / np.log(2), abs=LOOSE)
    assert loss(match) == pytest.approx(loss(ensemble), abs=LOOSE)
    assert abs(loss(found.rows[0]) - loss(ensemble)) > 1e-3


class Distance:
    """A task without an accuracy."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    def metrics(self, outputs: Tensor, targets: Tensor) -> Mapping[str, float]:
        return {"right": float((outputs.argmax(1) == targets).float().mean())}


def test_without_an_accuracy_the_loss_decides(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    worse = {name: 3 * tensor for name, tensor in digits.client(1).items()}
    bad = digits.save(worse, tmp_path / "bad.pt")
    options = EvaluationOptions(task=f"{__name__}:Distance")
    found = compare(files, digits.save_test(tmp_path), model=CODE, merged=[bad], evaluation=options)
    assert found.best_client == min(found.rows[:3], key=loss).model
    assert row(found, "best").model == f"best client ({found.best_client}, by loss)"
    assert any(w.startswith("bad is worse than the best client: loss") for w in found.warnings)


def test_one_client_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 2 clients are needed, got 1"):
        compared(tmp_path, digits.save_clients(tmp_path, 1))


def test_the_match_is_by_the_method_that_is_asked_for(tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path)
    found = row(compared(tmp_path, files, method="ot"), "match")
    merge = fedmerge.match(files, fedmerge.MatchOptions(method="ot"))
    expected = digits.quality(digits.logits(merge.state_dict()))
    assert (loss(found), accuracy(found)) == pytest.approx(expected, abs=LOOSE)
    assert (found.model, found.growth) == ("one-shot match (ot)", 1.0)
    plain = row(compared(tmp_path, files), "match")
    assert row(compared(tmp_path, files, method="average"), "match") == plain != found
