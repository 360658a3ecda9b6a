"""Refinement: training a merge, or a client in its place, to answer as the ensemble does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.api import match
from fedmerge.architecture import ModelCode
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.merging import (
    SHARES,
    SPENDING,
    Answers,
    MatchOptions,
    Merge,
    Refiner,
    Spending,
    between,
    candidates,
    choose_merge,
    expand_sources,
    open_clients,
    outputs_on,
    prepare,
    probe_clients,
    refinement_loss,
    respond,
    started_from,
    with_weights,
)
from fedmerge.probes import Augmentation, ProbeOptions, Probes
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
    answers, by_weights = with_weights(answers)
    return choose_merge(answers, by_weights, respond(answers), ProbeOptions(), silent)


def arrays(merge: Merge) -> dict[str, Array]:
    return {name: merge.read(name) for name in merge.plan.tensors}


def outputs(answers: Answers, merge: Merge) -> Tensor:
    return outputs_on(answers.modules.merged(arrays(merge)), answers.sets.judging, device="cpu")


def refiner(answers: Answers, merge: Merge) -> Refiner:
    members, sets = range(len(answers.outputs)), answers.sets
    return Refiner(
        answers.modules, merge, sets.fitting, members, augmentation=sets.augmentation, seed=0
    )


def test_what_is_fitted_to_made_up_inputs_is_judged_by_inputs_made_otherwise(
    tmp_path: Path,
) -> None:
    states = [client(k) for k in (1, 2)]
    made, given = (
        answers_to(states, digits_code(), MatchOptions(effort="fast"), probing)
        for probing in (ProbeOptions(count=200), digits_probes(tmp_path))
    )
    held_out, judging = made.sets.held_out.inputs[0], made.sets.judging.inputs[0]
    assert torch.equal(judging[: len(held_out)], held_out)
    others = judging[len(held_out) :]
    assert len(others) == 200
    known = torch.cat([made.sets.fitting.inputs[0], held_out]).flatten(1)
    assert torch.cdist(others.flatten(1), known).min() > 1e-2
    sure, half = (
        torch.stack([module(own) for module in made.modules.clients]).softmax(2).amax(2).mean()
        for own in (held_out, others)
    )
    assert half < sure - 0.05  # clients doubt them, as they do real ones that they never saw
    real = given.sets.held_out.inputs[0]
    assert len(given.sets.judging) == 4 * len(real)  # as they are, and three changed copies


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
    trained = refiner(answers, merge).refine(start, STEPS, silent)
    assert (np.abs(trained.read("3.weight")[:, others]).max(axis=0) > 1e-3).all()
    moved = np.abs(trained.read("1.weight")[others] - merge.read("1.weight")[others])
    assert (moved.max(axis=1) > 1e-3).all()


def test_training_comes_closer_to_the_ensemble_from_both_starts(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, max_growth=1, lead="none", merge_units="mean", effort="fast")
    merge = chosen_merge(answers)
    made = refiner(answers, merge)
    for start in (merge, started_from(merge, 1)):
        trained = made.refine(start, 200, silent)
        before, after = (answers.agreement(outputs(answers, m)) for m in (start, trained))
        assert after.distance < 0.8 * before.distance
        assert after.explained > before.explained


def test_lessons_are_changed_probes_with_the_ensembles_answers(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, effort="fast")
    made = refiner(answers, chosen_merge(answers))
    lessons = [made._lesson(number) for number in range(4)]
    inputs = torch.cat([lesson.inputs[0] for lesson in lessons])
    probes = Probes((inputs,), "data")
    each = [outputs_on(answers.modules.client(k), probes, device="cpu") for k in range(3)]
    wanted = torch.cat([lesson.wanted for lesson in lessons])
    torch.testing.assert_close(wanted, torch.stack(each).mean(0), rtol=EXACT, atol=EXACT)
    known = answers.sets.fitting.inputs[0].flatten(1)
    distances = torch.cdist(inputs.flatten(1), known).min(dim=1).values
    assert (distances > 0.1).float().mean() > 0.8  # hardly any is a probe as it was
    unchanged = replace(made, augmentation=Augmentation(), lessons=[])
    same = torch.cdist(unchanged._lesson(0).inputs[0].flatten(1), known).min(dim=1).values
    assert same.max() < 1e-3


def test_lessons_come_again_where_memory_ends(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, effort="fast")
    made = refiner(answers, chosen_merge(answers))
    first = made._lesson(0)
    assert made._lesson(5) is not first
    few = replace(made, lessons=[], memory=2 * first.bytes)
    assert few._lesson(2) is few._lesson(0)
    assert few._lesson(1) is not few._lesson(0)
    assert len(few.lessons) == 2


def test_the_effort_says_whether_and_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPENDING, "normal", Spending(200, 1e12))
    monkeypatch.setitem(SPENDING, "thorough", Spending(200, 1e12, rounds=3))
    found = {
        effort: chosen_merge(digits_answers(tmp_path, effort=effort))
        for effort in ("fast", "normal", "thorough")
    }
    refined = {effort: _refined(merge) for effort, merge in found.items()}
    assert not refined["fast"]
    assert len(refined["normal"]) == 3  # one from each start, and the better one for longer
    assert len(refined["thorough"]) > 3
    distances = {effort: _distance(merge) for effort, merge in found.items()}
    assert distances["thorough"] < distances["normal"] < distances["fast"]


def _refined(merge: Merge) -> list[str]:
    assert merge.quality is not None
    return [name for name in merge.quality.candidates if name.startswith("refined ")]


def _distance(merge: Merge) -> float:
    assert merge.quality is not None
    return merge.quality.merged.distance


def test_steps_that_cost_too_much_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = digits_answers(tmp_path)
    made = refiner(answers, chosen_merge(answers))
    step = 64 * (3 + 3) * (64 * 16 + 16 * 10)  # one trained net and three clients, 64 images
    assert made.affordable_steps(Spending(400, 100.5 * step)) in range(60, 101)  # it may be wider
    assert made.affordable_steps(Spending(400, 1e15)) == 400
    monkeypatch.setitem(SPENDING, "normal", Spending(400, 10.0 * step))
    assert not _refined(chosen_merge(answers))


def test_the_ensemble_itself_is_not_refined(tmp_path: Path) -> None:
    options = {"max_growth": "none", "match_threshold": 1.0, "merge_units": "mean"}
    merge = chosen_merge(digits_answers(tmp_path, **options, effort="normal"))
    assert merge.quality is not None
    assert merge.quality.merged.decisions == 1  # side by side it is the ensemble
    assert not _refined(merge)  # and nothing is left to be gained
    assert not merge.quality.chosen.startswith("refined")
    assert not merge.fitted


def test_a_place_between_has_that_share_of_what_training_changed(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, effort="fast")
    start = chosen_merge(answers)
    end = refiner(answers, start).refine(start, STEPS, silent)
    quarter = arrays(between(start, end, 0.25))
    for name, values in arrays(start).items():
        wanted = 0.75 * values + 0.25 * end.read(name)
        np.testing.assert_allclose(quarter[name], wanted, rtol=EXACT, atol=EXACT)
        assert quarter[name].dtype == values.dtype
        assert (end.read(name) != values).any()
    assert between(start, end, 1.0) is end


def test_training_that_goes_too_far_is_taken_back_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Refiner.refine

    def too_far(own: Refiner, start: Merge, steps: int, *given: Any, **named: Any) -> Merge:
        return between(start, usual(own, start, steps, *given, **named), 3.0)

    monkeypatch.setattr(Refiner, "refine", too_far)
    found = {}
    for shares in (SHARES, (1.0,)):
        monkeypatch.setattr(candidates, "SHARES", shares)
        found[shares] = chosen_merge(digits_answers(tmp_path, max_growth=1))
    named = found[SHARES].quality
    assert named is not None
    assert "% of the way" in named.chosen
    assert _distance(found[SHARES]) < 0.95 * _distance(found[1.0,])


def test_the_best_start_is_chosen_and_named(tmp_path: Path) -> None:
    merge = chosen_merge(digits_answers(tmp_path, max_growth=1))
    assert merge.quality is not None
    candidates = merge.quality.candidates
    ranks = {name: own.rank for name, own in candidates.items()}
    assert merge.quality.chosen == max(ranks, key=lambda name: ranks[name])
    assert merge.quality.chosen.startswith("refined ")
    assert merge.quality.merged == candidates[merge.quality.chosen]
    assert set(merge.fitted) == set(merge.plan.tensors)


def test_the_same_seed_gives_the_same_bits_and_another_one_others(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, effort="fast")
    merge = chosen_merge(answers)
    made = refiner(answers, merge)
    one, same, other = (
        own.refine(merge, STEPS, silent).read("1.weight")
        for own in (made, replace(made, lessons=[]), replace(made, lessons=[], seed=1))
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_running_statistics_and_kept_tensors_stay() -> None:
    build, code = NETS["normed"]
    states = [drawn(build, seed) for seed in (1, 2)]
    options = MatchOptions(keep=("fc.bias",), merge_units="mean", max_growth=1, effort="fast")
    answers = answers_to(states, code, options, ProbeOptions(source="noise", count=40))
    merge = chosen_merge(answers)
    trained = refiner(answers, merge).refine(merge, STEPS, silent)
    for name in ("stem.1.running_mean", "stem.1.running_var", "fc.bias"):
        np.testing.assert_array_equal(trained.read(name), merge.read(name))
    assert (trained.read("stem.1.weight") != merge.read("stem.1.weight")).any()


def test_progress_counts_the_steps(tmp_path: Path) -> None:
    answers = digits_answers(tmp_path, effort="fast")
    merge = chosen_merge(answers)
    told: list[tuple[str, float, int]] = []
    refiner(answers, merge).refine(merge, 3, lambda *own: told.append(own))
    assert told == [("refining", done, 3) for done in range(4)]


def test_the_distance_is_that_of_softmax_and_outputs() -> None:
    wanted = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]])
    outputs = torch.tensor([[1.0, -1.0, 0.5], [0.0, 3.5, 2.0]])
    p, q = wanted.softmax(1), outputs.softmax(1)
    divergence = (p * (p / q).log()).sum() / 2
    square = (1.0 + 0.25 + 1.0) / 6
    found = refinement_loss(outputs, wanted, spread=0.5)
    torch.testing.assert_close(found, divergence + square / 0.5)
    assert float(refinement_loss(wanted, wanted, spread=0.5)) == 0


def test_one_output_is_fitted_by_its_square_alone() -> None:
    one = torch.tensor([[1.0], [2.0]])
    assert float(refinement_loss(one + 3, one, spread=2.0)) == 4.5


def test_refinement_needs_clients_that_are_run() -> None:
    with pytest.raises(UsageError, match="`effort`: the clients have to be run"):
        match([client(1), client(2)], MatchOptions(effort="thorough"))
    with pytest.raises(UsageError, match=r"`effort`: .* not run with `probe=none`"):
        match(
            [client(1), client(2)],
            MatchOptions(effort="thorough"),
            model=digits_code(),
            probes=ProbeOptions(source="none"),
        )


def test_exported_programs_are_refined(tmp_path: Path) -> None:
    paths = []
    for number in (1, 2):
        model = build().eval()
        model.load_state_dict(client(number))
        example = (torch.zeros(4, 1, 8, 8),)
        samples = torch.export.Dim("samples", min=1, max=4096)
        program = torch.export.export(model, example, dynamic_shapes=({0: samples},))
        paths.append(tmp_path / f"c{number}.pt2")
        torch.export.save(program, paths[-1])
    merge = match(paths, MatchOptions(max_growth=1), probes=digits_probes(tmp_path))
    assert merge.quality is not None
    assert merge.quality.chosen.startswith("refined ")


def test_a_model_of_which_nothing_learns_is_merged_unrefined_or_refused(tmp_path: Path) -> None:
    code = ModelCode(f"{__name__}:frozen", input_shapes=((1, 1, 8, 8),))
    clients = [client(1), client(2)]
    merge = match(clients, model=code, probes=digits_probes(tmp_path))
    assert "the merge was not refined: nothing of the model can be trained" in merge.warnings
    with pytest.raises(ArchitectureError, match="nothing of the model can be trained"):
        match(clients, model=code, probes=digits_probes(tmp_path), effort="thorough")
