"""Probed merges as a whole: odd clients, odd models, budgets, and no harm where none is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.api import match
from fedmerge.architecture import ModelCode
from fedmerge.errors import ArchitectureError, CheckpointError, UsageError
from fedmerge.merging import (
    Answers,
    Candidate,
    MatchOptions,
    Merge,
    candidates,
    match_by_responses,
    matched_candidates,
    open_clients,
    prepare,
    probe_clients,
    respond,
    verify,
)
from fedmerge.probes import ProbeOptions
from fedmerge.values import AVERAGE, BY_WEIGHTS, IN_PLACE, silent
from tests import digits
from tests.model_zoo import ZOO
from tests.unit.merging.test_fit import code, fresh

DIGITS = ModelCode(digits.MODEL, {}, ((2, 1, 8, 8),))
NOISE = ProbeOptions("noise", count=100, mean=(0.3,), std=(0.35,))  # a digit's pixels

State = dict[str, Tensor]


@cache
def trained(seed: int, *, shuffled: bool = False, steps: int = 150) -> State:
    """Return a client that saw all digits, or images with labels that say nothing about them."""
    torch.manual_seed(seed)
    return tuned(dict(digits.build().state_dict()), seed, steps, shuffled=shuffled)


def tuned(start: Mapping[str, Tensor], seed: int, steps: int, *, shuffled: bool = False) -> State:
    x, y = (torch.from_numpy(array[: digits.TRAINED]) for array in digits.images())
    generator = torch.Generator().manual_seed(seed)
    if shuffled:
        y = (y + 1 + seed) % 10  # another task: every digit has another's name
    model = digits.build()
    model.load_state_dict(dict(start))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x[batch]), y[batch]))
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def scaled(state: State, factor: float) -> State:
    return {name: factor * tensor for name, tensor in state.items()}


def odd_client(kind: str) -> State:
    torch.manual_seed(99)
    fresh_one = dict(digits.build().state_dict())
    return {
        "untrained": fresh_one,
        "diverged to large numbers": scaled(fresh_one, 1e4),
        "diverged to infinity": scaled(fresh_one, 1e25),
        "of another task": trained(4, shuffled=True),
    }[kind]


def merged(states: list[State], probes: ProbeOptions = NOISE, **options: Any) -> Merge:
    return match(states, MatchOptions(**options), model=DIGITS, probes=probes)


def accuracy(merge: Merge) -> float:
    return digits.quality(digits.logits(merge.state_dict()))[1]


@pytest.mark.parametrize(
    "kind", ["untrained", "diverged to large numbers", "diverged to infinity", "of another task"]
)
def test_an_odd_client_is_told_and_left_out_if_asked_to(kind: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=digits.images()[0][:100])
    real = ProbeOptions(data=str(tmp_path / "x.npz"))
    states = [trained(1), trained(2), odd_client(kind), trained(3)]
    found = merged(states, real)
    assert found.quality is not None
    assert found.quality.outliers == ("client-3",)
    assert found.quality.dropped == ()
    assert any("client-3 answers unlike the others" in text for text in found.warnings)
    rest = merged(states, real, drop_outliers=True, client_weight={"client-3": 2.0})
    assert rest.quality is not None
    assert rest.quality.dropped == ("client-3",)
    assert rest.quality.outliers == ()
    assert [client.name for client in rest.clients] == ["client-1", "client-2", "client-4"]
    assert any("client-3 was left out" in text for text in rest.warnings)
    assert accuracy(rest) > 0.75


@pytest.mark.parametrize("kind", ["untrained", "of another task"])
def test_an_odd_client_is_found_on_inputs_that_it_had_no_hand_in(kind: str) -> None:
    made_up = ProbeOptions(count=400, mean=NOISE.mean, std=NOISE.std)  # by all clients
    found = merged([trained(1), trained(2), odd_client(kind), trained(3)], made_up)
    assert found.quality is not None
    assert "synthetic" in found.quality.source
    assert found.quality.outliers == ("client-3",)
    others = merged([trained(1), trained(2), trained(3), trained(5)], made_up)
    assert others.quality is not None
    assert others.quality.outliers == ()


def test_a_merge_that_is_no_number_is_called_useless() -> None:
    huge = scaled(trained(3), 1e25)
    merge = merged([trained(1), trained(2), huge], merge_units="mean", lead="none")
    assert merge.quality is not None
    [said] = [text for text in merge.warnings if text.startswith("the merge")]
    assert "useless" in said
    assert "inf" not in said.replace("finite", "")
    fine = merged([trained(1), trained(2)], merge_units="mean", lead="none")
    assert not any("useless" in text for text in fine.warnings)


def test_among_equals_nobody_is_odd(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=digits.images()[0][:100])
    states = [trained(1), trained(2), trained(3), trained(5)]
    merge = merged(states, ProbeOptions(data=tmp_path / "x.npz"), drop_outliers=True)
    assert merge.quality is not None
    assert merge.quality.outliers == merge.quality.dropped == ()
    assert len(merge.clients) == 4


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_clients_without_finite_weights_are_left_out_if_asked_to(place: int, value: float) -> None:
    states = [trained(1), trained(2)]
    states.insert(place, trained(3) | {"3.bias": torch.full((10,), value)})
    name = f"client-{place + 1}"
    with pytest.raises(CheckpointError, match=f"{name}: '3.bias' has 10"):
        merged(states)
    merge = merged(states, drop_outliers=True)
    assert merge.quality is not None
    assert merge.quality.dropped == (name,)
    assert name not in [client.name for client in merge.clients]
    assert all(np.isfinite(merge.read(tensor)).all() for tensor in merge.plan.tensors)
    with pytest.raises(UsageError, match="leaves fewer than 2 clients"):
        merged([states[1], states[place]], drop_outliers=True)


def test_a_lead_is_not_left_out_silently(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=digits.images()[0][:100])
    real = ProbeOptions(data=tmp_path / "x.npz")
    states = [trained(1), trained(2), odd_client("diverged to infinity"), trained(3)]
    with pytest.raises(UsageError, match="'client-3', which `drop_outliers` leaves out"):
        merged(states, real, drop_outliers=True, lead="client-3")


def test_clients_of_one_start_lose_nothing_against_their_average() -> None:
    start = trained(1)
    states = [tuned(start, seed, 20) for seed in (11, 12)]
    average = match(states, MatchOptions(method="average"))
    assert accuracy(merged(states)) >= accuracy(average) - 0.01
    apart = match([trained(1), trained(2)], MatchOptions(method="average"))
    assert accuracy(apart) < accuracy(average) - 0.1  # strangers' averages are no good


def test_nobody_leads_clients_of_one_start_unless_asked_to() -> None:
    states = [tuned(trained(1), seed, 20) for seed in (11, 12)]
    alike, apart = merged(states), merged([trained(1), trained(2)])
    asked = merged(states, lead="client-1")
    assert (alike.shares_start, apart.shares_start) == (True, False)
    assert [led_ways(merge) for merge in (alike, apart, asked)] == [0, 2, 2]


def test_the_average_of_one_start_is_kept_though_another_merge_is_more_like_the_ensemble() -> None:
    states = [tuned(trained(1), 11, 100), tuned(trained(1), 12, 100, shuffled=True)]
    kept, asked = merged(states), merged(states, merge_units="fit")
    assert kept.shares_start
    assert kept.quality is not None
    assert asked.quality is not None
    assert kept.quality.chosen == AVERAGE
    assert kept.quality.merged.rank < kept.quality.candidates["equal clients, fit"].rank
    average = match(states, MatchOptions(method="average"))
    for name in average.plan.tensors:
        np.testing.assert_array_equal(kept.read(name), average.read(name))
    assert asked.quality.chosen == "equal clients, fit"


def test_clients_of_one_start_of_which_few_units_moved_merge_as_from_files() -> None:
    one, two, three = (tuned(trained(1), seed, 20) for seed in (11, 12, 13))
    order = [1, 0, *range(2, 16)]
    states = [one, two, reordered(three, order)]
    merge, files = merged(states), match(states)
    assert merge.quality is not None
    assert merge.in_place == 1 - 2 / 32
    assert merge.quality.chosen == BY_WEIGHTS
    for name in files.plan.tensors:
        np.testing.assert_array_equal(merge.read(name), files.read(name))
    average = match(states, MatchOptions(method="average"))
    assert (merge.read("1.weight") != average.read("1.weight")).any()


def reordered(state: State, order: list[int]) -> State:
    return state | {
        "1.weight": state["1.weight"][order],
        "1.bias": state["1.bias"][order],
        "3.weight": state["3.weight"][:, order],
    }


@pytest.mark.parametrize(("scale", "is_kept"), [(1.0, True), (0.4, False), (3.0, False)])
def test_an_average_in_place_is_kept_unless_its_outputs_shrank(
    scale: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = candidates.candidate_of

    def candidate(answers: Answers, name: str, merge: Merge) -> Candidate:
        found = usual(answers, name, merge)
        return replace(found, outputs=scale * found.outputs) if name == AVERAGE else found

    monkeypatch.setattr(candidates, "candidate_of", candidate)
    loud = tuned(trained(1), 13, 300, shuffled=True)
    loud |= {name: 8 * loud[name] for name in ("3.weight", "3.bias")}
    states = [tuned(trained(1), seed, 20) for seed in (11, 12)]
    merge = merged([*states, loud])
    assert merge.quality is not None
    average, best = merge.quality.candidates[AVERAGE], merge.quality.best_client
    assert merge.stays_in_place
    assert average.decisions < merge.quality.clients[best].decisions  # the ensemble is one client
    assert (merge.quality.chosen == AVERAGE) == is_kept
    assert (accuracy(merge) > 0.4) == is_kept  # and that one is wrong


def test_the_average_of_one_start_is_not_kept_where_a_client_is_more_like_the_ensemble() -> None:
    states = [rescaled(tuned(trained(1), seed, 20), seed) for seed in (11, 12, 13)]
    merge = merged(states, effort="fast")
    assert merge.shares_start
    assert merge.quality is not None
    assert merge.quality.chosen == "equal clients, fit"
    assert accuracy(merge) > accuracy(match(states, MatchOptions(method="average"))) + 0.1


def test_units_of_one_start_are_fitted_in_place_where_no_average_works() -> None:
    tuned_ones = [tuned(trained(1), seed, 20) for seed in (11, 12, 13)]
    states = [rescaled(state, seed) for seed, state in enumerate(tuned_ones, 11)]
    found = merged(states, effort="fast", max_growth=1)
    assert found.quality is not None
    assert found.quality.chosen == IN_PLACE
    assert found.options.merge_units == "fit-in-place"
    distances = {name: own.distance for name, own in found.quality.candidates.items()}
    assert distances[IN_PLACE] < min(distances[AVERAGE], distances[BY_WEIGHTS]) / 10
    assert accuracy(found) > accuracy(match(states, MatchOptions(method="average"))) + 0.1
    alike = merged(tuned_ones, effort="fast", max_growth=1)  # whose average works
    assert alike.quality is not None
    assert alike.quality.chosen == AVERAGE
    assert IN_PLACE not in alike.quality.candidates


def rescaled(state: State, seed: int) -> State:
    """Return the same function, whose hidden units are larger or smaller than they were."""
    powers = torch.empty(16).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    by = 10**powers
    return state | {
        "1.weight": state["1.weight"] * by[:, None],
        "1.bias": state["1.bias"] * by,
        "3.weight": state["3.weight"] / by,
    }


def led_ways(merge: Merge) -> int:
    assert merge.quality is not None
    return sum(" leads, " in name for name in merge.quality.candidates)


def test_the_merge_is_among_its_candidates_and_the_best_of_them() -> None:
    merge = merged([trained(1), trained(2)])
    assert merge.quality is not None
    found = merge.quality.candidates
    assert merge.quality.merged == found[merge.quality.chosen]
    assert merge.quality.merged.rank == max(own.rank for own in found.values())
    assert next(iter(found)) == "element-wise average"
    tried = [name for name in found if ", " in name]
    assert {name.rpartition(", ")[2] for name in tried} == {"mean", "fit"}
    assert {"client client-1", "client client-2"} < found.keys()
    assert any(name.startswith("refined from ") for name in found)
    assert merge.quality.samples == 4 * 20  # held out, as they are and changed thrice


@pytest.mark.parametrize("name", ["conv autoencoder", "distances and bilinear", "u-net"])
def test_groups_without_responses_stay_within_the_budget(name: str) -> None:
    states = [dict(fresh(name, seed).state_dict()) for seed in (1, 2, 3)]
    probes = ProbeOptions("noise", count=40)
    merge = match(states, MatchOptions(max_growth=1.2), model=code(name), probes=probes)
    assert merge.growth <= 1.2
    assert merge.quality is not None


def test_clients_of_different_widths_are_merged() -> None:
    states = [digits.client(1, 16), digits.client(2, 20)]
    merge = merged(states, max_growth=1.5)
    assert merge.quality is not None
    assert "element-wise average" not in merge.quality.candidates
    assert 20 <= merge.groups[0].width <= 30
    assert len(merge.state_dict()["1.bias"]) == merge.groups[0].width


@pytest.mark.parametrize("units", ["mean", "fit"])
def test_verify_recomputes_all_that_follows_from_the_files(units: str, tmp_path: Path) -> None:
    files = digits.save_clients(tmp_path, 2)
    merge = match(
        files,
        MatchOptions(merge_units=units, lead="c2"),  # type: ignore[arg-type]
        model=DIGITS,
        probes=NOISE,
        output=tmp_path / "out.pt",
    )
    found = verify(tmp_path / "out.pt", files)
    assert found.ok
    assert found.recomputed == 2
    assert found.fitted == len(merge.fitted) == (4 if units == "fit" else 0)
    if units == "mean":
        own = merge.placements[1][merge.groups[0].name].indices
        assert torch.equal(merge.state_dict()["1.weight"][own], digits.client(2)["1.weight"])


class TwoInputs(nn.Module):
    """Numbers, a mask and tokens in; a dictionary out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(6, 4), nn.Linear(7, 8)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        seen = torch.cat([x, self.tokens(tokens)], dim=1)
        hidden = self.norm(self.body(seen)).relu()
        return {"logits": self.head(hidden), "hidden": hidden.sum(1)}


def test_models_with_several_inputs_and_named_outputs_are_probed() -> None:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(dict(TwoInputs().state_dict()))
    several = ModelCode(f"{__name__}:TwoInputs", {}, ((2, 3), (2,)), ("float32", "long"))
    merge = match(states, MatchOptions(max_growth=1.3), model=several, probes=ProbeOptions("noise"))
    assert merge.quality is not None
    assert merge.quality.source == "noise"
    assert any(name.endswith(", fit") for name in merge.quality.candidates)
    assert int(merge.state_dict()["norm.num_batches_tracked"]) == 0


class Choosy(nn.Module):
    """A net that runs on a batch of two only, which planning uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != 2:
            raise RuntimeError("only two at a time\nand not a line more")
        out: Tensor = self.second(self.first(x).relu())
        return out


def choosy() -> tuple[list[State], ModelCode]:
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        states.append(dict(Choosy().state_dict()))
    return states, ModelCode(f"{__name__}:Choosy", {}, ((2, 4),))


def test_a_model_that_does_not_run_on_probes_is_merged_by_weights_and_says_so() -> None:
    states, model = choosy()
    merge = match(states, model=model)
    plain = match(states)
    assert merge.quality is None
    assert merge.warnings[-1] == (  # without files and lines: records don't depend on folders
        "units were matched by their weights alone, as no probes run: the model does not run on "
        "inputs of shape (125, 4): RuntimeError: only two at a time and not a line more"
    )
    for name, tensor in plain.state_dict().items():
        assert torch.equal(merge.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("options", "probes"),
    [
        ({}, ProbeOptions("noise")),
        ({}, ProbeOptions(count=20)),
        ({"merge_units": "fit"}, ProbeOptions()),
        ({"drop_outliers": True}, ProbeOptions()),
    ],
)
def test_where_probes_were_asked_for_a_model_that_can_not_is_refused(
    options: dict[str, Any], probes: ProbeOptions
) -> None:
    states, model = choosy()
    expected = r"the model does not run on inputs of shape \(\d+, 4\): RuntimeError: only two at"
    with pytest.raises(ArchitectureError, match=expected):
        match(states, MatchOptions(**options), model=model, probes=probes)


@pytest.mark.parametrize("wish", [{"merge_units": "fit"}, {"effort": "thorough"}])
def test_what_only_probes_can_do_is_refused_without_them(wish: dict[str, Any]) -> None:
    states, model = choosy()
    with pytest.raises(UsageError, match="the clients have to be run for it"):
        match(states, MatchOptions(**wish))
    with pytest.raises(UsageError, match="the clients are not run with `probe=none`"):
        match(states, MatchOptions(**wish), model=model, probes=ProbeOptions("none"))


def test_a_tied_weight_is_written_once_and_averaged() -> None:
    name = "tied language model"
    states = [dict(fresh(name, seed).state_dict()) for seed in (1, 2)]
    probes = ProbeOptions("noise", count=40)
    options = MatchOptions(merge_units="fit")
    merge = match(states, options, model=code(name), probes=probes)
    tied = [n for n in merge.state_dict() if n.startswith(("encoder", "decoder.weight"))]
    assert not set(tied) & set(merge.fitted)
    assert merge.fitted


def test_kept_tensors_stay_the_first_clients() -> None:
    states = [trained(1), trained(2)]
    merge = merged(states, keep=("3.*",), merge_units="fit", lead="none")
    found = merge.state_dict()
    assert torch.equal(found["3.weight"], states[0]["3.weight"])
    assert not {"3.weight", "3.bias"} & set(merge.fitted)


def test_the_same_inputs_options_and_seed_give_the_same_numbers() -> None:
    states = [trained(1), trained(2)]
    one, two = (merged(states).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = merged(states, replace(NOISE, mean=(0.5,))).state_dict()
    same = {n: t.shape for n, t in one.items()} == {n: t.shape for n, t in other.items()}
    assert not same or not all(torch.equal(one[name], other[name]) for name in one)


def test_every_model_of_the_zoo_with_one_input_is_probed_without_a_note() -> None:
    heads = ("attention with growing heads", "attention that counts its heads", "llama")
    for name in (*heads, "convnext", "gru on packed sequences"):
        assert len(ZOO[name].shapes) == 1
        states = [dict(fresh(name, seed).state_dict()) for seed in (1, 2)]
        probes = ProbeOptions("noise", count=20)
        merge = match(states, model=code(name), probes=probes)
        assert merge.quality is not None
        assert np.isfinite(merge.quality.merged.explained), name


@cache
def of_classes(classes: tuple[int, ...], seed: int) -> State:
    """Return a client that saw some digits only."""
    x, y = (torch.from_numpy(array[: digits.TRAINED]) for array in digits.images())
    own = torch.isin(y, torch.tensor(classes)).nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = digits.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(150):
        batch = own[torch.randint(len(own), (64,), generator=generator)]
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x[batch]), y[batch]))
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


SKEWED = ((0, 1, 2, 3, 4, 5), (4, 5, 6, 7), (7, 8, 9, 0))
COUNTS = {f"client-{k + 1}": [float(c in own) for c in range(10)] for k, own in enumerate(SKEWED)}


def test_with_class_counts_the_ensemble_and_some_candidates_go_by_class(tmp_path: Path) -> None:
    states = [of_classes(own, seed) for seed, own in enumerate(SKEWED)]
    counted, plain = (merged(states, NOISE, class_counts=c) for c in (COUNTS, None))
    assert counted.quality is not None
    assert plain.quality is not None
    extra = set(counted.quality.candidates) - set(plain.quality.candidates)
    assert {name.partition(", ")[2] for name in extra} >= {"mean, classes alike"}
    assert counted.quality.clients != plain.quality.clients  # another ensemble


@pytest.mark.parametrize("is_by_class", [True, False])
def test_a_merge_whose_last_layer_ignores_class_counts_is_recorded_as_such(
    is_by_class: bool, tmp_path: Path
) -> None:
    states = [of_classes(own, seed) for seed, own in enumerate(SKEWED)]
    names = [f"client-{k + 1}" for k in range(3)]
    files = [digits.save(s, tmp_path / f"{n}.pt") for n, s in zip(names, states, strict=True)]
    options = MatchOptions(class_counts=COUNTS, lead="none", merge_units="mean")
    session = prepare(open_clients(files, options.reading), options, model=DIGITS)
    answers = probe_clients(session, NOISE, silent)
    responses = respond(answers)
    matched = match_by_responses(session, responses, 1.5, silent)
    by_class, alike = matched_candidates(answers, matched, [None], responses.steady, silent)
    assert not np.allclose(by_class.merge.read("3.weight"), alike.merge.read("3.weight"))
    chosen = by_class if is_by_class else alike
    chosen.merge.write(tmp_path / "out.pt")
    assert verify(tmp_path / "out.pt", files).ok
    assert (chosen.merge.options.class_counts is not None) == is_by_class


_ONLY = digits.build()
_BACKBONE = nn.Linear(64, 16)


def the_same_module() -> nn.Module:
    """Return one and the same module on every call."""
    return _ONLY


def a_shared_backbone() -> nn.Module:
    """Return a new module around a part that all of them share."""
    return nn.Sequential(nn.Flatten(), _BACKBONE, nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize("factory", ["the_same_module", "a_shared_backbone"])
def test_a_factory_may_return_what_it_returned_before(factory: str) -> None:
    states = [trained(seed) for seed in range(3)]
    wanted = merged(states)
    code = ModelCode(f"{__name__}:{factory}", {}, ((2, 1, 8, 8),))
    found = match(states, MatchOptions(), model=code, probes=NOISE)
    assert found.quality is not None
    assert wanted.quality is not None
    assert found.quality.to_json() == wanted.quality.to_json()
    each = [own.decisions for own in found.quality.clients.values()]
    assert each != [1.0] * 3  # one module in three clients' places would agree with itself


BUILDS = 0


def counted() -> nn.Module:
    """Return a module, and count that it was built."""
    global BUILDS
    BUILDS += 1
    return digits.build()


@pytest.mark.parametrize("clients", [2, 4])
@pytest.mark.parametrize("probes", [NOISE, ProbeOptions(count=40)])
def test_a_module_is_built_once_per_client(clients: int, probes: ProbeOptions) -> None:
    global BUILDS
    BUILDS = 0
    code = ModelCode(f"{__name__}:counted", {}, ((2, 1, 8, 8),))
    states = [trained(seed) for seed in range(clients)]
    merge = match(states, MatchOptions(), model=code, probes=probes)
    assert merge.quality is not None
    assert len(merge.quality.candidates) > 2  # of which each was run
    assert clients + 2 >= BUILDS


def test_files_that_can_not_be_run_merge_as_they_do_from_files() -> None:
    """There is one way to merge by weights, whoever takes it."""
    states = [tuned(trained(1), seed, 20) for seed in (11, 12)]
    code = ModelCode(f"{__name__}:runs_on_few_samples", {}, ((2, 1, 8, 8),))
    found, files = match(states, model=code), match(states)
    assert any("no probes run" in warning for warning in found.warnings)
    assert found.growth == files.growth == 1.0
    for name in files.plan.tensors:
        np.testing.assert_array_equal(found.read(name), files.read(name))


class FewSamples(nn.Module):
    """A layer that refuses many samples at once."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 8:
            raise ValueError("too many")
        return x.flatten(1)


def runs_on_few_samples() -> nn.Module:
    _, *layers = digits.build()
    return nn.Sequential(FewSamples(), *layers)
