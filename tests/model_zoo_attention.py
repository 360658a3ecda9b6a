"""Mixers and transformers of the zoo."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as fn


class Mixer(nn.Module):
    """Two blocks: the stream, one hidden width for tokens, one for channels each."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 6, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
        self.channels = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6))
        self.reduce, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        out: Tensor = self.head(fn.layer_norm(self.reduce(x.mean(1)), (8,)))
        return out


class Attention(nn.Module):
    """Self-attention with stacked queries, keys and values, as in timm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = fn.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(x.transpose(1, 2).reshape(batch, tokens, width))
        return out


class VisionBlock(nn.Module):
    """Attention and a hidden layer, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(8), Attention(8, 2), nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.narrow(fn.gelu(self.wide(self.norm2(x))))
        return out


class VisionTransformer(nn.Module):
    """Two blocks: the stream; heads, queries with keys, values and a hidden layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.place = nn.Parameter(torch.zeros(1, 5, 8))
        self.blocks = nn.Sequential(VisionBlock(), VisionBlock())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        out: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return out


class GptBlock(nn.Module):
    """Causal attention by hand, and a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        heads = [
            part.view(batch, tokens, 2, width // 2).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, 2)
        ]
        scores = heads[0] @ heads[1].transpose(-2, -1) / math.sqrt(heads[1].size(-1))
        mask = self.get_buffer("mask")[:, :, :tokens, :tokens]
        scores = scores.masked_fill(mask == 0, float("-inf")).softmax(-1)
        seen = (scores @ heads[2]).transpose(1, 2).contiguous().view(batch, tokens, width)
        x = x + self.proj(seen)
        out: Tensor = x + self.narrow(fn.gelu(self.wide(self.norm2(x))))
        return out


class Gpt(nn.Module):
    """Two blocks with a tied embedding: the stream; four groups each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.blocks, self.norm = nn.Sequential(GptBlock(), GptBlock()), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1)))
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


class Encoder(nn.Module):
    """PyTorch's own encoder layer: heads, queries with keys, values, the hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(x))
        return out


class GrowingHeads(nn.Module):
    """Queries, keys and values apart, stacked per head; the code says how wide a head is only."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(5, 6), nn.Linear(9, 6, bias=False)
        self.qkv, self.head = nn.Linear(6, 3 * (4 + 4 + 3)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        stacked = self.qkv(x).unflatten(-1, (-1, 11)).transpose(1, 2)
        q, k, v = stacked.split((4, 4, 3), -1)
        seen = fn.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.head(x + self.out(seen.transpose(1, 2).flatten(2)))
        return out


class CountedHeads(nn.Module):
    """Attention by hand, queries, keys and values apart; the module counts its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.attention = CountedAttention(6, heads=3, head_dim=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out: Tensor = self.head(x + self.attention(x))
        return out


class CountedAttention(nn.Module):
    """Softmax of scaled products, heads × units per head wide inside."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, head_dim
        self.q, self.v = (nn.Linear(width, heads * head_dim) for _ in range(2))
        self.k = nn.Linear(width, heads * head_dim, bias=False)  # softmax would not see one
        self.out = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1)
        seen = (scores @ v).transpose(1, 2).reshape(*x.shape[:2], self.num_heads * self.head_dim)
        out: Tensor = self.out(seen)
        return out


class CrossAttention(nn.Module):
    """nn.MultiheadAttention from one sequence to another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        seen, _ = self.attention(x, y, y)
        out: Tensor = self.head(x + seen)
        return out


class SequenceToSequence(nn.Module):
    """nn.Transformer: the stream; attention and hidden; the decoder's two and hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.body = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.tokens(tokens)
        out: Tensor = self.head(self.body(x, x, tgt_mask=mask))
        return out


class Llama(nn.Module):
    """Rotary places pin queries' and keys' units; grouped queries, a gated hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm1, self.norm2 = nn.Embedding(11, 16), nn.RMSNorm(16), nn.RMSNorm(16)
        self.q, self.k = nn.Linear(16, 16, bias=False), nn.Linear(16, 8, bias=False)
        self.v, self.o = nn.Linear(16, 8, bias=False), nn.Linear(16, 16, bias=False)
        self.gate, self.up = nn.Linear(16, 20, bias=False), nn.Linear(16, 20, bias=False)
        self.down, self.head = nn.Linear(20, 16, bias=False), nn.Linear(16, 11, bias=False)

    def heads(self, x: Tensor, count: int, *, turned: bool) -> Tensor:
        x = x.view(*x.shape[:2], count, 4).transpose(1, 2)
        if turned:
            places = torch.arange(x.shape[2])[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
            other = torch.cat([-x[..., 2:], x[..., :2]], -1)
            x = x * places.cos() + other * places.sin()
        return x.repeat_interleave(4 // count, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        seen = self.norm1(x)
        q, k = self.heads(self.q(seen), 4, turned=True), self.heads(self.k(seen), 2, turned=True)
        v = self.heads(self.v(seen), 2, turned=False)
        seen = fn.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        seen = self.norm2(x)
        x = x + self.down(fn.silu(self.gate(seen)) * self.up(seen))
        out: Tensor = self.head(x)
        return out


class ConvNext(nn.Module):
    """A depthwise convolution, a channels-last layer norm and a layer scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, 6, 2, 2), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm, self.wide, self.narrow = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.scale, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        seen = self.norm(self.depth(x).permute(0, 2, 3, 1))
        seen = self.scale * self.narrow(fn.gelu(self.wide(seen)))
        out: Tensor = self.head((x + seen.permute(0, 3, 1, 2)).mean((2, 3)))
        return out
