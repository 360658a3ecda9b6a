"""Chains in any stored order: whatever is accepted keeps its outputs when units are permuted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmerge.architecture import (
    ChainOptions,
    plan_chain,
    plan_from_json,
    plan_to_json,
    solve_widths,
)
from fedmerge.checkpoint import from_state_dict
from fedmerge.errors import ArchitectureError
from fedmerge.values import Pinned, Plan, Product, Units, index_map
from tests.clients import permuted
from tests.zoo import ZOO, Entry, run

TIGHT = 1e-9  # float64 sums in another order
L, B1, B2 = nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d
relu = torch.relu


def conv(inputs: int, outputs: int, padding: int = 0) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=padding)


def seq(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


class Net(nn.Module):
    """Modules under the given names, in the given order, and a forward function."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor], modules: Mapping[str, nn.Module]):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


def through(*names: str) -> Callable[[nn.Module, Tensor], Tensor]:
    """Return a forward through the named modules; `>` stands for flatten, `~` for ReLU."""
    special: dict[str, Callable[[Tensor], Tensor]] = {
        ">": lambda x: x.flatten(1),
        "~": relu,
        "mean": lambda x: x.mean(1),
        "pool": lambda x: x.flatten(2).mean(2),
        "turn": lambda x: x.transpose(1, 2),
        "last": lambda x: x[:, -1],
    }

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        for name in names:
            x = special[name](x) if name in special else net.get_submodule(name)(x)
            x = x[0] if isinstance(x, tuple) else x
        return x

    return forward


@dataclass(frozen=True)
class Case:
    """A net, an input shape, and whether its sorted names tell the order too."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0
    sorted_too: bool = True
    options: ChainOptions = field(default_factory=ChainOptions)

    def with_flatten(self, steps: int) -> Case:
        return replace(self, options=ChainOptions(flatten=steps))

    def only_as_defined(self) -> Case:
        return replace(self, sorted_too=False)


def net(
    forward: str, shape: tuple[int, ...], tokens: int = 0, **modules: Callable[[], nn.Module]
) -> Case:
    """Return the case of a net whose forward is written as names between spaces."""

    def build() -> nn.Module:
        made = {name: make() for name, make in modules.items()}
        return Net(through(*forward.split()), made)

    return Case(build, shape, tokens)


def mlp(names: str, *widths: int) -> Case:
    """Return a chain of linear layers with ReLUs between them."""
    called = names.split()
    sizes = list(zip(called, widths, widths[1:], strict=False))

    def build() -> nn.Module:
        return Net(through(*" ~ ".join(called).split()), {n: L(a, b) for n, a, b in sizes})

    return Case(build, (widths[0],))


def inputs_of(case: Case) -> Tensor:
    return Entry(case.build, case.shape, 0, case.tokens).inputs()


def plan_state(state: Mapping[str, Tensor], options: ChainOptions) -> Plan:
    client = from_state_dict(state, name="a")
    return plan_chain(client.tensors, options, aliases=client.aliases, source="a")


def shuffled(state: Mapping[str, Tensor], options: ChainOptions, seed: int) -> dict[str, Tensor]:
    """Return the state with the units of every group of its plan in random order."""
    client = from_state_dict(state, name="a")
    plan = plan_state(state, options)
    widths = solve_widths(plan, {n: i.shape for n, i in client.tensors.items()}, source="a")
    rng = np.random.default_rng(seed)
    moves = {group: rng.permutation(width) for group, width in widths.items()}
    result = {name: tensor.clone() for name, tensor in state.items()}
    for name, planned in plan.tensors.items():
        for axis, layout in enumerate(planned.axes):
            targets = torch.from_numpy(index_map(layout, moves, widths))
            result[name] = torch.empty_like(result[name]).index_copy_(axis, targets, result[name])
    return {name: result[client.aliases.get(name, name)] for name in result}


def error_of(case: Case, *, alphabetical: bool) -> float:
    """Return how far a permuted copy's outputs are from the model's own."""
    entry = Entry(case.build, case.shape, 0, case.tokens)
    model, copy = entry.fresh(1), entry.fresh(1)
    state = model.state_dict()
    stored = dict(sorted(state.items())) if alphabetical else dict(state)
    moved = shuffled(stored, case.options, 3)
    assert any(not torch.equal(moved[name], state[name]) for name in state)
    copy.load_state_dict(moved)
    return float((run(model, inputs_of(case)) - run(copy, inputs_of(case))).abs().max())


def lstm(inputs: int, units: int, **settings: int) -> nn.LSTM:
    return nn.LSTM(inputs, units, batch_first=True, **settings)


def gru(inputs: int, units: int, **settings: int) -> nn.GRU:
    return nn.GRU(inputs, units, batch_first=True, **settings)


PLAIN = {
    **{
        names: mlp(names, 8, 16, 16, 3)
        for names in (
            "l1 l2 l3", "layer_1 layer_2 layer_3", "hidden_1 hidden_2 out", "fc fc2 fc3",
            "Linear1 Linear2 Linear3", "linear_layer1 linear_layer2 linear_layer3",
            "mlp1 mlp2 mlp3", "input_layer hidden_layer output_layer", "fc_in fc_hid fc_out",
            "inp h1 out", "hidden hidden2 out",
        )
    },
    "ten numbered layers": mlp(" ".join(f"fc{k}" for k in range(1, 12)), *[6] * 12),
    "regression": mlp("hidden predict", 1, 20, 1),
    "autoencoder of two layers": mlp("encoder decoder", 20, 12, 20),
    "autoencoder, numbered": mlp("enc1 enc2 dec1 dec2", 20, 12, 6, 12, 20),
    "autoencoder": net(
        "encoder decoder", (20,),
        encoder=lambda: seq(L(20, 12), nn.ReLU(), L(12, 6), nn.ReLU(), L(6, 3)),
        decoder=lambda: seq(L(3, 6), nn.ReLU(), L(6, 12), nn.ReLU(), L(12, 20)),
    ),
    "autoencoder of one width": net(
        "encoder decoder", (20,),
        encoder=lambda: seq(L(20, 8), nn.ReLU(), L(8, 8), nn.ReLU()),
        decoder=lambda: seq(L(8, 8), nn.ReLU(), L(8, 20)),
    ),
    "sequential of 13": Case(
        lambda: seq(*[m for _ in range(6) for m in (L(5, 5), nn.Tanh())], L(5, 3)), (5,)
    ),
    "nested sequential": Case(
        lambda: seq(seq(L(8, 16), nn.ReLU()), seq(L(16, 16), nn.ReLU()), L(16, 3)), (8,)
    ),
    "quickstart": net(
        "stack", (8,), stack=lambda: seq(L(8, 16), nn.ReLU(), L(16, 16), nn.ReLU(), L(16, 3))
    ),
    "features in a net": net(
        "net.features > net.classifier", (3, 6, 6),
        net=lambda: nn.ModuleDict({
            "features": seq(conv(3, 8), nn.ReLU(), conv(8, 8)),
            "classifier": seq(L(32, 16), nn.ReLU(), L(16, 16), nn.ReLU(), L(16, 4)),
        }),
    ),
    "batch norms by number": net(
        "conv1 bn1 ~ conv2 bn2 ~ pool fc1", (1, 8, 8),
        conv1=lambda: conv(1, 7), bn1=lambda: B2(7), conv2=lambda: conv(7, 7), bn2=lambda: B2(7),
        fc1=lambda: L(7, 4),
    ),
    "batch norms defined after": net(
        "conv1 bn1 ~ conv2 bn2 ~ pool fc1", (1, 8, 8),
        conv1=lambda: conv(1, 7), conv2=lambda: conv(7, 7), bn1=lambda: B2(7), bn2=lambda: B2(7),
        fc1=lambda: L(7, 4),
    ),
    "batch norms of linear layers defined after": net(
        "fc1 bn1 ~ fc2 bn2 ~ out", (8,),
        fc1=lambda: L(8, 16), fc2=lambda: L(16, 16), bn1=lambda: B1(16), bn2=lambda: B1(16),
        out=lambda: L(16, 3),
    ),
    "batch norms counted on": net(
        "conv1 bn1 ~ pool fc1 bn2 ~ fc2 bn3 ~ fc3", (1, 8, 8),
        conv1=lambda: conv(1, 7), bn1=lambda: B2(7), fc1=lambda: L(7, 9), bn2=lambda: B1(9),
        fc2=lambda: L(9, 9), bn3=lambda: B1(9), fc3=lambda: L(9, 4),
    ).only_as_defined(),
    "norms before their layers": net(
        "conv0 bn1 ~ conv1 bn2 ~ conv2 pool fc", (1, 9, 9),
        conv0=lambda: conv(1, 7), bn1=lambda: B2(7), conv1=lambda: conv(7, 7), bn2=lambda: B2(7),
        conv2=lambda: conv(7, 7), fc=lambda: L(7, 4),
    ).only_as_defined(),
    "blocks of layers": net(
        "layer1 layer2 > fc", (1, 8, 8),
        layer1=lambda: seq(conv(1, 6, padding=1), B2(6), nn.ReLU(), nn.MaxPool2d(2)),
        layer2=lambda: seq(conv(6, 6, padding=1), B2(6), nn.ReLU(), nn.MaxPool2d(2)),
        fc=lambda: L(24, 5),
    ),
    "caffe's names": net(
        "conv1_1 ~ conv1_2 ~ conv2_1 ~ pool fc6", (3, 9, 9), conv1_1=lambda: conv(3, 6),
        conv1_2=lambda: conv(6, 6), conv2_1=lambda: conv(6, 9), fc6=lambda: L(9, 3),
    ),
    "lstm with as many outputs as inputs": net(
        "lstm fc", (4, 1), lstm=lambda: lstm(1, 8), fc=lambda: L(8, 1)
    ),
    "gru and two layers": net(
        "gru last fc1 ~ fc2", (6, 5), gru=lambda: gru(5, 12, num_layers=2), fc1=lambda: L(12, 12),
        fc2=lambda: L(12, 3),
    ),
    "embedding, lstm both ways, two layers": net(
        "embedding lstm last fc1 ~ fc2", (6,), 30, embedding=lambda: nn.Embedding(30, 7),
        lstm=lambda: lstm(7, 12, bidirectional=True), fc1=lambda: L(24, 10), fc2=lambda: L(10, 3),
    ),
    "part-of-speech tagger": net(
        "word_embeddings lstm hidden2tag", (6,), 30, word_embeddings=lambda: nn.Embedding(30, 6),
        lstm=lambda: lstm(6, 6), hidden2tag=lambda: L(6, 3),
    ),
    "embedding and norm": net(
        "embedding mean norm fc", (6,), 30, embedding=lambda: nn.Embedding(30, 7),
        norm=lambda: nn.LayerNorm(7), fc=lambda: L(7, 3),
    ),
    "bag of words": net(
        "embeddings mean linear1 ~ linear2", (4,), 30, embeddings=lambda: nn.Embedding(30, 10),
        linear1=lambda: L(10, 16), linear2=lambda: L(16, 30),
    ),
    "n-gram model": net(
        "embeddings > linear1 ~ linear2", (2,), 30, embeddings=lambda: nn.Embedding(30, 5),
        linear1=lambda: L(10, 16), linear2=lambda: L(16, 30),
    ).with_flatten(2),
    "all steps of a gru": net(
        "rnn > fc", (6, 5), rnn=lambda: gru(5, 6, bidirectional=True), fc=lambda: L(72, 3)
    ).with_flatten(6),
    "embedding and 1-d convolution": net(
        "embedding turn conv ~ pool fc", (8,), 30, embedding=lambda: nn.Embedding(30, 5),
        conv=lambda: nn.Conv1d(5, 9, 3), fc=lambda: L(9, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_nets_keep_their_outputs_when_units_are_permuted(name: str) -> None:
    assert error_of(PLAIN[name], alphabetical=False) < TIGHT


@pytest.mark.parametrize("name", [name for name, case in PLAIN.items() if case.sorted_too])
def test_plain_nets_stored_alphabetically_do_too_and_the_note_says_so(name: str) -> None:
    case = PLAIN[name]
    assert error_of(case, alphabetical=True) < TIGHT
    plan = plan_state(dict(sorted(case.build().state_dict().items())), case.options)
    assert any("order of the layers was inferred" in note for note in plan.notes)


@pytest.mark.parametrize("name", [name for name, case in PLAIN.items() if not case.sorted_too])
def test_norms_that_sorted_names_do_not_place_are_refused(name: str) -> None:
    with pytest.raises(ArchitectureError, match="could belong to"):
        error_of(PLAIN[name], alphabetical=True)


@pytest.mark.parametrize("name", ZOO)
def test_every_zoo_model_stored_alphabetically_keeps_its_groups_and_outputs(name: str) -> None:
    entry = ZOO[name]
    model = entry.fresh(1)
    state = dict(sorted(model.state_dict().items()))
    assert len(plan_state(state, ChainOptions()).groups) == entry.groups
    copy = entry.fresh(2)
    copy.load_state_dict(permuted(state, 5)[0])
    assert torch.allclose(run(model, entry.inputs()), run(copy, entry.inputs()), 0, TIGHT)


def test_the_alphabetical_order_itself_would_not_keep_the_outputs() -> None:
    """Negative control: decoder before encoder chains as well, and is wrong."""
    case = mlp("b a", 20, 12, 20)
    assert error_of(case, alphabetical=False) < TIGHT
    with pytest.raises(ArchitectureError, match="alphabetically, and several orders"):
        error_of(case, alphabetical=True)
    assumed = Case(case.build, case.shape, options=ChainOptions(assume_chain=True))
    assert error_of(assumed, alphabetical=True) > 1e-3


def rnn_cell(net: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.zeros(x.shape[0], 12, dtype=x.dtype)
    for step in x.unbind(1):
        hidden = torch.tanh(net.get_submodule("i2h")(step) + net.get_submodule("h2h")(hidden))
    out: Tensor = net.get_submodule("h2o")(hidden)
    return out


def unrun(**modules: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict({name: make() for name, make in modules.items()})


def critic(outputs: int) -> Callable[[], nn.Module]:
    return lambda: seq(L(4, 16), nn.Tanh(), L(16, 16), nn.Tanh(), L(16, outputs))


REFUSED = {
    "shared batch norm": (
        unrun(fc1=lambda: L(8, 16), fc2=lambda: L(16, 16), bn=lambda: B1(16), fc3=lambda: L(16, 3)),
        "'bn' .* could belong to 'fc1' or 'fc2'",
    ),
    "shared prelu": (
        unrun(
            fc1=lambda: L(8, 16), fc2=lambda: L(16, 16), act=lambda: nn.PReLU(16),
            fc3=lambda: L(16, 3),
        ),
        "could belong to",
    ),
    "shared layer norm": (
        unrun(
            fc1=lambda: L(8, 16), fc2=lambda: L(16, 16), ln=lambda: nn.LayerNorm(16),
            fc3=lambda: L(16, 3),
        ),
        "could belong to",
    ),
    "a known net with a shared batch norm": (
        unrun(
            conv1=lambda: conv(1, 8), conv2=lambda: conv(8, 8), bn=lambda: B2(8),
            fc1=lambda: L(32, 8), fc2=lambda: L(8, 3),
        ),
        "could belong to",
    ),
    "norms counted on behind other numbers": (
        unrun(
            conv1=lambda: conv(1, 8), fc1=lambda: L(8, 9), fc2=lambda: L(9, 9), fc3=lambda: L(9, 9),
            fc4=lambda: L(9, 2), bn1=lambda: B2(8), bn2=lambda: B1(9), bn3=lambda: B1(9),
        ),
        "could belong to",
    ),
    "a norm of no layer's width": (
        unrun(conv1=lambda: conv(1, 8), bn=lambda: B2(7), fc1=lambda: L(32, 3)),
        "the norm 'bn' is 7 wide",
    ),
    "hand-written rnn": (
        unrun(i2h=lambda: L(17, 12), h2o=lambda: L(12, 4)), "a block \\('(i2h|h2o)'\\)"
    ),
    "hand-written rnn, hidden to hidden": (
        lambda: Net(rnn_cell, {"i2h": L(5, 12), "h2h": L(12, 12), "h2o": L(12, 4)}), "a block",
    ),
    "hand-written rnn in words": (
        unrun(in2hidden=lambda: L(17, 12), in2output=lambda: L(17, 4)), "a block",
    ),
    "actor and critic": (unrun(actor=critic(4), critic=critic(1)), "two nets in one file"),
    "policy and target": (unrun(policy_net=critic(4), target_net=critic(4)), "two nets"),
    "two critics": (unrun(q1=critic(4), q2=critic(1)), "two nets"),
    "generator and discriminator": (
        unrun(G=lambda: seq(L(4, 8), nn.ReLU(), L(8, 9)), D=lambda: seq(L(9, 8), L(8, 1))),
        "'[GD]' and '[GD]' look like two nets",
    ),
    "netG and netD in a wrapper": (
        unrun(gan=unrun(netG=lambda: L(4, 9), netD=lambda: L(9, 1))), "two nets"
    ),
    "tokens and positions": (
        unrun(
            tok=lambda: nn.Embedding(50, 16), pos=lambda: nn.Embedding(16, 16),
            zfc1=lambda: L(16, 24), zfc2=lambda: L(24, 3),
        ),
        "may be one too|several orders",
    ),
    "users and items": (
        unrun(
            u=lambda: nn.Embedding(50, 32), v=lambda: nn.Embedding(64, 32), zfc1=lambda: L(64, 20),
            zfc2=lambda: L(20, 1),
        ),
        "may be one too|several orders",
    ),
    "residual onto the output": (
        unrun(enc=lambda: L(30, 16), proj=lambda: L(16, 16)), "both 16 wide",
    ),
    "residual onto the embedding": (
        unrun(emb=lambda: nn.Embedding(50, 16), proj=lambda: L(16, 16), zfc=lambda: L(16, 3)),
        "both 16 wide",
    ),
    "a list of convolutions called like vgg9": (
        unrun(
            conv=lambda: nn.ModuleList(
                [conv(3, 8, padding=1), *(conv(8, 8, padding=1) for _ in range(5))]
            ),
            fc=lambda: nn.ModuleList([L(8, 12), L(12, 12), L(12, 5)]),
        ),
        "both 8 wide",
    ),
    "two heads of a variational autoencoder": (
        unrun(
            fc1=lambda: L(30, 20), fc21=lambda: L(20, 20), fc22=lambda: L(20, 20),
            fc3=lambda: L(20, 25), fc4=lambda: L(25, 30),
        ),
        "both 20 wide|reads",
    ),
    "a residual block without projection": (
        unrun(
            conv1=lambda: conv(3, 8), layer1=lambda: nn.ModuleList(
                [nn.ModuleDict({"conv1": conv(8, 8), "conv2": conv(8, 8)})]
            ),
            fc=lambda: L(8, 3),
        ),
        "both 8 wide|several orders",
    ),
    "numbered blocks": (
        unrun(
            fc1=lambda: L(4, 8), res1=lambda: L(8, 8), res2=lambda: L(8, 8), zfc2=lambda: L(8, 3)
        ),
        "both 8 wide|several orders",
    ),
    "two recurrent layers that may hand over their state": (
        unrun(encoder=lambda: lstm(1, 8), decoder=lambda: lstm(8, 8), fc=lambda: L(8, 1)),
        "both 8 wide|several orders",
    ),
    "steps side by side": (
        unrun(embeddings=lambda: nn.Embedding(30, 5), linear1=lambda: L(10, 16)), "2 steps side",
    ),
}  # fmt: skip


@pytest.mark.parametrize("alphabetical", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_names_do_not_settle_is_refused_in_either_order(name: str, alphabetical: bool) -> None:
    build, reason = REFUSED[name]
    state = build().state_dict()
    stored = dict(sorted(state.items())) if alphabetical else dict(state)
    with pytest.raises(ArchitectureError, match=reason) as caught:
        plan_state(stored, ChainOptions())
    assert "`model=" in caught.value.hint


def test_the_hint_for_several_steps_says_flatten() -> None:
    with pytest.raises(ArchitectureError, match="2 steps") as caught:
        plan_state(REFUSED["steps side by side"][0]().state_dict(), ChainOptions())
    assert "`flatten=2`" in caught.value.hint
    with pytest.raises(ArchitectureError, match="not `flatten=3`"):
        plan_state(REFUSED["steps side by side"][0]().state_dict(), ChainOptions(flatten=3))


def test_several_steps_are_pinned_and_each_holds_all_units() -> None:
    case = PLAIN["n-gram model"]
    plan = plan_state(case.build().state_dict(), case.options)
    assert plan.tensors["linear1.weight"].axes[1] == Product((Pinned(2), Units("embeddings")))


def test_names_in_runs_of_one_dtype_count_as_alphabetical() -> None:
    """The safetensors writer sorts by dtype first."""
    case = PLAIN["lstm with as many outputs as inputs"]
    state = case.build().state_dict()
    mixed = {n: t.half() if n == "lstm.bias_hh_l0" else t for n, t in sorted(state.items())}
    halves = [n for n, t in mixed.items() if t.dtype == torch.float16]
    stored = {n: mixed[n] for n in [*(n for n in mixed if n not in halves), *halves]}
    plan = plan_state(stored, ChainOptions())
    assert [group.name for group in plan.groups] == ["lstm_l0"]


def test_a_kept_layer_may_fall_out_of_an_inferred_chain() -> None:
    state = dict(sorted(mlp("fc1 fc2", 4, 8, 3).build().state_dict().items()))
    state = {"aux.weight": torch.zeros(5, 8), **state}
    client = from_state_dict(state, name="a")
    with pytest.raises(ArchitectureError, match="reads"):
        plan_chain(client.tensors, ChainOptions(), aliases={}, source="a")
    plan = plan_chain(client.tensors, ChainOptions(), aliases={}, kept=["aux.weight"], source="a")
    assert [group.name for group in plan.groups] == ["fc1"]


@pytest.mark.parametrize("name", PLAIN)
def test_plans_round_trip_through_json(name: str) -> None:
    plan = plan_state(PLAIN[name].build().state_dict(), PLAIN[name].options)
    assert plan_from_json(plan_to_json(plan)) == plan
