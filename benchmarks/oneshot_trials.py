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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import torch

import fedmerge
from benchmarks.digits import print_table
from benchmarks.oneshot_clients import Folders
from benchmarks.oneshot_runs import carry_out
from benchmarks.oneshot_suites import DEVELOPMENT_SEEDS, DISTILLED, OURS, Merging
from fedmerge.probing import Probes
from fedmerge.types.progress import silent
from fedmerge.workflow.oneshot import distill
from fedmerge.workflow.oneshot.models import Models
from fedmerge.workflow.oneshot.probes import ProbeMaker
from fedmerge.workflow.oneshot.scene import Scene
from fedmerge.workflow.options import MatchOptions

GROWTH = 1.5
SEEDS = range(DEVELOPMENT_SEEDS, DEVELOPMENT_SEEDS + 3)
COPIES = 3  # of the inputs, each mixed with another one
SYNTHETIC = 500  # beside them half as many of noise

More = Callable[[Scene], Probes]  # what merges are fitted to, besides the inputs that are held out


@dataclass(frozen=True)
class Trial:
    """Merges as they are, or with something else."""

    method: str
    cases: Sequence[str]
    ways: Mapping[str, Callable[[], AbstractContextManager[object]]]


@contextmanager
def fitted_to(more: More) -> Iterator[None]:
    """Let merges be fitted to other probes; what is held out stays."""
    usual = Scene.on

    def on(models: Models, options: MatchOptions, probes: Probes, neutral: Probes) -> Scene:
        scene = usual(models, options, probes, neutral)
        return replace(scene, probes=more(scene))

    with patch.object(Scene, "on", on):
        yield


def mixed(scene: Scene) -> Probes:
    """Return the inputs and mixtures of them."""
    return scene.probes.mixed(COPIES, seed=scene.options.seed)


def synthetic(scene: Scene) -> Probes:
    """Return the inputs, and others that are made of the clients' answers."""
    asked = fedmerge.ProbeOptions("synthetic", count=SYNTHETIC)
    return scene.probes.joined(ProbeMaker(scene.models, asked, scene.options.seed).probes(silent))


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
            "without mixtures": lambda: patch.object(distill, "MIXTURES", 0),
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
