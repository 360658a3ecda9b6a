"""Other nets that many repositories hold, written anew: agents, graphs, computed weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as fn
from torch.nn.utils import parametrizations, prune

from benchmarks.real_libraries import Real


class Vae(nn.Module):
    """A variational autoencoder that samples in training only."""

    def __init__(self, *, always: bool = False) -> None:
        super().__init__()
        self.always = always
        self.fc1, self.mean, self.spread = nn.Linear(20, 16), nn.Linear(16, 6), nn.Linear(16, 6)
        self.fc3, self.fc4 = nn.Linear(6, 18), nn.Linear(18, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = fn.relu(self.fc1(x.view(-1, 20)))
        mean, spread = self.mean(hidden), self.spread(hidden)
        noise = (
            torch.randn_like(spread) if self.always or self.training else torch.zeros_like(spread)
        )
        code = mean + noise * torch.exp(0.5 * spread)
        return self.fc4(fn.relu(self.fc3(code))).sigmoid(), mean, spread


class Dueling(nn.Module):
    """A dueling Q network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 8, 8, 4), nn.Conv2d(8, 12, 4, 2)
        self.value, self.best = nn.Linear(12 * 9 * 9, 20), nn.Linear(20, 1)
        self.gain, self.each = nn.Linear(12 * 9 * 9, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = fn.relu(self.conv2(fn.relu(self.conv1(x / 255.0)))).reshape(x.size(0), -1)
        gain = self.each(fn.relu(self.gain(x)))
        out: Tensor = self.best(fn.relu(self.value(x))) + gain - gain.mean(1, keepdim=True)
        return out


class Siamese(nn.Module):
    """One net for two images, compared by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6 * 36, 12), nn.Linear(12, 1)

    def embed(self, x: Tensor) -> Tensor:
        return fn.normalize(self.fc(fn.relu(self.conv(x)).flatten(1)))

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.embed(one), self.embed(other)
        return fn.pairwise_distance(a, b), self.head((a - b).abs()) + fn.cosine_similarity(a, b)[
            :, None
        ]


class Capsules(nn.Module):
    """Primary and digit capsules with routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(1, 8, 5), nn.Conv2d(8, 4 * 6, 5, 2)
        self.weight = nn.Parameter(0.1 * torch.randn(1, 4 * 9, 5, 7, 6))

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        length = (x**2).sum(-1, keepdim=True)
        return length / (1 + length) * x / torch.sqrt(length + 1e-9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.primary(fn.relu(self.conv(x)))
        x = self.squash(x.view(x.size(0), 4, 6, 9).permute(0, 1, 3, 2).reshape(x.size(0), 36, 6))
        votes = (self.weight @ x[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros(x.size(0), 36, 5, 1)
        for _ in range(3):
            out = self.squash((logits.softmax(2) * votes).sum(1))
            logits = logits + (votes * out[:, None]).sum(-1, keepdim=True)
        length: Tensor = torch.linalg.vector_norm(out, dim=-1)
        return length


class GraphNet(nn.Module):
    """Messages along edges, summed by index, scattered and by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.message, self.update = nn.Linear(5, 8), nn.Linear(16, 12), nn.Linear(20, 8)
        self.attend, self.head = nn.Linear(16, 1), nn.Linear(8, 3)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]]))

    def forward(self, x: Tensor) -> Tensor:
        x = fn.relu(self.stem(x))
        start, end = self.get_buffer("edges").unbind()
        pairs = torch.cat([x[start], x[end]], -1)
        made = fn.relu(self.message(pairs)) * self.attend(pairs).sigmoid()
        summed = torch.zeros(len(x), 12).index_add_(0, end, made)
        most = torch.zeros(len(x), 12).scatter_reduce(
            0, end[:, None].expand_as(made), made, "amax", include_self=False
        )
        x = self.update(torch.cat([x, summed + most], -1))
        ways = torch.zeros(len(x), len(x)).index_put_((end, start), torch.ones(5))
        out: Tensor = self.head(fn.relu(ways @ x)).mean(0)
        return out


class Highway(nn.Module):
    """Highway layers, then a neural accumulator with its logarithmic path."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.plain, self.gate = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 10)
        self.w, self.m, self.g = (nn.Parameter(torch.randn(4, 10)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = fn.relu(self.stem(x))
        gate = self.gate(x).sigmoid()
        x = gate * fn.relu(self.plain(x)) + (1 - gate) * x
        weight = torch.tanh(self.w) * torch.sigmoid(self.m)
        choice = torch.sigmoid(fn.linear(x, self.g))
        logs = torch.exp(fn.linear(torch.log(x.abs() + 1e-5), weight))
        return choice * fn.linear(x, weight) + (1 - choice) * logs


class Lora(nn.Module):
    """A linear layer with a frozen weight and a low-rank change."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.lora_a, self.lora_b = (
            nn.Linear(inputs, 3, bias=False),
            nn.Linear(3, outputs, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 0.5 * self.lora_b(self.lora_a(x))
        return out


def parametrised(kind: str) -> nn.Module:
    """Return a small net whose middle layer is computed from other tensors."""
    layer: nn.Module = nn.Linear(8, 8)
    if kind == "pruned":
        prune.random_unstructured(layer, "weight", 0.3)  # type: ignore[no-untyped-call]
    else:
        layer = getattr(parametrizations, kind)(layer)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), layer, nn.Tanh(), nn.Linear(8, 3))


def old_style(kind: str) -> nn.Module:
    """Return a small net with a norm by hooks, as older checkpoints have."""
    layer = getattr(nn.utils, kind)(nn.Conv2d(8, 9, 3))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), layer, nn.ReLU(), nn.Conv2d(9, 2, 1))


OTHERS: Mapping[str, Real] = {
    "VAE": Real(Vae, ((3, 20),)),
    "VAE, always sampling": Real(lambda: Vae(always=True), ((3, 20),)),
    "dueling DQN": Real(Dueling, ((2, 4, 84, 84),)),
    "siamese net": Real(Siamese, ((2, 1, 8, 8), (2, 1, 8, 8))),
    "capsule net": Real(Capsules, ((2, 1, 14, 14),)),
    "graph net": Real(GraphNet, ((4, 5),)),
    "highway net with NALU": Real(Highway, ((3, 6),)),
    "LoRA": Real(lambda: nn.Sequential(Lora(6, 8), nn.ReLU(), Lora(8, 3)), ((2, 6),)),
    "weight norm": Real(lambda: parametrised("weight_norm"), ((2, 6),)),
    "spectral norm": Real(lambda: parametrised("spectral_norm"), ((2, 6),)),
    "orthogonal weight": Real(lambda: parametrised("orthogonal"), ((2, 6),)),
    "pruned weight": Real(lambda: parametrised("pruned"), ((2, 6),)),
    "weight norm by hooks": Real(lambda: old_style("weight_norm"), ((2, 3, 8, 8),)),
    "spectral norm by hooks": Real(lambda: old_style("spectral_norm"), ((2, 3, 8, 8),)),
}
