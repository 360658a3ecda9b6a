"""Recurrent models of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Recurrent(nn.Module):
    """A recurrent stack with a linear layer on its steps."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.rnn = kind(5, 6, batch_first=True, **settings)
        features = (self.rnn.proj_size or 6) * (2 if self.rnn.bidirectional else 1)
        self.fc = nn.Linear(features, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps, _ = self.rnn(x)
        out: Tensor = self.fc(steps)
        return out


class LastStates(nn.Module):
    """Reads the last states of both directions of the upper layer, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.rnn(x)
        out: Tensor = self.fc(torch.cat([hidden[-2], hidden[-1]], 1))
        return out


class FromZeros(nn.Module):
    """Makes its initial state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.layers = 6, 2
        self.lstm = nn.LSTM(5, 6, 2, batch_first=True)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(self.layers, x.size(0), self.hidden)
        steps, _ = self.lstm(x, (state, state.clone()))
        out: Tensor = self.fc(steps[:, -1])
        return out


class FromLearned(nn.Module):
    """Learns its initial state, one tensor for both layers: they are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, 2, batch_first=True)
        self.start = nn.Parameter(torch.randn(2, 1, 6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = self.start.expand(-1, len(x), -1).contiguous()
        steps, _ = self.lstm(x, (state, torch.zeros_like(state)))
        out: Tensor = self.fc(steps[:, -1])
        return out


class Packed(nn.Module):
    """Sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([3, 4]), True, enforce_sorted=False)
        steps, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        out: Tensor = self.fc(steps.sum(1))
        return out


class Stateful(nn.Module):
    """Takes and returns its state."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(5, 6, layers, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, (hidden, cell) = self.lstm(x, (hidden, cell))
        return self.fc(steps), hidden, cell


class Cells(nn.Module):
    """A cell in a loop."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        kinds = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
        self.cell: nn.Module = kinds[kind](5, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        outputs = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if self.kind == "lstm" else state)
        out: Tensor = self.fc(torch.stack(outputs, 1))
        return out


class HandWritten(nn.Module):
    """An LSTM from two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 6
        self.inputs, self.state, self.fc = nn.Linear(5, 24), nn.Linear(6, 24), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(len(x), self.hidden)
        cell = torch.zeros_like(hidden)
        for t in range(x.size(1)):
            i, f, g, o = (self.inputs(x[:, t]) + self.state(hidden)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        out: Tensor = self.fc(hidden)
        return out


class Language(nn.Module):
    """An embedding, two LSTM layers and a decoder, tied or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        width = 4 if tied else 7
        self.encoder = nn.Embedding(11, 4)
        self.rnn = nn.LSTM(4, width, 2, batch_first=True)
        self.decoder = nn.Linear(width, 11)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        steps, _ = self.rnn(self.encoder(tokens))
        out: Tensor = self.decoder(steps)
        return out
