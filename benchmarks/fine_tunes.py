"""`python -m benchmarks.fine_tunes --data DIR`: merges of fine-tunes of one small language model.

Averages, fits in place and merges with the base, next to every client and their ensemble; printed
as tables. Models and scores are kept in `--work`, so that runs go on where they were.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.utils import logging

import fedmerge
from benchmarks.fine_tuned_clients import (
    PROBED,
    TESTED,
    Case,
    cases,
    parts_of,
    some_sequences,
    write_clients,
)

TEXT = "tinyshakespeare.txt"
PERCENT = 100


@dataclass(frozen=True)
class Score:
    """What a model is worth on the texts of all clients."""

    accuracy: float  # of the next byte, in %
    loss: float
    seconds: float = 0.0  # CPU time of the merge
    note: str = ""


WAYS: Mapping[str, Mapping[str, Any]] = {  # with inputs or without: keywords of `match`
    "average": {"method": "average"},
    "base + 0.75 × mean change": {"base": True, "scale": 0.75, "method": "average"},
    "base + 1.25 × mean change": {"base": True, "scale": 1.25, "method": "average"},
    "by default": {},
    "fit in place": {"merge_units": "fit-in-place"},
    "with the base": {"base": True},
}


def main() -> None:
    """Train what is not there yet, merge, and print a table per case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tunes", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help=f"folder of {TEXT}")
    parser.add_argument("--work", type=Path, help="folder that trained models are kept in")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=["halves", "roles", "code"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    text = (arguments.data / TEXT).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        work = arguments.work or Path(name)
        for case in arguments.cases:
            found = []
            for seed in arguments.seeds:
                folder = work / f"seed-{seed}"
                write_clients(text, folder, seed, [case])
                found.append(kept_scores(cases(text)[case], folder, case, Path(name)))
            print("\n".join(table(cases(text)[case].title, found)), flush=True)


def kept_scores(case: Case, folder: Path, name: str, scratch: Path) -> dict[str, Score]:
    """Return the scores of a case, measured if its folder has none."""
    file = folder / name / "scores.json"
    if not file.exists():
        measured_now = {way: vars(score) for way, score in scores(case, folder, name, scratch)}
        file.write_text(json.dumps(measured_now, indent=1), encoding="utf-8")
    return {way: Score(**own) for way, own in json.loads(file.read_text("utf-8")).items()}


def scores(case: Case, folder: Path, name: str, scratch: Path) -> Iterator[tuple[str, Score]]:
    """Yield what base, clients, their ensemble and every merge of them are worth."""
    parts = [parts_of(text) for text in case.texts.values()]
    tests = [some_sequences(tested, TESTED) for _, _, tested in parts]
    probes = np.concatenate([some_sequences(probed, PROBED)[:, :-1] for _, probed, _ in parts])
    files = [folder / name / client for client in case.texts]
    models = [_opened(file) for file in files]
    yield "base", measured(answers_of(folder / "base"), tests)
    alone = {file.name: measured(answers_of(file), tests) for file in files}
    best = max(alone, key=lambda client: alone[client].accuracy)
    yield "best client", alone[best]
    yield "mean client", mean_of([*alone.values()])
    yield "ensemble", measured(lambda rows: mean_scores(models, rows), tests)
    for way, given in WAYS.items():
        for data in (None, torch.from_numpy(probes)):
            if "method" in given and data is not None:
                continue
            out = scratch / f"{os.getpid()}-merged"
            yield _titled(way, data), _merged(files, folder, out, given, data, tests)


def mean_of(each: Sequence[Score]) -> Score:
    """Return the mean of several models' scores."""
    accuracy, loss = np.mean([(score.accuracy, score.loss) for score in each], axis=0)
    return Score(float(accuracy), float(loss))


def _titled(way: str, data: Tensor | None) -> str:
    if "method" in WAYS[way]:
        return way
    return f"{way}, {'no data' if data is None else 'inputs'}"


def _merged(
    files: Sequence[Path],
    folder: Path,
    out: Path,
    given: Mapping[str, Any],
    data: Tensor | None,
    tests: Sequence[Any],
) -> Score:
    keywords = dict(given) | ({} if data is None else {"probe_data": data})
    if "base" in keywords:
        keywords["base"] = folder / "base"
    started = time.process_time()
    merge = fedmerge.match(files, output=out, force=True, max_growth=1, **keywords)
    seconds = time.process_time() - started
    note = "" if merge.quality is None else merge.quality.chosen
    found = measured(answers_of(out), tests)
    return Score(found.accuracy, found.loss, seconds, note)


def answers_of(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return what the model of a folder answers to rows of bytes."""
    model = _opened(folder)
    return lambda rows: mean_scores([model], rows)


def _opened(folder: Path) -> nn.Module:
    model: nn.Module = LlamaForCausalLM.from_pretrained(folder)
    return model.train(False)


def mean_scores(models: Sequence[nn.Module], rows: Tensor) -> Tensor:
    """Return the mean of the models' logits (rows, steps, symbols)."""
    with torch.no_grad():
        each = [model(input_ids=rows).logits for model in models]
    return torch.stack(each).mean(0)


def measured(answers: Callable[[Tensor], Tensor], tests: Sequence[Any]) -> Score:
    """Return accuracy and loss, in the mean over the clients' texts."""
    found = []
    for sequences in tests:
        rows = torch.from_numpy(sequences)
        logits, wanted = answers(rows[:, :-1]), rows[:, 1:]
        right = (logits.argmax(-1) == wanted).float().mean()
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        found.append((PERCENT * float(right), float(loss)))
    accuracy, mean_loss = np.mean(found, axis=0)
    return Score(round(float(accuracy), 3), round(float(mean_loss), 5))


def table(title: str, found: Sequence[Mapping[str, Score]]) -> Iterator[str]:
    """Yield a table of means over seeds, with the least and the greatest."""
    yield f"\n{title}:\n"
    yield "| model | next byte | loss | CPU seconds | chosen |"
    yield "|---|---|---|---|---|"
    for name in found[0]:
        own = [scores[name] for scores in found]
        chosen = ", ".join(dict.fromkeys(score.note for score in own if score.note))
        seconds = np.mean([score.seconds for score in own])
        cells = [spread([s.accuracy for s in own], 1), spread([s.loss for s in own], 3)]
        yield f"| {name} | {' | '.join(cells)} | {f'{seconds:.0f}' if seconds else ''} | {chosen} |"


def spread(values: Sequence[float], digits: int) -> str:
    """Return a mean with the least and the greatest value."""
    shown = [f"{value:.{digits}f}" for value in (np.mean(values), min(values), max(values))]
    return shown[0] if len(values) == 1 else f"{shown[0]} ({shown[1]} to {shown[2]})"


if __name__ == "__main__":
    main()
