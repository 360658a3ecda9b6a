"""Small nets, clients and shards of runs that take a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedmerge
from fedmerge.architecture import resize_module, solve_widths
from fedmerge.values import Array, Plan, index_map

HERE = "tests.unit.federated.nets"
SAMPLES = 24
CLASSES = 3
TOKENS = 5
FULL_BATCH = 1000  # no shuffling can matter

State = Mapping[str, Tensor]


def mlp(hidden: int = 5) -> nn.Module:
    """One group."""
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def deep_mlp() -> nn.Module:
    """Two groups."""
    return nn.Sequential(
        *(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, CLASSES))
    )


class Lenet(nn.Module):
    """Two convolutions that a linear layer reads flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 5, 3)
        self.fc1, self.fc2 = nn.Linear(5 * 4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x).relu()).relu().flatten(1)
        logits: Tensor = self.fc2(self.fc1(x).relu())
        return logits


class Residual(nn.Module):
    """A stream that a block with batch norms adds to; the norms' statistics stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4, momentum=0.0)
        self.conv1 = nn.Conv2d(4, 5, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(5, momentum=0.0)
        self.conv2 = nn.Conv2d(5, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(4, momentum=0.0)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.stem(x)).relu()
        x = (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Chars(nn.Module):
    """An embedding, two recurrent layers that must be equally wide, and a decoder."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 4)
        self.rnn = nn.LSTM(4, 4, num_layers=2, batch_first=True)
        self.out = nn.Linear(4, TOKENS)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.out(self.rnn(self.embed(text))[0])
        return logits


class Masked(nn.Module):
    """A net of two inputs: numbers, and which of them count."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.two(self.one(x * mask.to(x.dtype)).relu())
        return logits


def tied_chars() -> nn.Module:
    return Chars(tied=True)


INPUTS: Mapping[str, tuple[int, ...]] = {
    "mlp": (4,), "deep_mlp": (4,), "Lenet": (1, 6, 6), "Residual": (1, 6, 6),
}  # fmt: skip


def code(net: str, **arguments: object) -> fedmerge.ModelCode:
    return fedmerge.ModelCode(f"{HERE}:{net}", arguments)


def plan_of(net: str) -> Plan:
    """Return a net's plan from its code."""
    shapes = ((2, *INPUTS[net]),) if net in INPUTS else ()
    model = fedmerge.ModelCode(f"{HERE}:{net}", input_shapes=shapes)
    return fedmerge.plan([state_of(net, 0)], model=model)


def state_of(net: str, seed: int) -> dict[str, Tensor]:
    """Return generic values: statistics of norms too."""
    torch.manual_seed(seed)
    build = globals()[net]
    model: nn.Module = build()
    for name, tensor in model.state_dict().items():
        if "running" in name or ("norm" in name and tensor.is_floating_point()):
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return dict(model.state_dict())


def samples(net: str, seed: int, classes: Sequence[int] = range(CLASSES)) -> dict[str, Array]:
    """Return noise whose mean tells the class; text for recurrent nets."""
    rng = np.random.default_rng(seed)
    if net not in INPUTS:
        text = rng.integers(0, TOKENS, (SAMPLES, 7))
        return {"x": text[:, :-1], "y": text[:, 1:]}
    y = rng.choice(np.array(classes), SAMPLES)
    x = rng.normal(size=(SAMPLES, *INPUTS[net])).astype(np.float32)
    x += y.reshape(-1, *[1] * len(INPUTS[net])).astype(np.float32)
    return {"x": x, "y": y}


def write_shards(
    folder: Path, net: str, seeds: Mapping[str, int], **settings: Sequence[int]
) -> Path:
    """Write one shard per client; `settings` gives the classes of some clients."""
    folder.mkdir(exist_ok=True)
    for name, seed in seeds.items():
        classes = settings.get(name, range(CLASSES))
        found = samples(net, seed, classes)
        np.savez(folder / f"{name}.npz", x=found["x"], y=found["y"])
    return folder


def save_clients(folder: Path, states: Mapping[str, State]) -> list[Path]:
    paths = [folder / f"{name}.pt" for name in states]
    for path, state in zip(paths, states.values(), strict=True):
        torch.save(dict(state), path)
    return paths


def permuted(state: State, plan: Plan, seed: int) -> dict[str, Tensor]:
    """Return the same function with every group's units in another order."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    widths = solve_widths(plan, shapes, source="test")
    rng = np.random.default_rng(seed)
    moves = {group: rng.permutation(width) for group, width in widths.items()}
    result = dict(state)
    for name, tensor in plan.tensors.items():
        for axis, layout in enumerate(tensor.axes):
            targets = torch.from_numpy(index_map(layout, moves, widths))
            moved = torch.empty_like(result[name])
            result[name] = moved.index_copy_(axis, targets, result[name])
    return result


def outputs(net: str, state: State, **arguments: object) -> Tensor:
    """Return what the net at a state's widths gives for fixed inputs, in evaluation mode."""
    model: nn.Module = globals()[net](**arguments)
    resize_module(model, {name: tuple(tensor.shape) for name, tensor in state.items()})
    model.load_state_dict(dict(state))
    x = torch.from_numpy(samples(net, 99)["x"])
    with torch.no_grad():
        logits: Tensor = model.eval()(x)
    return logits
