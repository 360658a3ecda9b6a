"""`python -m benchmarks.real_models`: plan, permute and merge models that people really have.

Families whose package is missing are skipped. Weights are random, nothing is fetched.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version

import numpy as np
import torch
from torch import nn

from benchmarks.classic_images import IMAGES
from benchmarks.classic_others import OTHERS
from benchmarks.classic_sequences import SEQUENCES
from benchmarks.real_libraries import HUGGING_FACE, TIMM, TORCHVISION, Real, drawn_inputs
from fedmerge import match
from fedmerge.architecture import resize_module, solve_widths
from fedmerge.architecture.from_code import (
    generic_model,
    lowest_precision,
    permuted,
    plan_model,
    probe_growth,
    random_moves,
    run,
    verify_plan,
)
from fedmerge.errors import FedmergeError
from fedmerge.merging import relative_difference
from fedmerge.values import Concat, Layout, Pinned, Plan, Product, groups_in

FAMILIES: Mapping[str, Mapping[str, Real]] = {
    "Hugging Face": HUGGING_FACE,
    "torchvision": TORCHVISION,
    "timm": TIMM,
    "by hand": {**IMAGES, **OTHERS, **SEQUENCES},
}
EXPECTED_PINS = frozenset({"", "input", "output", "pixels", "tokens"})  # every net has these


@dataclass(frozen=True)
class Outcome:
    """What became of one model."""

    family: str
    name: str
    parameters: int = 0
    groups: int = 0
    growing: int = 0
    free: float = 0.0  # share of the parameters with units on some axis
    seconds: float = 0.0  # of the walk alone
    difference: float | None = None  # of a merge of permuted copies, relative to the outputs
    pins: tuple[str, ...] = ()  # reasons that not every net has, and how many axes
    notes: tuple[str, ...] = ()
    problem: str = ""

    def line(self) -> str:
        """Return one row of the table."""
        if self.problem:
            return f"{self.family:12} {self.name:38} refused: {self.problem}"
        back = "-" if self.difference is None else f"{self.difference:.0e}"
        pins = ", ".join(self.pins)
        return (
            f"{self.family:12} {self.name:38} {self.parameters:>10,} {self.groups:4} "
            f"{self.growing:4} {100 * self.free:4.0f} % {self.seconds:6.2f} s {back:>6}  {pins}"
        )


def try_model(family: str, name: str, real: Real, *, most: int) -> Outcome:
    """Plan, verify and grow one model; merge it if it has at most so many parameters."""
    torch.manual_seed(0)
    outcome = Outcome(family, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = real.build().eval()
            inputs = drawn_inputs(real, torch.float32)
            started = time.perf_counter()
            plan = plan_model(model, inputs, state=real.state)
            outcome = _described(outcome, model, plan, time.perf_counter() - started)
            rng = np.random.default_rng(0)
            verify_plan(model, plan, inputs, rng=rng, state=real.state)
            plan = probe_growth(model, plan, inputs, rng=rng, state=real.state)
            growing = sum(group.can_grow for group in plan.groups)
            is_merged = plan.groups and outcome.parameters <= most
            difference = merged_difference(model, plan, real) if is_merged else None
            return replace(outcome, growing=growing, difference=difference)
    except FedmergeError as error:
        return replace(outcome, problem=f"{error.problem} ({error.hint})")
    except Exception as error:  # a bug of ours, which must not hide what the other models do
        return replace(outcome, problem=f"crash: {type(error).__name__}: {error}")


def _described(outcome: Outcome, model: nn.Module, plan: Plan, seconds: float) -> Outcome:
    sizes = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    with_units = [
        name
        for name, tensor in plan.tensors.items()
        if any(True for axis in tensor.axes for _ in groups_in(axis))
    ]
    total = sum(sizes[name] for name in plan.tensors)
    reasons = Counter(
        reason
        for tensor in plan.tensors.values()
        for axis in tensor.axes
        for reason in pin_reasons(axis)
        if reason not in EXPECTED_PINS
    )
    return replace(
        outcome,
        parameters=total,
        groups=len(plan.groups),
        free=sum(sizes[name] for name in with_units) / max(1, total),
        seconds=seconds,
        pins=tuple(f"{reason} {count}" for reason, count in reasons.most_common()),
        notes=plan.notes,
    )


def pin_reasons(layout: Layout) -> Iterator[str]:
    """Yield the reasons of all pinned parts of an axis."""
    match_children = {Product: "factors", Concat: "parts"}
    if isinstance(layout, Pinned):
        yield layout.reason
    elif type(layout) in match_children:
        for child in getattr(layout, match_children[type(layout)]):
            yield from pin_reasons(child)


def merged_difference(model: nn.Module, plan: Plan, real: Real) -> float:
    """Return how far a merge of two permuted copies is from the model, relative to its outputs."""
    rng = np.random.default_rng(1)
    dtype = lowest_precision(model, drawn_inputs(real, torch.float32), state=real.state)
    module = generic_model(model, dtype, rng=rng)
    shapes = {name: tuple(t.shape) for name, t in module.state_dict().items()}
    widths = solve_widths(plan, shapes, source="the model")
    moves = random_moves(plan, widths, rng)
    clients = [module.state_dict(), permuted(module, plan, moves, widths).state_dict()]
    state = match(clients, plan=plan).state_dict()
    result = generic_model(model, dtype, rng=rng)
    resize_module(result, {name: tuple(t.shape) for name, t in state.items()})
    with torch.no_grad():
        for name, tensor in result.state_dict(keep_vars=True).items():
            tensor.copy_(state[name])
    inputs = drawn_inputs(real, dtype)
    expected = run(module, inputs, state=real.state)
    return relative_difference(expected, run(result.eval(), inputs, state=real.state))


def main() -> None:
    """Try the models, print one row each, and a summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_models", description=__doc__)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="repeatable")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--merge-up-to", type=int, default=1_000_000, help="parameters")
    parser.add_argument("--notes", action="store_true", help="also print what the plans note")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    arguments = parser.parse_args()
    outcomes = []
    for family, name, real in _chosen(arguments.family or list(FAMILIES), arguments.only):
        outcome = try_model(family, name, real, most=arguments.merge_up_to)
        outcomes.append(outcome)
        if not arguments.json:
            print(outcome.line(), flush=True)
            for note in outcome.notes if arguments.notes else ():
                print(f"    {note}")
    if arguments.json:
        print(json.dumps({"versions": versions(), "models": [asdict(o) for o in outcomes]}))
    else:
        refused = sum(bool(outcome.problem) for outcome in outcomes)
        print(f"{len(outcomes)} models, {refused} refused; {versions()}")


def _chosen(families: list[str], only: str) -> Iterator[tuple[str, str, Real]]:
    for family in families:
        for name, real in FAMILIES[family].items():
            is_there = not real.package or importlib.util.find_spec(real.package)
            if is_there and only.lower() in name.lower():
                yield family, name, real


def versions() -> dict[str, str]:
    """Return the versions of the packages that the models come from."""
    packages = ("torch", "transformers", "torchvision", "timm")
    return {name: version(name) for name in packages if importlib.util.find_spec(name)}


if __name__ == "__main__":
    main()
