"""The frontier: sizes against agreement with the ensemble, from one set of probes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmerge.api import frontier, match
from fedmerge.architecture import ModelCode
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.merging import GROWTHS, Frontier, MatchOptions, by_probes
from fedmerge.probes import ProbeOptions
from tests.digits import MODEL, client, images

CODE = ModelCode(MODEL, input_shapes=((1, 1, 8, 8),))
ONE_NET = 64 * 16 + 16 + 16 * 10 + 10


def found(folder: Path, options: MatchOptions | None = None, clients: int = 3) -> Frontier:
    states = [client(number) for number in range(1, clients + 1)]
    return frontier(states, options, model=CODE, probes=probes(folder))


def probes(folder: Path) -> ProbeOptions:
    np.savez(folder / "probes.npz", x=images()[0][:300])
    return ProbeOptions(data=folder / "probes.npz")


def test_larger_merges_are_more_alike_the_ensemble(tmp_path: Path) -> None:
    sizes = found(tmp_path)
    narrowest, *_, widest = sizes.merges
    assert widest.agreement.decisions > narrowest.agreement.decisions
    assert widest.agreement.explained > narrowest.agreement.explained
    assert max(own.agreement.decisions for own in sizes.clients) < narrowest.agreement.decisions


def test_every_budget_is_kept_and_a_size_is_listed_once(tmp_path: Path) -> None:
    sizes = found(tmp_path)
    assert [point.budget for point in sizes.merges] == [1.0, 1.25, 1.5, 2.0, 3.0]
    for point in sizes.merges:
        assert point.budget is not None
        assert point.growth == point.parameters / ONE_NET <= point.budget
    parameters = [point.parameters for point in sizes.merges]
    assert sorted(set(parameters)) == parameters


def test_the_ensemble_is_itself_and_as_large_as_all_clients(tmp_path: Path) -> None:
    sizes = found(tmp_path, clients=2)
    assert sizes.ensemble.agreement.decisions == 1
    assert sizes.ensemble.agreement.explained == 1
    assert sizes.ensemble.parameters == sizes.merge.session.ensemble_parameters == 2 * ONE_NET
    assert sizes.to_json()["points"][-1] == sizes.ensemble.to_json()


def test_clients_have_their_own_size_and_agreement(tmp_path: Path) -> None:
    sizes = found(tmp_path)
    assert sizes.merge.quality is not None
    assert {p.name: p.agreement for p in sizes.clients} == dict(sizes.merge.quality.clients)
    assert [point.parameters for point in sizes.clients] == [ONE_NET] * 3


def test_the_merge_is_the_one_that_match_gives(tmp_path: Path) -> None:
    options = MatchOptions(max_growth=1.4)
    sizes = found(tmp_path, options)
    states = [client(number) for number in (1, 2, 3)]
    alone = match(states, options, model=CODE, probes=probes(tmp_path))
    for name, values in alone.state_dict().items():
        torch.testing.assert_close(sizes.merge.state_dict()[name], values, rtol=0, atol=0)
    assert 1.4 in [point.budget for point in sizes.merges]
    assert 1.4 not in GROWTHS


def test_copies_need_one_size_only(tmp_path: Path) -> None:
    sizes = frontier([client(1), client(1)], model=CODE, probes=probes(tmp_path))
    assert [point.parameters for point in sizes.merges] == [ONE_NET]
    assert sizes.merges[0].agreement.decisions == 1


def test_responses_and_curves_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"unit_responses": 0, "select_all": 0, "choose_widths": 0}
    for name in calls:
        original = getattr(by_probes, name)

        def counted(*args: object, _name: str = name, _run: object = original, **more: object):  # type: ignore[no-untyped-def]
            calls[_name] += 1
            assert callable(_run)
            return _run(*args, **more)

        monkeypatch.setattr(by_probes, name, counted)
    assert len(found(tmp_path).merges) == 5
    assert calls == {"unit_responses": 3, "select_all": 1, "choose_widths": 6}


def test_a_frontier_needs_clients_that_are_run() -> None:
    with pytest.raises(UsageError, match="`frontier`: the clients have to be run"):
        frontier([client(1), client(2)])


def test_a_model_that_does_not_run_on_the_probes_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", x=np.zeros((40, 1, 9, 9), np.float32))
    wrong = ProbeOptions(data=tmp_path / "wrong.npz")
    with pytest.raises(
        ArchitectureError,
        match=r"does not run on inputs of shape \(32, 1, 9, 9\): RuntimeError: mat1",
    ):
        frontier([client(1), client(2)], model=CODE, probes=wrong)
