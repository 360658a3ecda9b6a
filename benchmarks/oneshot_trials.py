"""What distillation makes of a client, and of places between the two, without fedmerge's choices.

`python -m benchmarks.oneshot_trials --data DIR --checkpoints DIR --case cifar_resnet20`: for each
place on the way the accuracy (or bits) and pull on test data.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import fedmerge
from benchmarks.oneshot_clients import Folders, Setting, setting
from benchmarks.oneshot_runs import LESSON, RATE, outputs_of, tested
from benchmarks.oneshot_suites import FAMILIES
from fedmerge.merging import refinement_loss, share_of_rate
from fedmerge.probes import AUGMENTATIONS, Augmentation, read_probes

SHARES = (0.0, 0.2, 0.4, 0.7, 1.0)  # of the way
SEED = 0


def main(words: Sequence[str] | None = None) -> None:
    """Distill a case's first client into its ensemble, and print what is on the way."""
    given = _arguments(words)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        found = setting(given.case, SEED, Folders(given.data, given.checkpoints, Path(work)))
        found = replace(found, x=found.x[: given.tested], y=found.y[: given.tested])
        ways = Augmentation(tuple(tuple(filter(None, way.split("+"))) for way in given.ways))
        start = _models(found)[0]
        end = _distilled(found, ways, given.steps, given.rate)
        for share, model in _between(start, end):
            outcome = tested(outputs_of(model, found), found)
            print(
                f"{share:.1f}: {outcome.scores['merge']:.2f}, pull {outcome.pull:.2f}", flush=True
            )


def _distilled(found: Setting, ways: Augmentation, steps: int, rate: float) -> nn.Module:
    """Return the first client, trained to answer changed inputs as the ensemble does."""
    assert found.unlabelled is not None
    probes, models = read_probes(found.unlabelled), _models(found)
    student = copy.deepcopy(models[0])
    optimizer = torch.optim.Adam(student.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_rate(steps))
    generator = torch.Generator().manual_seed(SEED)
    for number in range(steps):
        [batch] = ways.batch(number, probes.drawn(LESSON, generator), generator).inputs
        with torch.no_grad():
            wanted = torch.stack([model(batch) for model in models]).mean(0).flatten(0, -2)
        spread = float(wanted.var(0).mean())
        optimizer.zero_grad()
        loss = refinement_loss(student(batch).flatten(0, -2), wanted, spread=spread)
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
    return student


def _between(start: nn.Module, end: nn.Module) -> Iterator[tuple[float, nn.Module]]:
    """Yield the models on the straight line from one to another."""
    one, other = _copied(start), _copied(end)
    for share in SHARES:
        state = {name: torch.lerp(one[name], other[name], share) for name in one}
        start.load_state_dict(state, strict=False)
        yield share, start


def _copied(model: nn.Module) -> Mapping[str, Tensor]:
    return {name: own.detach().clone() for name, own in model.named_parameters()}


def _models(found: Setting) -> list[nn.Module]:
    return [fedmerge.load_model(found.code.build, file).eval() for file in found.files]


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/oneshot_trials.py", description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--case", choices=list(FAMILIES), required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--tested", type=int, default=1000, help="test samples, the first ones")
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["views+flips", "flips+pastes", "views+flips+mixtures"],
        help=f"what is done to batches in turn, of {'+'.join(AUGMENTATIONS)}; '': nothing",
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
