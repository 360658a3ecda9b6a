"""The graph of an exported program, run as a module by operations of a table."""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code.program_arguments import decode, name_of, names_of, sizes_of
from fedmerge.architecture.from_code.program_budget import Budget
from fedmerge.architecture.from_code.rules import RULES, is_pointwise
from fedmerge.errors import ArchitectureError
from fedmerge.private_torch import Op, direct_parts, storage_address
from fedmerge.values.clients import Program

Operator: TypeAlias = Callable[..., Any]

# Composite ops: torch takes them apart into ops that have rules.
_COMPOSITE = frozenset({
    "_weight_norm",
    "adaptive_avg_pool1d", "adaptive_max_pool1d", "adjoint", "alpha_dropout", "argsort",
    "avg_pool1d", "bilinear", "broadcast_tensors", "broadcast_to", "cdist", "celu", "concat",
    "concatenate", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "cosine_similarity", "diff", "dropout", "dstack", "einsum",
    "embedding_bag", "expand_as", "feature_alpha_dropout", "feature_dropout", "flatten",
    "fliplr", "flipud", "group_norm", "hstack", "index_fill", "inner", "instance_norm",
    "layer_norm", "linalg_norm", "linalg_vector_norm", "log_softmax", "mT", "masked_scatter",
    "masked_select", "max_pool1d", "max_pool2d", "max_pool3d", "meshgrid", "moveaxis", "movedim",
    "multiply", "narrow", "one_hot", "pad", "pairwise_distance", "ravel", "reshape_as",
    "repeat_interleave", "rms_norm", "rsub", "select_scatter", "selu", "slice_scatter",
    "softmax", "softmin",
    "squeeze", "sum_to_size", "swapaxes", "swapdims", "take_along_dim", "tensor_split",
    "tensordot", "tile", "type_as", "unflatten", "unfold", "upsample_nearest_exact1d", "vstack",
})  # fmt: skip
_SIZES = frozenset({"sym_size", "sym_stride", "sym_numel", "sym_storage_offset"})
_CHECKS = re.compile(r"torch\.ops\.aten\.(_assert_\w+|sym_constrain_range\w*)(\.\w+)?")
_LARGEST = 1 << 63  # of whole numbers: products of products would grow without end


def _of_numbers(function: Operator) -> Operator:
    """Return arithmetic that takes numbers only, not text or lists that it would repeat."""

    def call(*numbers: Any) -> Any:
        result = function(*map(_number, numbers))
        return _number(result)

    return call


def _number(value: Any) -> Any:
    if type(value) not in (int, float, bool) or not -_LARGEST <= value < _LARGEST:
        raise ValueError("arithmetic on something else than numbers of ordinary size")
    return value


def _item(values: Any, place: Any) -> Any:
    """Return one of several results."""
    if not isinstance(values, list | tuple) or type(place) is not int:
        raise ValueError("an item of something that is no list")
    return values[place]


_NUMBERS: Mapping[str, Operator] = {
    **{
        f"_operator.{name}": _of_numbers(getattr(operator, name))
        for name in (
            *("add", "sub", "mul", "floordiv", "mod", "neg", "truediv"),
            *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_"),
        )
    },
    "_operator.getitem": _item,
    **{
        f"torch.{name}": _of_numbers(getattr(torch, name))
        for name in ("sym_int", "sym_float", "sym_not", "sym_max", "sym_min", "sym_ite")
    },
}
# Series that are summed up until they are exact, or as many terms as the file asks for.
_SLOW = re.compile(
    r"special_(?!expit|softmax|log_softmax|erf|logit)\w+|igammac?_?|m?v?lgamma_?|polygamma_?"
)
_ATEN = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")


def _run_part(_: object, part: Operator, *args: Any) -> Any:
    """Run a graph that was exported under no_grad or autocast off, which change no units."""
    return part(*args)


_HIGHER_ORDER: Mapping[str, Operator] = {
    **{
        f"torch.ops.higher_order.{name}": getattr(torch.ops.higher_order, name)
        for name in ("cond", "while_loop", "scan", "map_impl")
        if hasattr(torch.ops.higher_order, name)
    },
    "torch.ops.higher_order.wrap_with_set_grad_enabled": _run_part,
}


def operator_of(target: str) -> Operator:
    """Return the function that a name in a graph stands for; raise ValueError if none may run."""
    if _CHECKS.fullmatch(target):
        return lambda *args, **kwargs: None
    for table in (_NUMBERS, _HIGHER_ORDER):
        if target in table:
            return table[target]
    found = _ATEN.fullmatch(target)
    op = _aten(*found.groups()) if found else None
    if op is None:
        raise ValueError(f"it calls '{target}', which fedmerge does not know")
    return op


def known_names() -> frozenset[str]:
    """Return the names of the ATen ops that a graph may call, but for those without exception."""
    return frozenset(RULES) | _COMPOSITE | _SIZES


def _aten(name: str, overload: str) -> Operator | None:
    packet = getattr(torch.ops.aten, name, None)
    op = getattr(packet, overload, None)
    if not isinstance(op, Op):
        return None
    if _SLOW.fullmatch(name):
        return None
    known = name in RULES or name.rstrip("_") in RULES or name in _COMPOSITE or name in _SIZES
    return op if known or is_pointwise(op) else None


_SEED = 0
_MOST_INPUTS = 1 << 23  # numbers of all inputs
_KEYWORD = 2  # the kind of an argument that is given by name
_MALFORMED = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError),
    ArithmeticError,
)


@dataclass(frozen=True, eq=False)
class _Code:
    """A program's graph, ready to run; copies of the module share it."""

    graph: Mapping[str, Any]
    sources: Mapping[str, tuple[str, str]]  # graph input → kind and name of its tensor
    results: Sequence[str]
    operators: Mapping[str, Operator]
    examples: Sequence[Any]
    dtype: torch.dtype  # of the weights as they were exported
    budget: Budget  # of all runs
    together: bool  # whether their time counts as that of one
    last_uses: dict[int, Mapping[int, list[str]]] = field(default_factory=dict)  # by graph

    def __deepcopy__(self, memo: object) -> _Code:
        """Return itself, as nothing changes it."""
        return self

    @property
    def user_inputs(self) -> list[str]:
        """The names of the inputs that the caller gives."""
        names = map(name_of, self.graph["inputs"])
        return [name for name in names if name is not None and name not in self.sources]


class ExportedProgram(nn.Module):
    """Parameters and buffers under the program's names; its forward pass takes flat inputs.

    With `together`, the time of all runs, also of copies, counts as that of one.
    """

    def __init__(self, program: Program, *, together: bool = False) -> None:
        super().__init__()
        try:
            self._program_code = _read_code(program, together)
            _hold_tensors(self, program, self._program_code)
        except _MALFORMED as error:
            raise _malformed(error) from error

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        """Run the graph on flat inputs and return its flat outputs."""
        code = self._program_code
        values: dict[str, Any] = {
            name: _tensor(self, target) for name, (_, target) in code.sources.items()
        }
        values.update(zip(code.user_inputs, inputs, strict=True))
        # What the program makes in its weights' precision follows them where they are cast.
        dtypes = {code.dtype: _precision(self.parameters(), code.dtype)}
        budget = code.budget.again(started=None if code.together else time.thread_time())
        try:
            _Run(code, dtypes, budget).follow(code.graph, values, keep=code.results)
            return tuple(values[name] for name in code.results)
        except _MALFORMED as error:
            raise _malformed(error) from error


def program_inputs(module: ExportedProgram) -> tuple[Tensor, ...]:
    """Return inputs of the exported shapes: random, but whole numbers as at the export."""
    code = module._program_code
    names = code.user_inputs
    known = [example for example in code.examples if isinstance(example, Tensor)]
    given: Sequence[Tensor | None] = known if len(known) == len(names) else [None] * len(names)
    try:
        described = [code.graph["tensor_values"][name] for name in names]
        shapes = [sizes_of(meta["sizes"]) for meta in described]
        dtypes = [decode({"as_scalar_type": meta["dtype"]}, {}, {}) for meta in described]
    except _MALFORMED as error:
        raise _malformed(error) from error
    if sum(math.prod(shape) for shape in shapes) > _MOST_INPUTS:
        raise _malformed(ValueError(f"inputs of more than {_MOST_INPUTS:,} numbers"))
    generator = torch.Generator().manual_seed(_SEED)
    return tuple(
        _draw(shape, dtype, example, generator)
        for shape, dtype, example in zip(shapes, dtypes, given, strict=True)
    )


def _draw(
    shape: tuple[int, ...], dtype: torch.dtype, example: Tensor | None, generator: torch.Generator
) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.zeros(shape, dtype=dtype) if example is None else example.clone()


def _read_code(program: Program, together: bool) -> _Code:
    graph, signature = program.graph_module["graph"], program.graph_module["signature"]
    weights = sum(tensor.info.size for tensor in program.weights.values())
    return _Code(
        graph=graph,
        sources=_sources(signature["input_specs"]),
        results=_results(signature["output_specs"]),
        operators={t: operator_of(t) for t in {node["target"] for node in _nodes(graph)}},
        examples=program.examples,
        dtype=_exported_precision(program),
        budget=Budget.beside(weights, len(graph["nodes"])),
        together=together,
    )


def _sources(specs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return kind and tensor of every graph input that is no input of the user's."""
    found: dict[str, tuple[str, str]] = {}
    for spec in specs:
        ((kind, described),) = spec.items()
        if kind in ("parameter", "buffer", "tensor_constant"):
            found[described["arg"]["name"]] = (kind, described[f"{kind}_name"])
        elif kind not in ("user_input", "constant_input"):
            raise ValueError(f"a {kind.replace('_', ' ')} among its inputs")
    return found


def _results(specs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the outputs that the user sees."""
    outputs = [spec["user_output"]["arg"] for spec in specs if "user_output" in spec]
    return [name for output in outputs for name in names_of(output) if name is not None]


def _nodes(graph: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the nodes of a graph and of the graphs inside its higher-order ops."""
    for node in graph["nodes"]:
        yield node
        for argument in node["inputs"]:
            if "as_graph" in argument["arg"]:
                yield from _nodes(argument["arg"]["as_graph"]["graph"])


def _hold_tensors(module: nn.Module, program: Program, code: _Code) -> None:
    """Register every tensor of the signature; parameters that share memory stay one."""
    shared: dict[Hashable, nn.Parameter] = {}
    for kind, target in code.sources.values():
        stored = program.weights.get(target) or program.constants.get(target)
        if stored is None or stored.problem:
            raise ValueError(f"'{target}' has no tensor that can be used")
        owner, leaf = _owner(module, target)
        if kind == "parameter":
            key = target if stored.memory is None else stored.memory
            if key not in shared:
                shared[key] = nn.Parameter(stored.load(), requires_grad=False)
            owner.register_parameter(leaf, shared[key])
        else:
            owner.register_buffer(leaf, stored.load(), persistent=target in program.weights)


def _owner(module: nn.Module, target: str) -> tuple[nn.Module, str]:
    """Return the part of a module that a dotted name belongs to, made where it is new."""
    *path, leaf = target.split(".")
    for name in path:
        if name not in direct_parts(module):
            module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    return module, leaf


def _tensor(module: nn.Module, target: str) -> Tensor:
    path, _, leaf = target.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(path), leaf)
    return tensor


def _exported_precision(program: Program) -> torch.dtype:
    """Return the dtype of the program's first float tensor."""
    floats = (tensor.info.dtype for tensor in program.weights.values() if tensor.info.is_float)
    dtype: torch.dtype = getattr(torch, next(floats, "float32"))
    return dtype


def _precision(tensors: Iterable[Tensor], default: torch.dtype) -> torch.dtype:
    """Return the dtype of the first float tensor."""
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), default)


@dataclass(frozen=True)
class _Run:
    """One run of a program's graph, and of the graphs inside its higher-order ops."""

    code: _Code
    dtypes: Mapping[torch.dtype, torch.dtype]
    budget: Budget

    def follow(
        self, graph: Mapping[str, Any], values: dict[str, Any], *, keep: Iterable[str]
    ) -> None:
        """Add what every node of a graph gives to the values by name, as long as it is needed."""
        if id(graph) not in self.code.last_uses:
            self.code.last_uses[id(graph)] = _last_uses(graph["nodes"], keep)
        last_uses = self.code.last_uses[id(graph)]
        sizes: dict[str, int] = {}  # bytes, of what the nodes gave
        for number, node in enumerate(graph["nodes"]):
            arguments = [(i, self._decoded(i["arg"], values)) for i in node["inputs"]]
            keywords = {i["name"]: value for i, value in arguments if i.get("kind") == _KEYWORD}
            plain = [value for i, value in arguments if i.get("kind") != _KEYWORD]
            operator = self.code.operators[node["target"]]
            self.budget.foresee(operator, plain, keywords)
            given = {_storage(value) for _, value in arguments}
            made = _results_of(node, operator(*plain, **keywords))
            for name, value in made.items():
                self.budget.release(sizes.pop(name, 0))
                values[name] = value
                if isinstance(value, Tensor) and _storage(value) not in given:
                    sizes[name] = value.numel() * value.itemsize
                    self.budget.hold(sizes[name])
            for name in last_uses.get(number, ()):
                values.pop(name, None)
                self.budget.release(sizes.pop(name, 0))
        self.budget.release(sum(sizes.values()))

    def _decoded(self, argument: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
        return decode(argument, values, self.dtypes, self._part)

    def _part(self, inner: Mapping[str, Any]) -> Callable[..., Any]:
        """Return a graph inside a node as a function."""

        def call(*args: Any) -> Any:
            named = zip(map(name_of, inner["inputs"]), args, strict=True)
            own = {name: value for name, value in named if name is not None}
            results = [name for output in inner["outputs"] for name in names_of(output) if name]
            self.follow(inner, own, keep=results)
            made = [decode(output, own, self.dtypes) for output in inner["outputs"]]
            return made[0] if inner["is_single_tensor_return"] else tuple(made)

        return call


def _last_uses(nodes: Sequence[Mapping[str, Any]], keep: Iterable[str]) -> dict[int, list[str]]:
    """Return after which node which values are not needed any more."""
    last: dict[str, int] = {}
    for number, node in enumerate(nodes):
        for output in node["outputs"]:
            last |= {name: number for name in names_of(output) if name is not None}
        last |= {name: number for i in node["inputs"] for name in _names_in(i["arg"])}
    ends: dict[int, list[str]] = {}
    for name in set(last).difference(keep):
        ends.setdefault(last[name], []).append(name)
    return ends


def _names_in(argument: object) -> Iterator[str]:
    """Yield all names of values that stand anywhere in an argument."""
    if isinstance(argument, Mapping):
        for key, value in argument.items():
            if key in ("name", "as_name") and isinstance(value, str):
                yield value
            else:
                yield from _names_in(value)
    elif isinstance(argument, list):
        for item in argument:
            yield from _names_in(item)


def _storage(value: Any) -> int | None:
    """Return what tells a tensor's memory from other memory."""
    is_plain = isinstance(value, Tensor) and value.layout == torch.strided
    return storage_address(value) if is_plain else None


def _results_of(node: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """Return the results of a node by name: one, several, or a list of tensors."""
    names = [names_of(output) for output in node["outputs"]]
    is_listed = len(names) > 1 or node.get("is_hop_single_tensor_return") is False
    values: dict[str, Any] = {}
    for found, value in zip(names, result if is_listed else [result], strict=False):
        items = value if isinstance(value, list | tuple) else [value]
        named = zip(found, items, strict=True)
        values.update((name, item) for name, item in named if name is not None)
    return values


def _malformed(error: Exception) -> ArchitectureError:
    return ArchitectureError(
        f"the program's graph is not understood: {error}",
        "where you trust the file, let torch load it with `model=FILE.pt2`; or describe the "
        "axes in a plan of your own (`plan`)",
    )
