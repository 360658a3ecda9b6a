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
from fedmerge.graph.model.operators import Operator, operator_of
from fedmerge.types.programs import Program

_MOST_INPUTS = 1 << 28  # numbers in all inputs together
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
        _run(code, code.graph, values, {code.dtype: _precision(self.parameters(), code.dtype)})
        return tuple(values[name] for name in code.results)


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
    if sum(torch.Size(shape).numel() for shape in shapes) > _MOST_INPUTS:
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


def _run(
    code: _Code,
    graph: Mapping[str, Any],
    values: dict[str, Any],
    dtypes: Mapping[torch.dtype, torch.dtype],
) -> None:
    """Add what every node of a graph gives to the values by name."""

    def part(inner: Mapping[str, Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            named = zip(map(name_of, inner["inputs"]), args, strict=True)
            own = {name: value for name, value in named if name is not None}
            _run(code, inner, own, dtypes)
            results = [decode(output, own, dtypes) for output in inner["outputs"]]
            return results[0] if inner["is_single_tensor_return"] else tuple(results)

        return call

    for node in graph["nodes"]:
        arguments = [(i, decode(i["arg"], values, dtypes, part)) for i in node["inputs"]]
        keywords = {i["name"]: value for i, value in arguments if i.get("kind") == _KEYWORD}
        plain = [value for i, value in arguments if i.get("kind") != _KEYWORD]
        _store(node, code.operators[node["target"]](*plain, **keywords), values)


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
