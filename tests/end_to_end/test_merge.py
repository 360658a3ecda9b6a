"""From files to a global model and back into the user's class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedmerge
from tests.clients import clients_of, permuted
from tests.end_to_end.helpers import (
    APART,
    TIGHT,
    Cli,
    State,
    distance,
    independent,
    load,
    mean_outputs,
    record_of,
    save_all,
)
from tests.zoo import ZOO, Entry, run

ARCHITECTURES = [
    *("mlp", "mlp with batch norm", "lenet", "vgg with batch norm", "conv 1d", "lstm", "gru"),
    *("lstm, both directions", "gru, 2 layers, both directions", "rnn", "char-lstm"),
    *("char-gru, 2 layers", "char-lstm, tied"),
]


def built(name: str) -> Callable[[], nn.Module]:
    return lambda: ZOO[name].build().double()


def copies_of(entry: Entry, count: int) -> tuple[nn.Module, list[State]]:
    """Return a model and permuted copies of it, none of them in the model's own order."""
    model = entry.fresh(seed=1)
    return model, [permuted(model.state_dict(), seed)[0] for seed in range(2, 2 + count)]


@pytest.mark.parametrize(("count", "suffix"), [(2, ".pt"), (3, ".safetensors"), (4, ".pt")])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_permuted_copies_as_files_merge_back_to_the_function(
    name: str, count: int, suffix: str, tmp_path: Path, cli: Cli
) -> None:
    entry = ZOO[name]
    model, states = copies_of(entry, count)
    files = save_all(states, tmp_path / "in")
    merged, averaged = tmp_path / f"global{suffix}", tmp_path / f"average{suffix}"
    summary = cli.done("match", *files, "-o", merged, "--json").json
    cli.done("match", *files, "-o", averaged, "--method", "average")
    expected = run(model, entry.inputs())
    assert summary["growth"] == 1
    assert distance(entry, fedmerge.load_model(built(name), merged), expected) < TIGHT
    assert distance(entry, fedmerge.load_model(built(name), averaged), expected) > 1e-3


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "tied" not in name])
def test_permuted_copies_in_safetensors_files_merge_back_too(
    name: str, tmp_path: Path, cli: Cli
) -> None:
    """The format's own writer stores tensors in alphabetical order, not in the model's."""
    entry = ZOO[name]
    model, states = copies_of(entry, 2)
    files = save_all(states, tmp_path, ".safetensors")
    cli.done("match", *files, "-o", tmp_path / "global.safetensors")
    merged = fedmerge.load_model(built(name), tmp_path / "global.safetensors")
    assert distance(entry, merged, run(model, entry.inputs())) < TIGHT


def test_a_sequential_of_more_than_ten_modules_merges_from_safetensors(
    tmp_path: Path, cli: Cli
) -> None:
    """Alphabetically 10.weight comes before 2.weight."""
    torch.manual_seed(0)
    hidden = [m for _ in range(5) for m in (nn.Linear(6, 6), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(6, 3)).double()
    states = [permuted(model.state_dict(), seed)[0] for seed in (2, 3)]
    files = save_all(states, tmp_path, ".safetensors")
    cli.done("match", *files, "-o", tmp_path / "global.pt")
    inputs = torch.randn(4, 6, dtype=torch.float64)
    with torch.no_grad():
        expected = model(inputs)
        model.load_state_dict(load(tmp_path / "global.pt"))
        assert torch.allclose(model(inputs), expected, rtol=0, atol=TIGHT)


def test_ten_numbered_layers_in_safetensors_are_no_chain_in_alphabetical_order(
    tmp_path: Path, cli: Cli
) -> None:
    """All layers are 6 × 6, so that only the names tell that fc10 follows fc9."""
    torch.manual_seed(0)
    layers = {f"fc{k}": nn.Linear(6, 6).double() for k in range(1, 11)}
    state = dict(nn.ModuleDict(layers).state_dict())
    other, _ = permuted(state, 2)
    files = save_all([state, other], tmp_path, ".safetensors")
    outcome = cli("match", *files, "-o", tmp_path / "global.pt")
    assert outcome.code in (0, 3)
    if outcome.code == 0:
        merged = load(tmp_path / "global.pt")
        assert all(torch.allclose(merged[name], state[name], atol=TIGHT) for name in state)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_at_unchanged_widths_load_state_dict_works_as_it_is(
    suffix: str, tmp_path: Path, cli: Cli
) -> None:
    entry = ZOO["vgg with batch norm"]
    model, states = clients_of(entry, 3)
    files = save_all(states, tmp_path)
    cli.done("match", *files, "-o", tmp_path / f"global{suffix}")
    state = load(tmp_path / f"global{suffix}")
    assert list(state) == list(states[0]) or suffix == ".safetensors"
    assert {k: (t.shape, t.dtype) for k, t in state.items()} == {
        k: (t.shape, t.dtype) for k, t in states[0].items()
    }
    fresh = entry.fresh(99)
    assert distance(entry, fresh, run(model, entry.inputs())) > 1e-3
    fresh.load_state_dict(state)
    assert distance(entry, fresh, run(model, entry.inputs())) < TIGHT


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    "name", ["mlp", "lenet", "vgg with batch norm", "lstm, both directions", "char-gru, 2 layers"]
)
def test_with_nothing_matched_the_loaded_model_gives_the_mean_of_the_outputs(
    name: str, suffix: str, tmp_path: Path, cli: Cli
) -> None:
    entry = ZOO[name]
    states = independent(name, 3)
    files = save_all(states, tmp_path)
    outcome = cli.done("match", *files, "-o", tmp_path / f"global{suffix}", *APART)
    assert "fedmerge.load_model" in outcome.out
    assert "--max-growth 1" in outcome.out
    model = fedmerge.load_model(built(name), tmp_path / f"global{suffix}")
    assert distance(entry, model, mean_outputs(entry, states)) < TIGHT
    assert distance(entry, model, mean_outputs(entry, states[:1])) > 1e-3


class OwnState(nn.Module):
    """A user's class that makes its own first state from an integer attribute."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.hidden_size, self.num_layers = hidden, 2
        self.lstm = nn.LSTM(5, hidden, num_layers=2, batch_first=True)
        self.fc = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        shape = (self.num_layers, len(x), self.hidden_size)
        zeros = torch.zeros(shape, dtype=x.dtype)
        steps, _ = self.lstm(x, (zeros, zeros))
        logits: Tensor = self.fc(steps[:, -1])
        return logits


class OwnView(nn.Module):
    """A user's class that flattens by integer attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.flat = 6, 24
        self.conv1, self.conv2 = nn.Conv2d(1, self.channels, 3), nn.Conv2d(self.channels, 7, 3)
        self.fc1, self.fc2 = nn.Linear(28, 9), nn.Linear(9, 4)
        self.flat = 28

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        logits: Tensor = self.fc2(self.fc1(x.view(-1, self.flat)).relu())
        return logits


@pytest.mark.parametrize(
    ("build", "shape"), [(OwnState, (4, 7, 5)), (OwnView, (4, 1, 14, 14))], ids=["h0", "view"]
)
def test_integer_attributes_of_the_users_class_follow_the_grown_widths(
    build: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path, cli: Cli
) -> None:
    torch.manual_seed(0)
    clients = [build().double().eval() for _ in range(2)]
    files = save_all([dict(client.state_dict()) for client in clients], tmp_path)
    cli.done("match", *files, "-o", tmp_path / "global.pt", *APART)
    model = fedmerge.load_model(lambda: build().double().eval(), tmp_path / "global.pt")
    inputs = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([client(inputs) for client in clients]).mean(0)
        found = model(inputs)
    assert torch.allclose(found, expected, rtol=0, atol=TIGHT)
    assert not torch.allclose(found, clients[0](inputs), rtol=0, atol=1e-3)


def test_a_hidden_size_that_equals_the_input_size_follows_its_own_layer(
    tmp_path: Path, cli: Cli
) -> None:
    """The input stays 5 wide, the hidden state grows from 5 to 10."""
    torch.manual_seed(0)
    clients = [OwnState(5).double().eval() for _ in range(2)]
    files = save_all([dict(client.state_dict()) for client in clients], tmp_path)
    cli.done("match", *files, "-o", tmp_path / "global.pt", *APART)
    model = fedmerge.load_model(lambda: OwnState(5).double().eval(), tmp_path / "global.pt")
    inputs = torch.randn(4, 7, 5, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([client(inputs) for client in clients]).mean(0)
        assert torch.allclose(model(inputs), expected, rtol=0, atol=TIGHT)


def test_a_file_of_another_model_is_no_match_for_the_users_class(tmp_path: Path, cli: Cli) -> None:
    files = save_all(independent("mlp", 2), tmp_path)
    cli.done("match", *files, "-o", tmp_path / "global.pt")
    with pytest.raises(fedmerge.ArchitectureError, match="and has an extra tensor"):
        fedmerge.load_model(ZOO["lenet"].build, tmp_path / "global.pt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_smaller_dtypes_come_back_as_they_were(
    dtype: torch.dtype, tmp_path: Path, cli: Cli
) -> None:
    _, states = clients_of(ZOO["vgg with batch norm"], 3)
    small: list[State] = [
        {k: t.to(dtype) if t.is_floating_point() else t for k, t in state.items()}
        for state in states
    ]
    cli.done("match", *save_all(small, tmp_path), "-o", tmp_path / "global.pt")
    merged = load(tmp_path / "global.pt")
    assert all(torch.equal(merged[key], small[0][key]) for key in small[0])
    assert not all(torch.equal(merged[key], small[1][key]) for key in small[0])


def test_containers_may_differ_between_the_clients(tmp_path: Path, cli: Cli) -> None:
    entry = ZOO["lenet"]
    model, (first, second, third) = clients_of(entry, 3)
    torch.save(
        {"state_dict": {f"model.{k}": t for k, t in first.items()}, "epoch": 3}, tmp_path / "a.ckpt"
    )
    torch.save(
        {f"module.{k}": t for k, t in second.items()},
        tmp_path / "b.pth",
        _use_new_zipfile_serialization=False,
    )
    save_all([third], tmp_path / "c", ".safetensors")
    files = [tmp_path / "a.ckpt", tmp_path / "b.pth", tmp_path / "c" / "a.safetensors"]
    cli.done("match", *files, "-o", tmp_path / "global.pt")
    written = load(tmp_path / "global.pt")
    assert list(written) == [f"model.{name}" for name in first]
    merged = fedmerge.load_model(built("lenet"), tmp_path / "global.pt")
    assert distance(entry, merged, run(model, entry.inputs())) < TIGHT
    assert cli.done("verify", tmp_path / "global.pt", *files).out


def narrow(state: State) -> State:
    """Return an MLP of the zoo without its first two hidden units."""
    return {
        **state,
        "0.weight": state["0.weight"][2:],
        "0.bias": state["0.bias"][2:],
        "2.weight": state["2.weight"][:, 2:],
    }


@pytest.mark.parametrize("widest_first", [True, False])
def test_a_permuted_narrower_sub_network_merges_back_exactly(
    widest_first: bool, tmp_path: Path, cli: Cli
) -> None:
    """The two units that only the wide client has give nothing to the next layer."""
    entry = ZOO["mlp"]
    wide = dict(entry.fresh(1).state_dict())
    wide["2.weight"][:, :2] = 0.0
    clients = [wide, permuted(narrow(wide), 3)[0]]
    files = save_all(clients if widest_first else clients[::-1], tmp_path)
    summary = cli.done("match", *files, "-o", tmp_path / "global.pt", "--json").json
    assert [group["width"] for group in summary["groups"]] == [8, 7]
    model = fedmerge.load_model(built("mlp"), tmp_path / "global.pt")
    expected = mean_outputs(entry, [wide])
    assert distance(entry, model, expected) < TIGHT
    wide["0.weight"][4] += 1.0
    assert distance(entry, model, mean_outputs(entry, [wide])) > 1e-3


def test_all_units_of_a_narrower_client_are_placed(tmp_path: Path, cli: Cli) -> None:
    states = independent("mlp", 2)
    files = save_all([states[0], narrow(states[1])], tmp_path)
    cli.done("match", *files, "-o", tmp_path / "global.pt", "--max-growth", "1")
    assignments = record_of(tmp_path / "global.pt")["assignments"]
    assert sorted(assignments["a"]["0"]) == list(range(8))
    assert len(set(assignments["b"]["0"])) == 6
    assert set(assignments["b"]["0"]) <= set(range(8))
    assert load(tmp_path / "global.pt")["0.weight"].shape == (8, 6)


def test_clients_of_different_widths_with_nothing_matched_give_the_mean(
    tmp_path: Path, cli: Cli
) -> None:
    entry = ZOO["mlp"]
    states = independent("mlp", 2)
    clients = [narrow(states[0]), states[1]]
    cli.done("match", *save_all(clients, tmp_path), "-o", tmp_path / "global.pt", *APART)
    assert load(tmp_path / "global.pt")["0.weight"].shape == (14, 6)
    model = fedmerge.load_model(built("mlp"), tmp_path / "global.pt")
    assert distance(entry, model, mean_outputs(entry, clients)) < TIGHT
