"""Sequence models that many repositories hold, written anew."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from benchmarks.real_libraries import TOKENS, Real


class WordModel(nn.Module):
    """The word language model of PyTorch's examples: a state goes in and comes out."""

    def __init__(self, *, tied: bool, width: int = 12) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(TOKENS, 12), nn.LSTM(12, width, 2)
        self.decoder = nn.Linear(width, TOKENS)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(
        self, x: Tensor, h: Tensor | None = None, c: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = None if h is None or c is None else (h, c)
        steps, (h, c) = self.rnn(self.encoder(x), state)
        return self.decoder(steps).log_softmax(-1), h, c


class CausalBlock(nn.Module):
    """A block of a small GPT with attention by hand."""

    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length))[None, None])

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(
            self.get_buffer("mask")[:, :, :t, :t] == 0, float("-inf")
        ).softmax(-1)
        seen = (scores @ v).transpose(1, 2).contiguous().view(b, t, c)
        out: Tensor = self.c_proj(seen)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        out: Tensor = x + self.out(fn.gelu(self.fc(self.ln_2(x))))
        return out


class SmallGpt(nn.Module):
    """Tokens and places, blocks, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, 16), nn.Embedding(20, 16)
        self.h = nn.ModuleList(CausalBlock(16, 4, 20) for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(16), nn.Linear(16, TOKENS, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        out: Tensor = self.head(self.ln_f(x))
        return out


class Translator(nn.Module):
    """Bidirectional encoder, additive attention, a decoder that feeds its own choice back."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(TOKENS, 8), nn.Embedding(TOKENS, 9)
        self.encoder = nn.GRU(8, 10, bidirectional=True, batch_first=True)
        self.bridge, self.attend = nn.Linear(20, 12), nn.Linear(32, 12)
        self.score = nn.Linear(12, 1, bias=False)
        self.decoder, self.out = nn.GRU(29, 12, batch_first=True), nn.Linear(41, TOKENS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys, last = self.encoder(self.source(source))
        state = torch.tanh(self.bridge(torch.cat((last[-2], last[-1]), dim=1)))
        made = []
        for step in range(target.size(1)):
            word = self.target(target[:, step])
            query = state.unsqueeze(1).repeat(1, keys.size(1), 1)
            energy = torch.tanh(self.attend(torch.cat((query, keys), dim=2)))
            weights = fn.softmax(self.score(energy).squeeze(2), dim=1)
            seen = torch.bmm(weights.unsqueeze(1), keys)
            output, state = self.decoder(
                torch.cat((word.unsqueeze(1), seen), 2), state.unsqueeze(0)
            )
            state = state.squeeze(0)
            made.append(self.out(torch.cat((output.squeeze(1), seen.squeeze(1), word), 1)))
        return torch.stack(made, 1)


class Relative(nn.Module):
    """Relative attention of Transformer-XL: content and place terms, shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, 16), nn.Linear(16, TOKENS)
        self.qkv, self.r, self.o = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.u, self.v = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(16)

    @staticmethod
    def shift(x: Tensor) -> Tensor:
        b, h, i, j = x.size()
        padded = torch.cat([x.new_zeros(b, h, i, 1), x], dim=3).view(b, h, j + 1, i)
        return padded[:, :, 1:].view_as(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, t, c = x.size()
        place = torch.arange(t - 1, -1, -1.0)[:, None] / 10000 ** (torch.arange(0, c, 2.0) / c)
        place = self.r(torch.cat([place.sin(), place.cos()], -1)).view(t, 4, 4)
        q, k, v = (p.view(b, t, 4, 4) for p in self.qkv(x).chunk(3, -1))
        content = torch.einsum("bind,bjnd->bnij", q + self.u, k)
        scores = content + self.shift(torch.einsum("bind,jnd->bnij", q + self.v, place))
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf")).softmax(-1)
        seen = torch.einsum("bnij,bjnd->bind", scores, v).reshape(b, t, c)
        out: Tensor = self.head(self.norm(x + self.o(seen)))
        return out


class Temporal(nn.Module):
    """A block of a temporal convolutional net: weight norm, chomp, residual."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(inputs, outputs, 3, padding=self.pad, dilation=dilation)
        )
        self.conv2 = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(outputs, outputs, 3, padding=self.pad, dilation=dilation)
        )
        self.match = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        made = fn.relu(self.conv1(x)[:, :, : -self.pad].contiguous())
        made = fn.relu(self.conv2(made)[:, :, : -self.pad].contiguous())
        return fn.relu(made + (x if self.match is None else self.match(x)))


class WaveNet(nn.Module):
    """Gated dilated convolutions with residual and skip paths."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(4, 8, 1)
        self.filters = nn.ModuleList(nn.Conv1d(8, 9, 2, dilation=2**k) for k in range(3))
        self.gates = nn.ModuleList(nn.Conv1d(8, 9, 2, dilation=2**k) for k in range(3))
        self.residual = nn.ModuleList(nn.Conv1d(9, 8, 1) for _ in range(3))
        self.skip = nn.ModuleList(nn.Conv1d(9, 7, 1) for _ in range(3))
        self.end1, self.end2 = nn.Conv1d(7, 6, 1), nn.Conv1d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.stem(x), None
        for filters, gates, residual, skip in zip(
            self.filters, self.gates, self.residual, self.skip, strict=True
        ):
            made = torch.tanh(filters(x)) * torch.sigmoid(gates(x))
            seen = skip(made)
            total = seen if total is None else total[:, :, -seen.size(2) :] + seen
            x = residual(made) + x[:, :, -made.size(2) :]
        assert total is not None
        out: Tensor = self.end2(fn.relu(self.end1(fn.relu(total))))
        return out


class Crnn(nn.Module):
    """Text recognition: convolutions, then an LSTM over the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.rnn, self.out = nn.LSTM(16, 9, bidirectional=True), nn.Linear(18, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cnn(x)
        b, c, h, w = x.size()
        steps, _ = self.rnn(x.view(b, c * h, w).permute(2, 0, 1))
        return fn.log_softmax(self.out(steps), dim=2)


class ConvLstm(nn.Module):
    """A convolutional LSTM with peepholes over a short film."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 6
        self.conv, self.head = nn.Conv2d(2 + 6, 4 * 6, 3, padding=1), nn.Conv2d(6, 1, 1)
        self.peep = nn.Parameter(torch.randn(3, 6, 1, 1))

    def forward(self, film: Tensor) -> Tensor:
        b, steps, _, high, wide = film.shape
        h = torch.zeros(b, self.hidden, high, wide)
        c = torch.zeros(b, self.hidden, high, wide)
        for step in range(steps):
            i, f, o, g = torch.split(self.conv(torch.cat([film[:, step], h], 1)), self.hidden, 1)
            c = (
                torch.sigmoid(f + self.peep[1] * c) * c
                + torch.sigmoid(i + self.peep[0] * c) * g.tanh()
            )
            h = torch.sigmoid(o + self.peep[2] * c) * torch.tanh(c)
        out: Tensor = self.head(h)
        return out


class Pooled(nn.Module):
    """Multi-head attention between two sets, with a residual hidden layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        q, k, v = self.q(one), self.k(other), self.v(other)
        size = self.width // self.heads
        q_, k_, v_ = (torch.cat(torch.split(x, size, 2), 0) for x in (q, k, v))
        weights = torch.softmax(q_.bmm(k_.transpose(1, 2)) / math.sqrt(self.width), 2)
        made = torch.cat(torch.split(q_ + weights.bmm(v_), q.size(0), 0), 2)
        return made + fn.relu(self.o(made))


class SetTransformer(nn.Module):
    """Induced attention, pooling by learned seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.points = nn.Linear(3, 8), nn.Parameter(torch.randn(1, 4, 8))
        self.one, self.two, self.pool = Pooled(8, 2), Pooled(8, 2), Pooled(8, 2)
        self.seeds, self.head = nn.Parameter(torch.randn(1, 1, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.one(self.points.repeat(x.size(0), 1, 1), x)
        x = self.two(x, inner)
        out: Tensor = self.head(self.pool(self.seeds.repeat(x.size(0), 1, 1), x).squeeze(1))
        return out


class TextCnn(nn.Module):
    """Convolutions of several widths over words, their maxima side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 10)
        self.convs = nn.ModuleList(nn.Conv2d(1, 7, (k, 10)) for k in (2, 3, 4))
        self.head = nn.Linear(21, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.embed(x).unsqueeze(1)
        made = [fn.relu(conv(seen)).squeeze(3) for conv in self.convs]
        pooled = [fn.max_pool1d(m, int(m.size(2))).squeeze(2) for m in made]
        out: Tensor = self.head(torch.cat(pooled, 1))
        return out


class Bags(nn.Module):
    """A text classifier over bags of words."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc, self.out = nn.EmbeddingBag(TOKENS, 12), nn.Linear(12, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(fn.relu(self.fc(self.bag(x))))
        return out


def torch_transformer() -> nn.Module:
    return nn.Transformer(16, 4, 2, 2, 24, batch_first=True)


_STATE = ((1, 1), (2, 2))
_STATES = ((2, 5, 12), (2, 5, 12))

SEQUENCES: Mapping[str, Real] = {
    "word model": Real(
        lambda: WordModel(tied=False, width=14),
        ((6, 5), (2, 5, 14), (2, 5, 14)),
        dtypes=("long",),
        state=_STATE,
    ),
    "word model, tied": Real(
        lambda: WordModel(tied=True), ((6, 5), *_STATES), dtypes=("long",), state=_STATE
    ),
    "small GPT": Real(SmallGpt, ((2, 9),), dtypes=("long",)),
    "translator with attention": Real(Translator, ((2, 6), (2, 5)), dtypes=("long", "long")),
    "relative attention": Real(Relative, ((2, 6),), dtypes=("long",)),
    "TCN with weight norm": Real(
        lambda: nn.Sequential(
            Temporal(4, 8, 1),
            Temporal(8, 8, 2),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        ((2, 4, 20),),
    ),
    "WaveNet": Real(WaveNet, ((2, 4, 20),)),
    "CRNN": Real(Crnn, ((2, 1, 8, 20),)),
    "ConvLSTM": Real(ConvLstm, ((2, 3, 2, 6, 6),)),
    "set transformer": Real(SetTransformer, ((2, 5, 3),)),
    "text CNN": Real(TextCnn, ((2, 9),), dtypes=("long",)),
    "embedding bag": Real(Bags, ((3, 6),), dtypes=("long",)),
    "nn.Transformer": Real(torch_transformer, ((2, 6, 16), (2, 5, 16))),
}
