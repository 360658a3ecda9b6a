"""Distillation: training a merge, or a client in its place, to answer as the ensemble does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.api import match
from fedmerge.architecture import ModelCode
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.merging import (
    MIXTURES,
    Answers,
    Distiller,
    MatchOptions,
    Merge,
    choose_merge,
    distillation,
    distillation_loss,
    expand_sources,
    open_clients,
    outputs_on,
    prepare,
    probe_clients,
    respond,
    started_from,
)
from fedmerge.probes import ProbeOptions, Probes
from fedmerge.values import Array, silent
from tests.digits import MODEL, build, client, images
from tests.zoo import CharModel

EXACT = 1e-6  # of outputs in single precision: sums of a few dozen products
STEPS = 60

State = dict[str, Tensor]


class Normed(nn.Module):
    """A convolution and a residual block with batch norms, on 8×8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.fc = nn.Linear(4 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        logits: Tensor = self.fc((x + self.block(x)).flatten(1))
        return logits


def normed() -> nn.Module:
    """Return a net whose running statistics are no fresh one's."""
    model = Normed().train()
    with torch.no_grad():
        model(torch.from_numpy(images()[0][:64]) + torch.randn(64, 1, 8, 8))
    return model


def recurrent() -> nn.Module:
    return CharModel(nn.LSTM)


def tied() -> nn.Module:
    return CharModel(nn.GRU, tied=True)


def drawn(build: Callable[[], nn.Module], seed: int) -> State:
    torch.manual_seed(seed)
    return dict(build().state_dict())


def frozen() -> nn.Module:
    """Return a perceptron for digits of which nothing learns."""
    return build().requires_grad_(False)


def digits_code() -> ModelCode:
    return ModelCode(MODEL, input_shapes=((1, 1, 8, 8),))


def digits_probes(folder: Path) -> ProbeOptions:
    """Return some real images, without labels, as probes."""
    np.savez(folder / "probes.npz", x=images()[0][:300])
    return ProbeOptions(data=folder / "probes.npz")


def digits_answers(folder: Path, **changes: object) -> Answers:
    options = MatchOptions(**changes)  # type: ignore[arg-type]
    states = [client(k) for k in (1, 2, 3)]
    return answers_to(states, digits_code(), options, digits_probes(folder))


def answers_to(
    states: list[State], code: ModelCode, options: MatchOptions, probing: ProbeOptions
) -> Answers:
    session = prepare(open_clients(expand_sources(states), options.reading), options, model=code)
    return probe_clients(session, probing, silent)


def chosen_merge(answers: Answers) -> Merge:
    return choose_merge(answers, respond(answers), ProbeOptions(), silent)


def arrays(merge: Merge) -> dict[str, Array]:
    return {name: merge.read(name) for name in merge.plan.tensors}


def outputs(answers: Answers, merge: Merge) -> Tensor:
    return outputs_on(answers.modules.merged(arrays(merge)), answers.held_out, device="cpu")


def distiller(answers: Answers, merge: Merge, steps: int = STEPS) -> Distiller:
    members = range(len(answers.outputs))
    return Distiller(answers.modules, merge, answers.probes, members, steps, seed=0)


NETS = {
    "normed": (normed, ModelCode(f"{__name__}:normed", input_shapes=((1, 1, 8, 8),))),
    "recurrent": (
        recurrent,
        ModelCode(f"{__name__}:recurrent", input_shapes=((1, 9),), input_dtypes=("long",)),
    ),
    "tied": (
        tied,
        ModelCode(f"{__name__}:tied", input_shapes=((1, 9),), input_dtypes=("long",)),
    ),
}


@pytest.mark.parametrize("net", NETS)
def test_a_start_from_a_client_computes_what_the_client_does(net: str) -> None:
    build, code = NETS[net]
    states = [drawn(build, seed) for seed in (1, 2)]
    probing = ProbeOptions(source="noise", count=40)
    answers = answers_to(states, code, MatchOptions(max_growth=1.6), probing)
    merge = chosen_merge(answers)
    for number, own in enumerate(answers.outputs):
        torch.testing.assert_close(
            outputs(answers, started_from(merge, number)), own, rtol=EXACT, atol=EXACT
        )
        assert (outputs(answers, merge) - own).abs().max() > 1e-3  # the merge itself does not


def test_the_other_units_of_a_start_from_a_client_can_learn(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, max_growth=1.5, lead="none", merge_units="mean")
    merge = chosen_merge(answers)
    start = started_from(merge, 0)
    others = np.setdiff1d(np.arange(merge.widths["1"]), merge.placements[0]["1"].indices)
    assert len(others) == 8
    np.testing.assert_array_equal(start.read("1.weight")[others], merge.read("1.weight")[others])
    assert not start.read("3.weight")[:, others].any()
    [*_, (name, trained)] = distiller(answers, merge).merges(0, silent)
    assert name == "distilled from client-1"
    assert (np.abs(trained.read("3.weight")[:, others]).max(axis=0) > 1e-3).all()
    moved = np.abs(trained.read("1.weight")[others] - merge.read("1.weight")[others])
    assert (moved.max(axis=1) > 1e-3).all()


def test_training_comes_closer_to_the_ensemble_from_both_starts(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, max_growth=1, lead="none", merge_units="mean")
    merge = chosen_merge(answers)
    starts = (merge, started_from(merge, 1))
    found = list(distiller(answers, merge, steps=200).merges(1, silent))
    assert [name for name, _ in found] == ["distilled from the merge", "distilled from client-2"]
    for start, (_, trained) in zip(starts, found, strict=True):
        before, after = (answers.agreement(outputs(answers, m)) for m in (start, trained))
        assert after.decisions > before.decisions
        assert after.explained > before.explained


def test_the_ensemble_is_asked_about_mixtures_as_far_as_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = digits_answers(tmp_path)
    made = distiller(answers, chosen_merge(answers))
    count = len(answers.probes)
    lessons = made._lessons
    assert sum(len(lesson.wanted) for lesson in lessons) == (1 + MIXTURES) * count
    inputs = torch.cat([lesson.inputs[0] for lesson in lessons])
    probes = Probes((inputs,), "data")
    each = [outputs_on(answers.modules.client(k), probes, device="cpu") for k in range(3)]
    wanted = torch.cat([lesson.wanted for lesson in lessons])
    torch.testing.assert_close(wanted, torch.stack(each).mean(0), rtol=EXACT, atol=EXACT)
    monkeypatch.setattr(distillation, "MOST_BYTES", answers.probes.bytes // 2)
    assert sum(len(lesson.wanted) for lesson in replace(made)._lessons) == count


def test_no_steps_change_nothing(tmp_path: Path) -> None:
    plain = chosen_merge(digits_answers(tmp_path))
    none = chosen_merge(digits_answers(tmp_path, distill=True, distill_steps=0))
    some = chosen_merge(digits_answers(tmp_path, distill=True, distill_steps=STEPS))
    for name, values in arrays(plain).items():
        np.testing.assert_array_equal(none.read(name), values)
    assert none.quality == plain.quality
    assert any((some.read(name) != values).any() for name, values in arrays(plain).items())


def test_the_undistilled_merge_stays_where_training_makes_it_worse(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, max_growth="none", match_threshold=1.0, merge_units="mean")
    side_by_side = chosen_merge(answers)
    assert side_by_side.quality is not None
    assert side_by_side.quality.merged.decisions == 1
    session = answers.session.with_options(distill=True, distill_steps=STEPS)
    chosen = chosen_merge(replace(answers, modules=answers.modules.of(session)))
    assert chosen.quality is not None
    assert chosen.quality.chosen == side_by_side.quality.chosen
    assert "distilled from the merge" in chosen.quality.candidates
    assert not chosen.fitted


def test_the_best_start_is_chosen_and_named(tmp_path: Path) -> None:
    merge = chosen_merge(digits_answers(tmp_path, distill=True, distill_steps=200, max_growth=1))
    assert merge.quality is not None
    candidates = merge.quality.candidates
    ranks = {name: own.rank for name, own in candidates.items()}
    assert merge.quality.chosen == max(ranks, key=lambda name: ranks[name])
    assert merge.quality.chosen.startswith("distilled from")
    assert merge.quality.merged == candidates[merge.quality.chosen]
    assert set(merge.fitted) == set(merge.plan.tensors)


def test_the_same_seed_gives_the_same_bits_and_another_one_others(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path)
    merge = chosen_merge(answers)
    made = distiller(answers, merge)
    one, same, other = (
        dict(d.merges(0, silent))["distilled from the merge"].read("1.weight")
        for d in (made, replace(made), replace(made, seed=1))
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_running_statistics_and_kept_tensors_stay() -> None:
    build, code = NETS["normed"]
    states = [drawn(build, seed) for seed in (1, 2)]
    options = MatchOptions(keep=("fc.bias",), merge_units="mean", max_growth=1)
    answers = answers_to(states, code, options, ProbeOptions(source="noise", count=40))
    merge = chosen_merge(answers)
    trained = dict(distiller(answers, merge).merges(0, silent))["distilled from the merge"]
    for name in ("stem.1.running_mean", "stem.1.running_var", "fc.bias"):
        np.testing.assert_array_equal(trained.read(name), merge.read(name))
    assert (trained.read("stem.1.weight") != merge.read("stem.1.weight")).any()


def test_progress_counts_the_steps_of_both_starts(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path)
    told: list[tuple[str, float, int]] = []
    merges = distiller(answers, chosen_merge(answers), steps=3).merges(
        0, lambda step, done, total: told.append((step, done, total))
    )
    assert len(list(merges)) == 2
    assert told == [("distilling", done, 6) for done in (0, 1, 2, 3, 3, 4, 5, 6)]


def test_the_distance_is_that_of_softmax_and_outputs() -> None:
    wanted = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]])
    outputs = torch.tensor([[1.0, -1.0, 0.5], [0.0, 3.5, 2.0]])
    p, q = wanted.softmax(1), outputs.softmax(1)
    divergence = (p * (p / q).log()).sum() / 2
    square = (1.0 + 0.25 + 1.0) / 6
    found = distillation_loss(outputs, wanted, spread=0.5)
    torch.testing.assert_close(found, divergence + square / 0.5)
    assert float(distillation_loss(wanted, wanted, spread=0.5)) == 0


def test_one_output_is_fitted_by_its_square_alone() -> None:
    one = torch.tensor([[1.0], [2.0]])
    assert float(distillation_loss(one + 3, one, spread=2.0)) == 4.5


def test_distillation_needs_clients_that_are_run() -> None:
    with pytest.raises(UsageError, match="`distill`: the clients have to be run"):
        match([client(1), client(2)], MatchOptions(distill=True))
    with pytest.raises(UsageError, match=r"`distill`: .* not run with `probe=none`"):
        match(
            [client(1), client(2)],
            MatchOptions(distill=True),
            model=digits_code(),
            probes=ProbeOptions(source="none"),
        )


def test_exported_programs_are_distilled(tmp_path: Path) -> None:
    paths = []
    for number in (1, 2):
        model = build().eval()
        model.load_state_dict(client(number))
        example = (torch.zeros(4, 1, 8, 8),)
        samples = torch.export.Dim("samples", min=1, max=4096)
        program = torch.export.export(model, example, dynamic_shapes=({0: samples},))
        paths.append(tmp_path / f"c{number}.pt2")
        torch.export.save(program, paths[-1])
    options = MatchOptions(distill=True, distill_steps=200, max_growth=1)
    merge = match(paths, options, probes=digits_probes(tmp_path))
    assert merge.quality is not None
    assert merge.quality.chosen.startswith("distilled from")


def test_a_model_of_which_nothing_learns_is_refused(tmp_path: Path) -> None:
    code = ModelCode(f"{__name__}:frozen", input_shapes=((1, 1, 8, 8),))
    options = MatchOptions(distill=True)
    with pytest.raises(ArchitectureError, match="`distill`: nothing of the model can be trained"):
        match([client(1), client(2)], options, model=code, probes=digits_probes(tmp_path))


def test_steps_without_distillation_are_refused() -> None:
    with pytest.raises(UsageError, match="`distill_steps` is for `distill`"):
        MatchOptions(distill_steps=5)
    with pytest.raises(UsageError, match="`distill_steps` is -1, expected a whole number from 0"):
        MatchOptions(distill=True, distill_steps=-1)
