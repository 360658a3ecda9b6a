"""What was tried for one-shot merges and not taken, or only for some: docs/oneshot.md quotes it.

`python -m benchmarks.oneshot_trials --data DIR --work clients` trains the development clients of
`benchmarks.oneshot`, unless the folder has them, merges them with 1,000 unlabelled inputs for some
minutes, and prints tables of accuracies in % of training data that no client has.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch

import fedmerge
from benchmarks.digits import print_table
from benchmarks.oneshot_clients import Folders
from benchmarks.oneshot_runs import carry_out
from benchmarks.oneshot_suites import DEVELOPMENT_SEEDS, DISTILLED, OURS, Merging
from fedmerge.merging import Answers, ClientModules, by_probes, collect_answers, distillation
from fedmerge.probes import ProbedClients, Probes, make_probes

GROWTH = 1.5
SEEDS = range(DEVELOPMENT_SEEDS, DEVELOPMENT_SEEDS + 3)
COPIES = 3  # of the inputs, each mixed with another one
SYNTHETIC = 500  # beside them half as many of noise

More = Callable[[ClientModules, Probes], Probes]  # what merges are fitted to instead


@dataclass(frozen=True)
class Trial:
    """Merges as they are, or with something else."""

    method: str
    cases: Sequence[str]
    ways: Mapping[str, Callable[[], AbstractContextManager[object]]]


@contextmanager
def fitted_to(more: More) -> Iterator[None]:
    """Let merges be fitted to other probes; what is held out stays."""

    def collect(modules: ClientModules, probes: Probes, held_out: Probes) -> Answers:
        return collect_answers(modules, more(modules, probes), held_out)

    with patch.object(by_probes, "collect_answers", collect):
        yield


def mixed(modules: ClientModules, probes: Probes) -> Probes:
    """Return the inputs and mixtures of them."""
    return probes.mixed(COPIES, seed=modules.session.options.seed)


def synthetic(modules: ClientModules, probes: Probes) -> Probes:
    """Return the inputs, and others that are made of the clients' answers."""
    options = fedmerge.ProbeOptions("synthetic", count=SYNTHETIC)
    clients = ProbedClients(
        modules.clients,
        modules.sample_inputs(),
        options,
        seed=modules.session.options.seed,
        device=modules.device,
    )
    return probes.joined(make_probes(clients))


TRIALS = (
    Trial(
        OURS,
        ("CIFAR net", "CNN with batch norm", "LSTM over rows"),
        {
            "as it is": nullcontext,
            "mixtures of two inputs beside them": lambda: fitted_to(mixed),
            "synthetic inputs and noise beside them": lambda: fitted_to(synthetic),
        },
    ),
    Trial(
        DISTILLED,
        ("CIFAR net",),
        {
            "as it is": nullcontext,
            "without mixtures": lambda: patch.object(distillation, "MIXTURES", 0),
        },
    ),
)


def rows(trial: Trial, folders: Folders) -> Iterator[Sequence[str]]:
    """Yield the table of a trial."""
    yield [trial.method, *chain(*([case, "seconds"] for case in trial.cases))]
    for name, way in trial.ways.items():
        with way():
            yield [name, *chain(*(_measured(trial.method, case, folders) for case in trial.cases))]


def _measured(method: str, case: str, folders: Folders) -> tuple[str, str]:
    mergings = [Merging(case, method, "data", seed, GROWTH) for seed in SEEDS]
    each = [carry_out(merging, folders) for merging in mergings]
    scores = [own.scores["merge"] for own in each]
    seconds = statistics.mean(own.seconds for own in each)
    spread = f"({min(scores):.1f} to {max(scores):.1f})"
    return f"{statistics.mean(scores):.1f} {spread}", f"{seconds:.0f}"


def main(words: Sequence[str] | None = None) -> None:
    """Print a table of each trial."""
    parser = argparse.ArgumentParser(description=__doc__, prog="benchmarks.oneshot_trials")
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--work", type=Path, required=True, help="folder of trained clients")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    for trial in TRIALS:
        print_table(rows(trial, Folders(arguments.data, arguments.data, arguments.work)))


if __name__ == "__main__":
    main()
