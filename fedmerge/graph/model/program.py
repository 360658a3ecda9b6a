"""An exported program's graph as a module: its listed ATen ops, one after another.

The graph is data from a client's file, so only ops that stand in a table are ever called:
`torch.ops.aten` also has some that write files. `torch.export.load` is no way to get there, for it
unpickles with all of Python and evaluates the file's expressions as code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedmerge.errors import ArchitectureError
from fedmerge.graph.model.arguments import decode, name_of, names_of, sizes_of
from fedmerge.graph.model.budget import MOST_NUMBERS, Budget
from fedmerge.graph.model.operators import Operator, operator_of
from fedmerge.types.programs import Program

_SEED = 0
_KEYWORD = 2  # the kind of an argument that is given by name
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)


@dataclass(frozen=True, eq=False)
class _Code:
    """A program's graph, ready to run; copies of the module share it."""

    graph: Mapping[str, Any]
    sources: Mapping[str, tuple[str, str]]  # graph input → kind and name of its tensor
    results: Sequence[str]
    operators: Mapping[str, Operator]
    examples: Sequence[Any]
    dtype: torch.dtype  # of the weights as they were exported

    def __deepcopy__(self, memo: object) -> _Code:
        """Return itself, as nothing changes it."""
        return self

    @property
    def user_inputs(self) -> list[str]:
        """The names of the inputs that the caller gives."""
        names = map(name_of, self.graph["inputs"])
        return [name for name in names if name is not None and name not in self.sources]


class ExportedProgram(nn.Module):
    """Parameters and buffers under the program's names; its forward pass takes flat inputs."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        try:
            self._program_code = _read_code(program)
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
        budget = Budget.beside(sum(tensor.numel() for tensor in self.parameters()))
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
    if sum(torch.Size(shape).numel() for shape in shapes) > MOST_NUMBERS:
        raise _malformed(ValueError(f"inputs of more than {MOST_NUMBERS:,} numbers"))
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


def _read_code(program: Program) -> _Code:
    graph, signature = program.graph_module["graph"], program.graph_module["signature"]
    return _Code(
        graph=graph,
        sources=_sources(signature["input_specs"]),
        results=_results(signature["output_specs"]),
        operators={t: operator_of(t) for t in {node["target"] for node in _nodes(graph)}},
        examples=program.examples,
        dtype=_exported_precision(program),
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
        if name not in module._modules:
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
        last_uses = _last_uses(graph["nodes"], keep)
        for number, node in enumerate(graph["nodes"]):
            arguments = [(i, self._decoded(i["arg"], values)) for i in node["inputs"]]
            keywords = {i["name"]: value for i, value in arguments if i.get("kind") == _KEYWORD}
            plain = [value for i, value in arguments if i.get("kind") != _KEYWORD]
            operator = self.code.operators[node["target"]]
            self.budget.foresee(operator, plain, keywords)
            _store(node, operator(*plain, **keywords), values)
            for name in last_uses.get(number, ()):
                values.pop(name, None)
            self.budget.check_room(_held(values))

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


def _held(values: Mapping[str, Any]) -> int:
    """Return how many numbers the values have in memory, shared ones once."""
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() // tensor.itemsize
        for value in values.values()
        for tensor in (value if isinstance(value, list | tuple) else [value])
        if isinstance(tensor, Tensor)
    }
    return sum(storages.values())


def _store(node: Mapping[str, Any], result: Any, values: dict[str, Any]) -> None:
    """Keep the results of a node by name: one, several, or a list of tensors."""
    names = [names_of(output) for output in node["outputs"]]
    is_listed = len(names) > 1 or node.get("is_hop_single_tensor_return") is False
    for found, value in zip(names, result if is_listed else [result], strict=False):
        items = value if isinstance(value, list | tuple) else [value]
        named = zip(found, items, strict=True)
        values.update((name, item) for name, item in named if name is not None)


def _malformed(error: Exception) -> ArchitectureError:
    return ArchitectureError(
        f"the program's graph is not understood: {error}",
        "where you trust the file, let torch load it with --model FILE.pt2; or describe the "
        "axes in a plan of your own (--plan)",
    )
