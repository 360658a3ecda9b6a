"""Which groups can grow: zero units are added to them, and outputs compared."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code.module_plan import fix_widths, let_go
from fedmerge.architecture.from_code.modules import (
    StatePairs,
    copied,
    evaluating,
    float_tensors,
)
from fedmerge.architecture.from_code.soundness import (
    TOLERANCE,
    cast_inputs,
    differ,
    generic_model,
    lowest_precision,
    run,
)
from fedmerge.architecture.widths import resize_module, solve_widths
from fedmerge.errors import ArchitectureError, UserCodeError
from fedmerge.private_torch import map_tensors
from fedmerge.tracebacks import message_of
from fedmerge.values.plans import (
    Plan,
    axis_size,
    groups_in,
    index_map,
)

Bundle: TypeAlias = tuple[str, ...]  # groups that grow together


ADDED = 2  # zero units per group


_STEPS = 3  # different numbers of added units in the last probe


_CHANGED = "zero units change the outputs"


_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class _Probe:
    """A model with generic values and its outputs, to be compared with grown copies."""

    module: nn.Module
    plan: Plan
    inputs: tuple[Any, ...]
    state: StatePairs
    outputs: list[Tensor]
    widths: dict[str, int]
    tolerance: float

    def failure(self, groups: Sequence[str]) -> str:
        """Return why growing these groups together fails, or nothing."""
        return self.failure_at({g: w + ADDED * (g in groups) for g, w in self.widths.items()})

    def failure_together(self, bundles: Sequence[Bundle]) -> str:
        """Return why growing these bundles, by the same and by different numbers, fails."""
        evenly = self.failure([g for bundle in bundles for g in bundle])
        if evenly:
            return evenly
        added = {g: ADDED + k % _STEPS for k, bundle in enumerate(bundles) for g in bundle}
        return self.failure_at({g: w + added.get(g, 0) for g, w in self.widths.items()})

    def failure_at(self, widths: dict[str, int]) -> str:
        """Return why the model at other widths fails, or nothing."""
        try:
            grown = resized(self.module, self.plan, self.widths, widths)
            inputs = self._inputs_at(widths)
            outputs = run(grown, inputs, state=self.state)
        except UserCodeError as error:
            return f"the resized model does not run: {_reason(error.__cause__ or error)}"
        except ArchitectureError as error:
            return f"the resized model does not run: {error.problem}"
        return _CHANGED if differ(self.outputs, outputs, self.tolerance) else ""

    def _inputs_at(self, widths: dict[str, int]) -> tuple[Any, ...]:
        """Return the inputs, carried states with the axes of a grown width grown too."""
        moved = {self.widths[g]: width for g, width in widths.items() if width > self.widths[g]}
        arguments = list(self.inputs)
        for i, _ in self.state:
            arguments[i] = map_tensors(
                lambda t: t.new_zeros([moved.get(s, s) for s in t.shape]), arguments[i]
            )
        return tuple(arguments)


def probe_growth(
    model: nn.Module,
    plan: Plan,
    inputs: tuple[Any, ...],
    *,
    rng: np.random.Generator,
    state: StatePairs = (),
) -> Plan:
    """Return the plan with groups that can't take zero units marked so, with the reason.

    All groups that may grow are tried together, then one of each kind of layer, by halves; groups
    tied in width grow together.
    """
    dtype = lowest_precision(model, inputs, state=state)
    arguments = cast_inputs(inputs, dtype)
    module = generic_model(model, dtype, rng=rng)
    shapes = {name: tuple(t.shape) for name, t in float_tensors(module)[0].items()}
    widths = solve_widths(plan, shapes, source="the model")
    outputs = run(module, arguments, state=state)
    plan = let_go(plan)
    probe = _Probe(module, plan, arguments, state, outputs, widths, TOLERANCE[dtype])
    fixed: dict[str, str] = {group.name: group.why for group in plan.groups if not group.can_grow}
    good = _growable(probe, _bundles(plan, fixed), fixed)
    good, ties = _together(probe, good, fixed)
    groups = tuple(
        replace(group, can_grow=False, why=fixed[group.name]) if group.name in fixed else group
        for group in plan.groups
    )
    probed = replace(plan, groups=groups, same_width=(*plan.same_width, *ties))
    return fix_widths(probed, widths)


def _together(
    probe: _Probe, good: list[Bundle], fixed: dict[str, str]
) -> tuple[list[Bundle], list[Bundle]]:
    """Return bundles that grow together by different numbers of units, and new ties among them.

    Groups whose width is one number in the model's code must stay equally wide; if that does not
    help, bundles are added one by one.
    """
    if not good or not probe.failure_together(good):
        return good, []
    by_width: dict[int, Bundle] = {}
    for bundle in good:
        width = probe.widths[bundle[0]]
        by_width[width] = by_width.get(width, ()) + bundle
    tied = list(by_width.values())
    if not probe.failure_together(tied):
        return tied, [bundle for bundle in tied if bundle not in good]
    kept: list[Bundle] = []
    for bundle in good:
        why = probe.failure_together([*kept, bundle])
        if why:
            fixed.update(dict.fromkeys(bundle, f"not together with others: {why}"))
        else:
            kept.append(bundle)
    return kept, []


def resized(
    module: nn.Module, plan: Plan, widths: dict[str, int], new_widths: dict[str, int]
) -> nn.Module:
    """Return a copy of a module at new widths, its units first and zero units behind them.

    Parameters whose shapes stay are the module's own.
    """
    before, aliases = float_tensors(module)
    shapes = {
        name: tuple(axis_size(axis, new_widths) for axis in tensor.axes)
        for name, tensor in plan.tensors.items()
    }
    same = [before[n] for n, shape in shapes.items() if shape == before[n].shape]
    result = copied(module, shared=[t for t in same if isinstance(t, nn.Parameter)])
    shapes |= {alias: shapes[name] for alias, name in aliases.items() if name in shapes}
    resize_module(result, shapes)
    kept = {group: np.arange(width) for group, width in widths.items()}
    after = float_tensors(result)[0]
    for name, tensor in plan.tensors.items():
        grown = [new_widths[g] != widths[g] for axis in tensor.axes for g in groups_in(axis)]
        if not any(grown):
            continue
        maps = [torch.from_numpy(index_map(axis, kept, new_widths)) for axis in tensor.axes]
        with torch.no_grad():
            after[name].zero_()
            after[name][torch.meshgrid(*maps, indexing="ij")] = before[name].detach()
    return evaluating(result)


def _reason(error: BaseException) -> str:
    """Return why a resized model fails, for a plan: without files and lines."""
    if isinstance(error, AssertionError):
        return "its own check of sizes fails"
    return message_of(error)


def _bundles(plan: Plan, fixed: dict[str, str]) -> list[Bundle]:
    """Return the groups that may grow, those that must stay equally wide together."""
    bundles: dict[str, Bundle] = {group.name: (group.name,) for group in plan.groups}
    for tie in plan.same_width:
        joined = tuple(dict.fromkeys(g for group in tie for g in bundles[group]))
        stuck = next((group for group in joined if group in fixed), None)
        if stuck is not None:
            why = f"must stay as wide as '{stuck}'"
            fixed.update({group: why for group in joined if group not in fixed})
        bundles.update(dict.fromkeys(joined, joined))
    found = dict.fromkeys(bundles[group.name] for group in plan.groups)
    return [bundle for bundle in found if not set(bundle) & fixed.keys()]


def _growable(probe: _Probe, bundles: list[Bundle], fixed: dict[str, str]) -> list[Bundle]:
    """Return the bundles that grow; the others' reasons go to `fixed`.

    Of bundles of one kind, the same layer of block after block, one is tried, and then the others
    all together: what the first can't do they can't, as a rule.
    """
    if not bundles or not probe.failure([group for bundle in bundles for group in bundle]):
        return bundles
    kinds: dict[Hashable, list[Bundle]] = {}
    for bundle in bundles:
        kinds.setdefault(_kind(probe, bundle), []).append(bundle)
    good = set(_halved(probe, [first for first, *_ in kinds.values()], fixed))
    for first, *others in kinds.values():
        groups = [group for bundle in others for group in bundle]
        if first in good or (others and not probe.failure(groups)):
            good.update(others)
        else:
            fixed.update(dict.fromkeys(groups, fixed[first[0]]))
    return _halved(probe, [bundle for bundle in bundles if bundle in good], fixed)


def _kind(probe: _Probe, bundle: Bundle) -> Hashable:
    """Return what groups of like layers have in common: their widths, and names but for numbers."""
    return frozenset(
        (_NUMBER.sub("#", name), axis, probe.widths[group])
        for group in bundle
        for name, axis in probe.plan.axes_of(group)
    )


def _halved(probe: _Probe, bundles: list[Bundle], fixed: dict[str, str]) -> list[Bundle]:
    """Return the bundles that grow, halving a set that fails; the others' reasons go to `fixed`."""
    if not bundles:
        return []
    why = probe.failure([group for bundle in bundles for group in bundle])
    if not why:
        return bundles
    if len(bundles) == 1:
        fixed.update(dict.fromkeys(bundles[0], why))
        return []
    middle = len(bundles) // 2
    halves = bundles[:middle], bundles[middle:]
    return [good for half in halves for good in _halved(probe, half, fixed)]
