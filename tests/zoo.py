"""Small models of every architecture that fedmerge claims to merge from files alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Recurrent(nn.Module):
    """A recurrent stack with a linear layer on its last step."""

    def __init__(
        self, kind: Callable[..., nn.RNNBase], inputs: int = 5, **settings: object
    ) -> None:
        super().__init__()
        self.rnn = kind(inputs, 6, batch_first=True, **settings)
        features = (self.rnn.proj_size or 6) * (2 if self.rnn.bidirectional else 1)
        self.fc = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.rnn(x)
        logits: Tensor = self.fc(steps[:, -1])
        return logits


class CharModel(nn.Module):
    """An embedding, a recurrent stack and a decoder, on tokens."""

    def __init__(
        self, kind: Callable[..., nn.RNNBase], *, layers: int = 1, tied: bool = False, dim: int = 4
    ) -> None:
        super().__init__()
        width = dim if tied else 7
        self.encoder = nn.Embedding(11, dim)
        self.rnn = kind(dim, width, num_layers=layers, batch_first=True)
        self.decoder = nn.Linear(width, 11)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        steps, _ = self.rnn(self.encoder(tokens))
        logits: Tensor = self.decoder(steps)
        return logits


class LeNet(nn.Module):
    """The paper's LeNet, small."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3)
        self.conv2 = nn.Conv2d(5, 6, 3)
        self.fc1 = nn.Linear(6 * 4, 9)
        self.fc2 = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        logits: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return logits


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))


def mlp_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 7, bias=False),
        nn.BatchNorm1d(7), nn.Sigmoid(), nn.Linear(7, 3),
    )  # fmt: skip


def mlp_layer_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def mlp_prelu() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))


def vgg() -> nn.Module:
    return nn.ModuleDict(
        {
            "features": nn.Sequential(
                nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(4, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.ReLU(),
                nn.Conv2d(5, 5, 3, padding=1), nn.PReLU(5), nn.MaxPool2d(2), nn.Flatten(),
            ),
            "classifier": nn.Sequential(nn.Linear(20, 6), nn.ReLU(), nn.Linear(6, 3)),
        }
    )  # fmt: skip


def conv_flat_batch_norm() -> nn.Module:
    """Batch norm on the input, and after the flatten."""
    return nn.Sequential(
        nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(),
        nn.BatchNorm1d(16), nn.Linear(16, 3),
    )  # fmt: skip


def conv_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Conv1d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(25, 3)
    )


def conv_3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3), nn.ReLU(), nn.Conv3d(4, 3, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
        nn.Linear(3, 2),
    )  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One model of the zoo."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of an input, without the batch
    groups: int  # counted by hand
    tokens: int = 0  # if the input is tokens: how many there are
    exact_ensemble: bool = True  # whether nothing matched gives the mean of the outputs

    def inputs(self) -> Tensor:
        """Return four inputs, always the same."""
        generator = torch.Generator().manual_seed(7)
        if self.tokens:
            return torch.randint(self.tokens, (4, *self.shape), generator=generator)
        return torch.randn((4, *self.shape), generator=generator, dtype=torch.float64)

    def fresh(self, seed: int) -> nn.Module:
        """Return a model with generic random values in every parameter and buffer, float64."""
        torch.manual_seed(seed)
        model = self.build().double().eval()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn_like(tensor) / max(1, tensor[0].numel()) ** 0.5)
                    if name.endswith("running_var"):
                        tensor.copy_(0.5 + torch.rand_like(tensor))
        return model


def run(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a model's outputs, as float64."""
    with torch.no_grad():
        if isinstance(model, nn.ModuleDict):
            for part in model.values():
                inputs = part(inputs)
            return inputs
        outputs: Tensor = model(inputs)
        return outputs


ZOO = {
    "mlp": Entry(mlp, (6,), 2),
    "mlp with batch norm": Entry(mlp_batch_norm, (6,), 2),
    "mlp with layer norm": Entry(mlp_layer_norm, (6,), 1, exact_ensemble=False),
    "mlp with prelu": Entry(mlp_prelu, (6,), 2, exact_ensemble=False),
    "lenet": Entry(LeNet, (1, 14, 14), 3),
    "vgg with batch norm": Entry(vgg, (3, 8, 8), 4),
    "batch norm after flatten": Entry(conv_flat_batch_norm, (2, 8, 8), 1, exact_ensemble=False),
    "conv 1d": Entry(conv_1d, (2, 9), 2),
    "conv 3d": Entry(conv_3d, (1, 4, 4, 4), 2),
    "lstm": Entry(lambda: Recurrent(nn.LSTM), (4, 5), 1),
    "lstm, 2 layers": Entry(lambda: Recurrent(nn.LSTM, num_layers=2), (4, 5), 2),
    "lstm, both directions": Entry(lambda: Recurrent(nn.LSTM, bidirectional=True), (4, 5), 2),
    "lstm, 3 layers, both directions": Entry(
        lambda: Recurrent(nn.LSTM, num_layers=3, bidirectional=True), (4, 5), 6
    ),
    "lstm with projection": Entry(lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=4), (4, 5), 4),
    "lstm without bias": Entry(lambda: Recurrent(nn.LSTM, bias=False), (4, 5), 1),
    "gru": Entry(lambda: Recurrent(nn.GRU), (4, 5), 1),
    "gru, 2 layers, both directions": Entry(
        lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), (4, 5), 4
    ),
    "rnn": Entry(lambda: Recurrent(nn.RNN, num_layers=2), (4, 5), 2),
    "char-lstm": Entry(lambda: CharModel(nn.LSTM), (5,), 2, tokens=11),
    "char-gru, 2 layers": Entry(lambda: CharModel(nn.GRU, layers=2), (5,), 3, tokens=11),
    "char-lstm, tied": Entry(
        lambda: CharModel(nn.LSTM, tied=True), (5,), 1, tokens=11, exact_ensemble=False
    ),
    "char-lstm, tied, 2 layers": Entry(
        lambda: CharModel(nn.LSTM, layers=2, tied=True), (5,), 2, tokens=11, exact_ensemble=False
    ),
}
