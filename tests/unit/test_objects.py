"""Objects in Python: clients, models and data that are no files."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fedmerge
from fedmerge.notebook import NotebookProgress, default_progress
from fedmerge.values import silent
from tests import digits

WRONG: Any = 3
NOISE: dict[str, Any] = {"probe": "noise", "probe_count": 60}


class Net(nn.Module):
    """A perceptron for digits under the names of `digits.build`."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        for number, layer in enumerate(digits.build(hidden)):
            self.add_module(str(number), layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def states() -> list[dict[str, Tensor]]:
    return [digits.client(seed) for seed in (1, 2)]


def modules() -> list[Net]:
    built = [Net(), Net()]
    for module, state in zip(built, states(), strict=True):
        module.load_state_dict(state)
    return built


def arrays(merge: fedmerge.Merge) -> dict[str, Any]:
    return {name: merge.read(name) for name in merge.plan.tensors}


def same(one: fedmerge.Merge, other: fedmerge.Merge) -> bool:
    pairs = zip(arrays(one).items(), arrays(other).items(), strict=True)
    return all(a == b and np.array_equal(x, y) for (a, x), (b, y) in pairs)


def data() -> tuple[np.ndarray, np.ndarray]:
    x, y = digits.images()
    return x[-200:], y[-200:]


class Digits(Dataset[tuple[Tensor, int]]):
    """Samples one by one."""

    def __len__(self) -> int:
        return len(data()[1])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = data()
        return torch.from_numpy(x[index]), int(y[index])


class Stream(IterableDataset[tuple[Tensor, int]]):
    """Samples of which nobody knows how many there are."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(Digits()[k] for k in range(len(data()[1])))


def test_files_state_dicts_and_names_merge_alike(tmp_path: Path) -> None:
    files = [digits.save(s, tmp_path / f"{n}.pt") for n, s in zip("ab", states(), strict=True)]
    listed, named = fedmerge.match(states()), fedmerge.match(dict(zip("ab", states(), strict=True)))
    from_files = fedmerge.match(files)
    assert same(listed, from_files)
    assert same(named, from_files)
    assert [client.name for client in named.clients] == ["a", "b"]
    assert [client.name for client in listed.clients] == ["client-1", "client-2"]
    assert fedmerge.match({"b": files[1], "a": files[0]}).clients[0].name == "b"


def test_modules_bring_their_code_and_are_not_changed() -> None:
    clients = modules()
    before = [{k: v.clone() for k, v in c.state_dict().items()} for c in clients]
    merge = fedmerge.match(clients, **NOISE, max_growth=2)
    assert merge.quality is not None
    assert merge.quality.source == "noise"
    for client, state in zip(clients, before, strict=True):
        assert all(torch.equal(client.state_dict()[name], state[name]) for name in state)
    by_reference = fedmerge.match(states(), model=digits.MODEL, **NOISE, max_growth=2)
    assert same(merge, by_reference)
    assert not same(merge, fedmerge.match(clients, **NOISE, max_growth=1))


MODELS = {"class": Net, "module": Net(), "function": lambda: Net(), "reference": digits.MODEL}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_a_class_a_module_a_function_or_a_reference(kind: str) -> None:
    model: Any = MODELS[kind]
    merge = fedmerge.match(states(), model=model, **NOISE)
    built = merge.to_module()
    x = torch.from_numpy(data()[0])
    with torch.no_grad():
        outputs = built.eval()(x)
        loaded = fedmerge.load_model(model if callable(model) else Net, merge).eval()(x)
        wanted = digits.logits(merge.state_dict())[-200:]
    torch.testing.assert_close(outputs, loaded)
    torch.testing.assert_close(outputs, wanted, rtol=1e-5, atol=1e-5)


def test_a_merge_is_loaded_from_a_file_a_merge_and_a_state_dict(tmp_path: Path) -> None:
    merge = fedmerge.match(
        states(), max_growth="none", match_threshold=0.9, output=tmp_path / "g.pt"
    )
    assert merge.growth > 1
    sources: list[Any] = [merge, merge.state_dict(), tmp_path / "g.pt"]
    loaded = [fedmerge.load_model(Net, source).state_dict() for source in sources]
    for state in loaded:
        assert all(torch.equal(state[name], loaded[0][name]) for name in state)
    assert loaded[0]["1.weight"].shape[0] == merge.widths["1"] > 16


def test_a_merge_without_code_says_how_to_get_a_module() -> None:
    with pytest.raises(fedmerge.UsageError, match="knows no code that builds its model"):
        fedmerge.match(states()).to_module()


def same_data() -> dict[str, Any]:
    x, y = data()
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return {
        "arrays": (x, y),
        "tensors": [torch.from_numpy(x), torch.from_numpy(y)],
        "named": {"x": x, "y": y},
        "tensor data set": tensors,
        "data set": Digits(),
        "stream": Stream(),
        "loader": DataLoader(tensors, batch_size=64),
    }


@pytest.mark.parametrize("kind", same_data())
def test_data_are_arrays_tensors_data_sets_or_loaders(kind: str, tmp_path: Path) -> None:
    x, y = data()
    np.savez(tmp_path / "data.npz", x=x, y=y)
    [wanted, _] = fedmerge.evaluate(states(), tmp_path / "data.npz", model=Net)
    [found, _] = fedmerge.evaluate(states(), same_data()[kind], model=Net)
    assert found.evaluation.loss == pytest.approx(wanted.evaluation.loss, rel=1e-9)
    assert found.evaluation.metrics == wanted.evaluation.metrics
    assert found.evaluation.samples == 200


def test_probes_are_data_too(tmp_path: Path) -> None:
    x, _ = data()
    np.savez(tmp_path / "x.npz", x=x)
    wanted = fedmerge.match(states(), model=Net, probe_data=tmp_path / "x.npz")
    for given in (x, torch.from_numpy(x), data(), DataLoader(Digits(), batch_size=50)):
        assert same(fedmerge.match(states(), model=Net, probe_data=given), wanted)
    assert not same(fedmerge.match(states(), model=Net, probe_data=x + 1), wanted)


def test_a_comparison_takes_objects() -> None:
    compared = fedmerge.compare(dict(zip("ab", modules(), strict=True)), data(), model=Net, **NOISE)
    assert [row.model for row in compared.rows if row.kind == "client"] == ["a", "b"]
    assert "match" in {row.kind for row in compared.rows}


@pytest.mark.parametrize("is_fresh", [True, False])
def test_rounds_on_objects_are_those_on_files(is_fresh: bool, tmp_path: Path) -> None:
    clients: dict[str, Any] = {} if is_fresh else dict(zip("ab", states(), strict=True))
    x, y = digits.images()
    shards = {
        "a": (x[:60], y[:60]),
        "b": (torch.from_numpy(x[60:120]), torch.from_numpy(y[60:120])),
    }
    (tmp_path / "shards").mkdir()
    for name, (samples, targets) in shards.items():
        np.savez(tmp_path / "shards" / f"{name}.npz", x=np.asarray(samples), y=np.asarray(targets))
    few: dict[str, Any] = {"epochs": 1, "batch_size": 32, "seed": 3, "device": "cpu"}
    on_objects = fedmerge.retrain(clients, shards, model=Net, data=data(), **few)
    on_files = fedmerge.retrain(clients, tmp_path / "shards", model=digits.MODEL, **few)
    assert same(on_objects, on_files)
    assert [entry.client for entry in on_objects.shards] == ["a", "b"]
    metrics = on_objects.rounds[-1].metrics
    assert metrics is not None
    assert "accuracy" in metrics
    again = fedmerge.retrain(
        clients, tmp_path / "shards", model=digits.MODEL, **{**few, "epochs": 2}
    )
    assert not same(again, on_files)


def test_objects_do_not_go_to_other_processes() -> None:
    with pytest.raises(fedmerge.UsageError, match="`model` is an object of this process"):
        fedmerge.retrain({}, {"a": data(), "b": data()}, model=Net, engine="processes")


def not_a_net() -> Any:
    return {}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: fedmerge.match(states(), max_grow=1), "there is no option `max_grow`"),
        (lambda: fedmerge.match(states(), probe_dat=1), "there is no option `probe_dat`"),
        (lambda: fedmerge.match(WRONG), "`clients` is int"),
        (lambda: fedmerge.match([WRONG, WRONG]), "a client is int"),
        (lambda: fedmerge.match(states()[0]), "at least 2 clients are needed"),
        (lambda: fedmerge.match(states(), model=WRONG), "`model` is int"),
        (lambda: fedmerge.match(states(), model=not_a_net), r"not_a_net\(\) returns dict"),
        (lambda: fedmerge.match(states(), model=nn.Linear), r"Linear\(\) fails: TypeError"),
        (lambda: fedmerge.evaluate(states(), 3, model=Net), "`data` has samples but no targets"),
        (lambda: fedmerge.evaluate(states(), object(), model=Net), "`data` is object"),
        (lambda: fedmerge.evaluate(states(), [], model=Net), "`data` has samples but no"),
        (lambda: fedmerge.retrain({}, 3, model=Net), "`shards` is int"),
        (lambda: fedmerge.retrain({}, {}, model=Net, epoch=3), "there is no option `epoch`"),
        (lambda: fedmerge.load_model(Net, WRONG), "`source` is int"),
        (lambda: fedmerge.partition("x.npz", "y", client=3), "there is no option `client`"),
        (lambda: fedmerge.partition("x.npz", "y"), "`clients` is missing"),
    ],
)
def test_what_is_wrong_with_an_argument_is_said_in_its_words(call: Any, says: str) -> None:
    with pytest.raises(fedmerge.FedmergeError, match=says):
        call()


def test_a_misspelt_option_names_the_one_that_is_meant() -> None:
    with pytest.raises(fedmerge.UsageError) as caught:
        fedmerge.match(states(), max_grow=1)
    assert caught.value.hint == "did you mean `max_growth`?"


def test_a_merge_is_one_line_and_in_a_notebook_a_table() -> None:
    merge = fedmerge.match(dict(zip("ab", states(), strict=True)), max_growth=1)
    assert repr(merge) == "<Merge of 2 clients (a, b): 1,210 parameters, growth 1.00>"
    page = merge._repr_html_()
    assert "is not known without data" in page
    assert page.count("<tr>") == 2
    probed = fedmerge.match(states(), model=Net, **NOISE)
    assert re.search(r"as the ensemble does on [\d.]+ %", probed._repr_html_())


def test_progress_shows_in_a_notebook_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_progress() is silent
    shown: list[str] = []
    handle = SimpleNamespace(update=shown.append)

    def display(page: str, display_id: bool) -> object:
        shown.append(page)
        return handle

    fake = SimpleNamespace(HTML=lambda text: text, display=display)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    assert isinstance(default_progress(), NotebookProgress)
    fedmerge.match(states())
    assert 'max="1"' in shown[0]
    assert "matching" in shown[0]
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    )
    assert default_progress() is silent  # a terminal's IPython


def test_what_the_api_returns_is_said_in_one_line() -> None:
    clients = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(2)]
    data = torch.randn(30, 4), torch.arange(30) % 3
    assert repr(fedmerge.plan(clients[:1])) == "<Plan of Sequential, groups: 1, tensors: 4>"
    found = fedmerge.compare(clients, data, model=clients[0], is_matched=False)
    said = f"<Comparison of {len(found.rows)} models on 30 samples: the best client is "
    assert repr(found) == f"{said}{found.best_client}>"
