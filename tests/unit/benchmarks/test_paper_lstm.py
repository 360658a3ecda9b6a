"""Attempts at LSTMs: what they change, and that no client's function is changed."""

from pathlib import Path

import numpy as np
import torch

from benchmarks import paper
from benchmarks.paper_lstm import (
    EMBEDDING,
    INPUT,
    RECURRENT,
    flipped,
    signs_towards,
    turn_towards,
    turned,
)
from benchmarks.paper_models import CharLSTM
from fedmerge.types.arrays import FloatArray
from fedmerge.workflow.retrain.locals import LocalModel

TOKENS, HIDDEN = 11, 6


def client(seed: int) -> LocalModel:
    torch.manual_seed(seed)
    state = CharLSTM(TOKENS, HIDDEN).state_dict()
    return LocalModel(f"client-{seed}", {name: t.numpy() for name, t in state.items()})


def outputs(model: LocalModel) -> FloatArray:
    """Return logits of some texts."""
    net = CharLSTM(TOKENS, HIDDEN)
    net.load_state_dict({name: torch.from_numpy(array) for name, array in model.arrays.items()})
    texts = torch.arange(40).reshape(2, 20) * 7 % TOKENS
    with torch.no_grad():
        logits: FloatArray = net(texts).numpy()
    return logits


def signs_of(*negative: int) -> FloatArray:
    signs: FloatArray = np.ones(HIDDEN, np.float32)
    signs[list(negative)] = -1
    return signs


def test_signs_and_turned_embeddings_change_no_output() -> None:
    first, other = client(0), client(1)
    turn = turn_towards(other, first)
    for changed in (turned(other, turn), flipped(other, signs_of(0, 3))):
        np.testing.assert_allclose(outputs(changed), outputs(other), atol=1e-6)
        assert not np.allclose(changed.arrays[INPUT], other.arrays[INPUT])
    broken = flipped(other, signs_of(0)).updated({RECURRENT: other.arrays[RECURRENT]})
    assert np.abs(outputs(broken) - outputs(other)).max() > 1e-4


def test_signs_that_were_changed_are_found() -> None:
    first = client(0)
    moved = flipped(first, signs_of(1, 4))
    back = flipped(moved, signs_towards(moved, first))
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(back.arrays[name], array)


def test_an_embedding_that_was_turned_is_turned_back() -> None:
    first = client(0)
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))
    moved = first.updated(
        {name: (first.arrays[name] @ turn).astype(np.float32) for name in (EMBEDDING, INPUT)}
    )
    assert not np.allclose(moved.arrays[EMBEDDING], first.arrays[EMBEDDING], atol=0.1)
    for name in (EMBEDDING, INPUT):
        back = turned(moved, turn_towards(moved, first)).arrays[name]
        np.testing.assert_allclose(back, first.arrays[name], atol=1e-5)


def test_attempts_run_in_rounds_and_give_another_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    speeches = [
        f"{role}:\n{''.join(rng.choice(list('abcde '), 300))}"
        for _ in range(8)
        for role in ("ANNA", "BERTA")
    ]
    play, results = tmp_path / "play.txt", tmp_path / "r.json"
    play.write_text("\n\n".join(speeches), encoding="utf-8")
    size = ["rounds=3", "epochs=1", "hidden=8", "clients=2", "samples=2000"]
    words = ["shakespeare", str(play), "--methods", "fedma", "--seeds", "0"]
    for attempts in ("[]", '["rotation", "signs"]'):
        changes = ["--set", *size, f"attempts={attempts}"]
        paper.main([*words, "--results", str(results), *changes])
    usual, attempted = paper.read_results(results)
    assert (usual.attempts, attempted.attempts) == ((), ("rotation", "signs"))
    [[one], [other]] = [outcome.points for outcome in paper.read_results(results).values()]
    assert one.round == other.round == 3
    assert one.accuracy != other.accuracy
    told = 4 * 8 * 8 + 8  # the turn of 8 dimensions and the signs of 8 units, to one client
    assert round(1e6 * (other.megabytes - one.megabytes)) == told
