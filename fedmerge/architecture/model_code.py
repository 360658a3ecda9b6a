"""The user's model code: built, brought to a client's widths, planned and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code import (
    WHY_UNTRIED,
    ExportedProgram,
    Ways,
    deduce_inputs,
    evaluating,
    exported_inputs,
    freed_untried,
    held_untried,
    load_factory,
    pin_misfits,
    plan_model,
    probe_growth,
    program_inputs,
    verify_plan,
    ways_of,
)
from fedmerge.architecture.from_code.modules import StatePairs, plain_numbers
from fedmerge.architecture.from_library import LIBRARIES, ConfiguredModel, library_model
from fedmerge.architecture.tensor_names import is_prefixed, model_names, renamed, shapes_for
from fedmerge.architecture.widths import resize_module
from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.private_torch import is_compiler_loaded, leaves, map_leaves
from fedmerge.user_code import (
    copied_object,
    remember,
    run_model,
    user_code,
)
from fedmerge.values.arrays import IntArray
from fedmerge.values.option_fields import Rule, check_options, each, whole, words_in
from fedmerge.values.plans import Pinned, Plan, TensorPlan

_HINT = "say what it is fed with `input_shape`"
UNREAD = "not read by the model"
PROBE_BATCH = 2  # samples that a model is planned with


Numbers: TypeAlias = Literal["followed", "trusted"]
Factory: TypeAlias = Callable[..., nn.Module]


class Samples(Protocol):
    """What a model can be fed with."""

    def batch(self, rows: IntArray, device: str) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
        """Return the samples (count, ...) of some rows, and their targets."""


@dataclass(frozen=True)
class ModelCode:
    """Where the user's model comes from, and what it is fed; running it is the user's wish."""

    # package.module:name, file.py:name, a .pt2 or TorchScript file; or a class, function or module
    factory: str | Factory | nn.Module
    arguments: Mapping[str, Any] = field(default_factory=dict)
    input_shapes: tuple[tuple[int, ...], ...] = ()  # with the batch; none: from the first layer
    input_dtypes: tuple[str, ...] = ()  # of the first inputs
    state: tuple[tuple[int, int], ...] = ()  # forward's arguments that are outputs of the last call
    numbers: Numbers = "followed"  # from data: what becomes of them is seen, or taken on trust

    def __post_init__(self) -> None:
        check_options(self, _RULES)

    def build(self) -> nn.Module:
        """Return the model as the user's code makes it; of a module, a copy."""
        if isinstance(self.factory, str):
            is_named = ":" in self.factory and self.factory.partition(":")[0] in LIBRARIES
            known = library_model(self.factory, self.arguments) if is_named else None
            return load_factory(self.factory, self.arguments) if known is None else known
        return _built(self.factory, self.arguments)

    @property
    def name(self) -> str:
        """How messages call the model's code."""
        if isinstance(self.factory, str):
            return self.factory
        kind = type(self.factory) if isinstance(self.factory, nn.Module) else self.factory
        return getattr(kind, "__qualname__", type(kind).__qualname__)

    @property
    def trusts_numbers(self) -> bool:
        """Whether the user vouches for numbers that can't be followed."""
        return self.numbers == "trusted"

    @cached_property
    def template(self) -> nn.Module:
        """A model that is built once: to be planned, and to see what further ones share with it."""
        return self.build()

    def forget(self) -> None:
        """Let go of the module that was built, and its memory; who asks for it gets another one."""
        vars(self).pop("template", None)

    def fed_with(self, samples: Samples) -> ModelCode:
        """Return the code with real samples as its input, unless it is said what that is."""
        if self.input_shapes:
            return self
        x, _ = samples.batch(np.zeros(PROBE_BATCH, dtype=np.int64), "cpu")
        return self.fed_like(x if isinstance(x, tuple) else (x,))

    def fed_like(self, inputs: Sequence[Tensor]) -> ModelCode:
        """Return the code with inputs of these shapes, unless it is said what they are."""
        if self.input_shapes:
            return self
        return replace(
            self,
            input_shapes=tuple((PROBE_BATCH, *tensor.shape[1:]) for tensor in inputs),
            input_dtypes=tuple("float32" if x.is_floating_point() else "long" for x in inputs),
        )

    @cached_property
    def _exported_inputs(self) -> tuple[Tensor, ...]:
        """Inputs like those that a .pt2 model was exported with, unless shapes are given."""
        is_told = bool(self.input_shapes) or not isinstance(self.factory, str)
        return () if is_told else exported_inputs(str(self.factory)) or ()

    def inputs(self, model: nn.Module) -> tuple[Any, ...]:
        """Return random inputs for the model, of the given shapes or of one at which it runs.

        States that are not among them start as zeros, shaped like the outputs that they are.
        """
        if not self.input_shapes and isinstance(model, ConfiguredModel):
            return model.example_inputs()
        inputs: list[Any] = list(self._exported_inputs)
        shapes = () if inputs else (self.input_shapes or (None,))
        for number, shape in enumerate(shapes):
            given = self.input_dtypes[number : number + 1]
            dtype = _torch_dtype(given[0]) if given else _usual_dtype(model, self, number)
            inputs += deduce_inputs(model, shape=shape, dtype=dtype)
        missing = sorted(pair for pair in self.state if pair[0] >= len(inputs))
        if missing:
            outputs = _call(model, inputs, len(missing))
            inputs += [map_leaves(torch.zeros_like, outputs[output]) for _, output in missing]
        return tuple(inputs)


def _usual_dtype(model: nn.Module, code: ModelCode, number: int) -> torch.dtype | None:
    """Return the dtype of one of the inputs of a model that says what each of them is."""
    if not isinstance(model, ConfiguredModel):
        return None
    return model.input_dtype(number, len(code.input_shapes))


def _is_code(value: Any) -> bool:
    return isinstance(value, str | nn.Module) or callable(value)


def _is_pair(value: Any) -> bool:
    return each(whole(0))(value) and len(value) == 2


_CODE = "a class, a function, a module or a reference"
_RULES: Mapping[str, Rule] = {
    "factory": (_is_code, _CODE),
    "arguments": (
        lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value),
        "values by name",
    ),
    "input_shapes": (
        each(each(whole(1))),
        "a list of shapes with their batch, e.g. [(1, 3, 32, 32)]",
    ),
    "numbers": (lambda value: value in get_args(Numbers), words_in(Numbers)),
    "state": (each(_is_pair), "pairs (argument, output), both counted from 0"),
}

Model: TypeAlias = ModelCode | str | Factory | nn.Module


def as_model_code(model: Model, argument: str = "model") -> ModelCode:
    """Return the code that a user means: a reference, a class, a function or a module."""
    if isinstance(model, ModelCode):
        return model
    if isinstance(model, str | Path):
        return ModelCode(str(model))
    if isinstance(model, nn.Module) or callable(model):
        return ModelCode(model)
    raise UsageError(
        f"`{argument}` is {type(model).__name__}, expected {_CODE}",
        f'give what builds the model, e.g. {argument}=Net, or {argument}="net.py:Net"',
    )


def _built(factory: Factory | nn.Module, arguments: Mapping[str, Any]) -> nn.Module:
    code = ModelCode(factory)
    if isinstance(factory, nn.Module):
        with user_code("the model cannot be copied", of=factory):
            copied: nn.Module = copied_object(factory, {})
        return copied
    hint = "give what builds the model: a class or function that needs no arguments, or a lambda"
    with user_code(f"{code.name}() fails", hint=hint):
        built = factory(**arguments)
    if not isinstance(built, nn.Module):
        raise ArchitectureError(
            f"{code.name}() returns {type(built).__name__}, expected an nn.Module", hint
        )
    remember(built, code.name)
    return built


def plan_code(code: ModelCode, client: Checkpoint, *, seed: int, tries_growth: bool = True) -> Plan:
    """Return the plan of the user's model at a client's widths, checked by numbers."""
    model = code.template
    names = model_names(client, model)
    resize_module(model, shapes_for(client, names))
    inputs = code.inputs(model)
    plan = plan_checked(
        model,
        inputs,
        seed=seed,
        state=code.state,
        tries_growth=tries_growth,
        trusts_numbers=code.trusts_numbers,
    )
    notes = list(plan.notes)
    if not code.input_shapes:
        shapes = ", ".join("×".join(map(str, tensor.shape)) for tensor in tensors_in(inputs))
        notes.append(f"the model was run on random inputs of shape {shapes}")
    is_told = isinstance(model, ConfiguredModel)  # by the library's loader
    if (
        not is_told
        and not is_prefixed(names, client)
        and any(name != own for own, name in names.items())
    ):
        notes.append("the file's names differ from the model's: paired in order, shapes agree")
    own_names = {model_name: name for name, model_name in names.items()}
    return _with_unread(renamed(replace(plan, notes=tuple(notes)), own_names), client, names)


def _with_unread(plan: Plan, client: Checkpoint, names: Mapping[str, str]) -> Plan:
    """Return the plan with what the model does not read of a file, position by position."""
    unread = {
        name: TensorPlan(tuple(Pinned(size, UNREAD) for size in info.shape))
        for name, info in client.tensors.items()
        if info.is_float and name not in names and name not in client.aliases
    }
    return replace(plan, tensors={**plan.tensors, **unread}) if unread else plan


def plan_program(client: Checkpoint, *, seed: int, tries_growth: bool = True) -> Plan:
    """Return the plan of the graph that a client's file has, checked by numbers.

    Only ATen ops of a table are run, no code of the file's.
    """
    assert client.program is not None
    model = ExportedProgram(client.program, together=True)
    names = model_names(client, model)
    inputs = program_inputs(model)
    plan = plan_checked(model, inputs, seed=seed, state=(), tries_growth=tries_growth)
    notes = (f"the plan comes from the graph in {client.name}'s file", *plan.notes)
    own_names = {model_name: name for name, model_name in names.items()}
    return renamed(replace(plan, architecture="an exported program", notes=notes), own_names)


def plan_checked(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    seed: int,
    state: StatePairs,
    tries_growth: bool = True,
    trusts_numbers: bool = False,
) -> Plan:
    """Return a model's plan after it held on every way through the model.

    Where it is not tried which groups can grow, the plan says so of each.
    """
    rng = np.random.default_rng(seed)
    ways, plan = _planned(model, inputs, state, trusts_numbers)

    def check(given: tuple[Any, ...]) -> None:
        nonlocal plan
        plan = pin_misfits(model, plan, given, rng=rng, state=state)
        if tries_growth:
            plan = probe_growth(model, plan, given, rng=rng, state=state)

    ways.follow(check)
    plan = plan if tries_growth else held_untried(plan)
    return replace(plan, notes=(*plan.notes, *ways.notes))


def _planned(
    model: nn.Module, inputs: tuple[Any, ...], state: StatePairs, trusts_numbers: bool
) -> tuple[Ways, Plan]:
    """Return ways and plan of a run; of a second one where the first only loaded torch's compiler.

    Some functions call the compiler by themselves (flex attention), which fails under our modes
    unless it is told beforehand to stand aside.
    """
    was_loaded = is_compiler_loaded()
    ways = ways_of(model, inputs, state=state, trusts_numbers=trusts_numbers)
    if is_compiler_loaded() and not was_loaded:
        ways = ways_of(model, inputs, state=state, trusts_numbers=trusts_numbers)
    return ways, plan_model(model, inputs, state=state, ways=ways)


def check_plan(
    code: ModelCode, client: Checkpoint, plan: Plan, *, seed: int, tries_growth: bool = True
) -> Plan:
    """Refuse a plan that the user's model contradicts; else return it.

    Where nobody tried yet whether its groups can grow, and that counts, it is tried.
    """
    model = code.template
    names = model_names(client, model)
    resize_module(model, shapes_for(client, names))
    inputs = code.inputs(model)
    rng = np.random.default_rng(seed)
    unread = {name: tensor for name, tensor in plan.tensors.items() if name not in names}
    read = {name: tensor for name, tensor in plan.tensors.items() if name in names}
    own = renamed(replace(plan, tensors=read), names)
    is_tried = tries_growth and any(group.why == WHY_UNTRIED for group in plan.groups)
    own = freed_untried(own) if is_tried else own

    def check(given: tuple[Any, ...]) -> None:
        nonlocal own
        verify_plan(model, own, given, rng=rng, state=code.state)
        if is_tried:
            own = probe_growth(model, own, given, rng=rng, state=code.state)

    ways = ways_of(model, inputs, state=code.state, trusts_numbers=code.trusts_numbers)
    ways.follow(check)
    if not is_tried:
        return plan
    tried = renamed(own, {own: name for name, own in names.items()})
    return replace(tried, tensors={**tried.tensors, **unread})


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"`input_dtype` is {name!r}, expected a torch dtype, e.g. float32 or long")
    return dtype


def _call(model: nn.Module, inputs: Sequence[Any], states: int) -> Any:
    """Return what the model gives without its states, or ask for their shapes."""
    evaluating(model)
    what = "the model does not run without its state"
    hint = "give the shapes of all its inputs, one `input_shape` each"
    with torch.no_grad(), user_code(what, of=model, hint=hint):
        try:
            return model(*inputs)
        except TypeError:
            return model(*inputs, *[None] * states)


def outputs_of(model: nn.Module, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return all tensors among a model's outputs in evaluation mode."""
    return [plain_numbers(tensor) for tensor in tensors_in(evaluated(model, inputs))]


def evaluated(model: nn.Module, inputs: Sequence[Any], *, has_gradient: bool = False) -> Any:
    """Return a model's outputs in evaluation mode."""
    with torch.set_grad_enabled(has_gradient):
        return run_model(evaluating(model), inputs, hint=_HINT)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return the tensors of nested lists, tuples and dictionaries."""
    return [t for t in leaves(value) if isinstance(t, torch.Tensor)]


BUILDER = "fedmerge.architecture.model_code:build"


def build(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    factory: str,
    arguments: Mapping[str, Any],
    aliases: Mapping[str, str],
) -> nn.Module:
    """Return the model that the user's code builds, resized to these shapes.

    `aliases` are further names of tied tensors, which have no shape of their own.
    """
    model = ModelCode(factory, arguments).build()
    resize_module(model, {**shapes, **{alias: shapes[name] for alias, name in aliases.items()}})
    return model
