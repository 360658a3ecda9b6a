"""What units matter to the ensemble's answers, and merges whose units stand for one client's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedmerge.api import match
from fedmerge.architecture import ModelCode
from fedmerge.measuring import verify
from fedmerge.merging import (
    Answers,
    MatchOptions,
    expand_sources,
    open_clients,
    prepare,
    probe_clients,
    unit_importance,
)
from fedmerge.probes import ProbeOptions
from fedmerge.values import silent
from tests.digits import MODEL, client, images

CODE = ModelCode(MODEL, {}, ((2, 1, 8, 8),))


def probes(folder: Path) -> ProbeOptions:
    np.savez(folder / "x.npz", x=images()[0][:200])
    return ProbeOptions(data=folder / "x.npz")


def answers(states: list[dict[str, torch.Tensor]], folder: Path, code: ModelCode) -> Answers:
    options = MatchOptions()
    session = prepare(open_clients(expand_sources(states), options.reading), options, model=code)
    return probe_clients(session, probes(folder), silent)


def without(state: dict[str, torch.Tensor], unit: int) -> dict[str, torch.Tensor]:
    last = [name for name in state if name.endswith("weight")][-1]
    changed = {name: values.clone() for name, values in state.items()}
    changed[last][:, unit] = 0
    return changed


def test_units_that_nobody_reads_do_not_matter_and_others_as_much_as_they_change(
    tmp_path: Path,
) -> None:
    states = [without(client(1), 3), client(2)]
    given = answers(states, tmp_path, CODE)
    group = given.session.plan.groups[-1].name
    one, other = (own[group] for own in unit_importance(given, silent))
    assert one[3] == 0
    assert (np.delete(one, 3) >= 0).all()
    x = torch.from_numpy(images()[0][:200])

    def change(unit: int) -> float:
        """Return the divergence of answers without a unit of the second client, by running it."""
        models = [CODE.build() for _ in range(3)]
        each = zip(models, [*states, without(states[1], unit)], strict=True)
        with torch.no_grad():
            a, b, cut = (m.load_state_dict(s) and m.eval()(x).double() for m, s in each)
            before, after = (((a + own) / 2).log_softmax(1) for own in (b, cut))
        return float((before.exp() * (before - after)).sum(1).mean())

    changes = np.array([change(unit) for unit in range(len(other))])
    assert np.corrcoef(np.argsort(np.argsort(changes)), np.argsort(np.argsort(other)))[0, 1] > 0.7


class NoGradient(nn.Module):
    """A digits net that runs without gradients, whoever asks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = CODE.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(self.net(x))


def test_a_model_without_gradients_has_units_that_matter_alike(tmp_path: Path) -> None:
    code = ModelCode(f"{__name__}:NoGradient", {}, ((2, 1, 8, 8),))
    states = [{f"net.{n}": t for n, t in client(seed).items()} for seed in (1, 2)]
    for own in unit_importance(answers(states, tmp_path, code), silent):
        assert own
        assert all((values == 1).all() for values in own.values())


def files(folder: Path) -> list[Path]:
    found = [folder / f"c{seed}.pt" for seed in (1, 2, 3)]
    for seed, file in enumerate(found, start=1):
        torch.save(client(seed), file)
    return found


def test_whose_units_stand_for_all_is_recorded_and_checked(tmp_path: Path) -> None:
    sources, output = files(tmp_path), tmp_path / "global.pt"
    merge = match(sources, model=CODE, probes=probes(tmp_path), output=output, effort="fast")
    assert merge.leaders
    for group, leaders in merge.leaders.items():
        assert len(leaders) == merge.widths[group]
        assert set(leaders.tolist()) <= {0, 1, 2}
    assert verify(output, sources).ok
    beside = tmp_path / "global.pt.json"
    record = json.loads(beside.read_text())
    leaders = record["groups"][0]["leaders"]
    for wrong, told in (
        ([*leaders, 0], "leaders of other units"),
        ([7, *leaders[1:]], "a leader that does not own its unit"),
    ):
        record["groups"][0]["leaders"] = wrong
        beside.write_text(json.dumps(record))
        checked = verify(output, sources)
        assert not checked.ok
        assert told in " ".join(checked.differences)


def test_tensors_that_are_not_fitted_are_those_of_the_leaders(tmp_path: Path) -> None:
    sources = files(tmp_path)
    options = {"model": CODE, "probes": probes(tmp_path), "effort": "fast", "lead": "none"}
    merge = match(sources, merge_units="fit", **options)  # type: ignore[arg-type]
    first = merge.groups[0].name
    bias = next(
        n for n, t in merge.plan.tensors.items() if t.produces == {first} and len(t.axes) == 1
    )
    averaged = merge.averaged(bias)
    for client_number, own in enumerate(merge.session.aligned):
        places = merge.placements[client_number][first].indices
        led = merge.leaders[first][places] == client_number
        np.testing.assert_allclose(averaged[places[led]], own.read(bias)[led], rtol=1e-6)
        if not led.all():
            assert not np.allclose(averaged[places[~led]], own.read(bias)[~led], rtol=1e-3)
