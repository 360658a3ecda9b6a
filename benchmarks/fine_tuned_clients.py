"""Small language models and what fine-tuning makes of them: Hugging Face folders to merge.

A base model learns half of tinyshakespeare, byte by byte; clients go on from it, each on a text of
its own. The end of every text is held out: for tests, and before that for probes without labels.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from fedmerge.values import IntArray

STEPS = 64  # bytes of a sequence
SYMBOLS = 128  # of ASCII; others become question marks
BATCH = 32
BASE_STEPS, BASE_RATE = 800, 3e-3
CLIENT_STEPS, CLIENT_RATE = 200, 1e-3
HELD_OUT = 0.2  # of every client's text: half of it for tests, half for probes
TESTED = 400  # sequences per client
PROBED = 500


@dataclass(frozen=True)
class Case:
    """What the clients of a base model are fine-tuned on."""

    title: str
    texts: Mapping[str, str]  # client → text


def base_text(shakespeare: str) -> str:
    """Return what base models learn: the first half."""
    return shakespeare[: len(shakespeare) // 2]


def cases(shakespeare: str) -> dict[str, Case]:
    """Return the cases by name, near and far from the base and from each other."""
    rest = shakespeare[len(shakespeare) // 2 :]
    middle = len(rest) // 2
    spoken = speeches(rest)
    first, second = sorted(spoken, key=lambda role: len(spoken[role]), reverse=True)[:2]
    return {
        "halves": Case("two halves of the rest", {"one": rest[:middle], "two": rest[middle:]}),
        "roles": Case(
            f"the speeches of {first.title()} and {second.title()}",
            {"one": spoken[first], "two": spoken[second]},
        ),
        "code": Case(
            "the rest of the plays, and the Python code of torch.nn",
            {"one": rest, "two": source_code()},
        ),
    }


def speeches(text: str) -> dict[str, str]:
    """Return all that each role says, in order."""
    said: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        role, colon, speech = block.strip().partition(":\n")
        if colon and "\n" not in role:
            said.setdefault(role, []).append(speech)
    return {role: "\n".join(own) for role, own in said.items()}


def source_code() -> str:
    """Return the source of torch's layers, which every environment of ours has."""
    folder = Path(inspect.getfile(torch.nn)).parent / "modules"
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))


def encoded(text: str) -> IntArray:
    """Return a text as numbers of bytes."""
    return np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int64)


def parts_of(text: str) -> tuple[IntArray, IntArray, IntArray]:
    """Return what a client learns, what probes are of, and what is tested."""
    numbers = encoded(text)
    learnt, probed = (int(len(numbers) * (1 - share)) for share in (HELD_OUT, HELD_OUT / 2))
    return numbers[:learnt], numbers[learnt:probed], numbers[probed:]


def some_sequences(numbers: IntArray, most: int) -> IntArray:
    """Return sequences (n, steps + 1) evenly spread over a text, the last number the next byte."""
    count = min(most, (len(numbers) - 1) // STEPS)
    starts = np.linspace(0, len(numbers) - STEPS - 1, count).astype(int)
    return np.stack([numbers[start : start + STEPS + 1] for start in starts])


def fresh_model(seed: int) -> LlamaForCausalLM:
    """Return a small Llama with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=SYMBOLS,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=STEPS,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM, numbers: IntArray, *, steps: int, rate: float, seed: int
) -> None:
    """Learn to tell the next byte; the rate falls to nothing."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        starts = rng.integers(0, len(numbers) - STEPS - 1, BATCH)
        rows = torch.from_numpy(np.stack([numbers[s : s + STEPS + 1] for s in starts]))
        scores = model(input_ids=rows[:, :-1]).logits
        loss = functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    model.requires_grad_(True).train(False)


def write_clients(shakespeare: str, folder: Path, seed: int, names: Sequence[str]) -> None:
    """Train a base and the clients of some cases, what is not there yet, into folders."""
    base = folder / "base"
    if not base.exists():
        model = fresh_model(seed)
        train(model, encoded(base_text(shakespeare)), steps=BASE_STEPS, rate=BASE_RATE, seed=seed)
        model.save_pretrained(base)
    known = cases(shakespeare)
    for name in names:
        for number, (client, text) in enumerate(known[name].texts.items()):
            target = folder / name / client
            if not target.exists():
                model = LlamaForCausalLM.from_pretrained(base)
                own_seed = 1000 * seed + 10 * list(known).index(name) + number
                train(model, parts_of(text)[0], steps=CLIENT_STEPS, rate=CLIENT_RATE, seed=own_seed)
                model.save_pretrained(target)
