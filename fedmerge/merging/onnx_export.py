"""`export`: a merged model as a file that runs without fedmerge."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from fedmerge.architecture.from_code import evaluating
from fedmerge.architecture.model_code import ModelCode, outputs_of, tensors_in
from fedmerge.checkpoint import check_targets, write_bytes
from fedmerge.errors import ArchitectureError, UsageError, UserCodeError
from fedmerge.merging.loading import load_model
from fedmerge.merging.output_differences import relative_difference
from fedmerge.private_torch import map_leaves
from fedmerge.user_code import own_code, user_code

_FAILED = "torch can't export the model"
TOLERANCE = 1e-4  # of float32 outputs, relative to the largest

Inputs: TypeAlias = tuple[Any, ...]
Shapes: TypeAlias = Any  # which axes of which input are free, as torch.export takes it
Run: TypeAlias = Callable[[Inputs], list[torch.Tensor]]
Writer: TypeAlias = Callable[[nn.Module, Inputs, Shapes, Path], Run]


@dataclass(frozen=True)
class Exported:
    """What was written, how far its outputs are from the model's, and what it takes."""

    output: Path
    format: str
    difference: float
    any_batch: bool  # or only inputs as long along axis 0 as those of the export


def export(
    path: str | Path, code: ModelCode, output: str | Path, *, format: str, force: bool = False
) -> Exported:
    """Write the merged model as an exported program or ONNX file that agrees with it."""
    output = Path(output)
    if format not in _WRITERS:
        raise UsageError(f"`format` is {format!r}, expected {' or '.join(_WRITERS)}")
    check_targets([output], inputs=[path], force=force)
    model = evaluating(load_model(code.build, path))
    inputs = code.inputs(model)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / f"model.{format}"
        run, any_batch = exported(model, inputs, draft, format=format)
        with user_code("the exported model does not run"):
            found = run(inputs)
        difference = relative_difference(outputs_of(model, inputs), found)
        if not difference <= TOLERANCE:
            raise ArchitectureError(
                f"the exported model's outputs differ from the merged model's by {difference:.2g}"
            )
        write_bytes(output, draft.read_bytes(), force=force)
    return Exported(output, format, difference, any_batch)


def exported(
    model: nn.Module, inputs: Inputs, path: Path, *, format: str, takes_list: bool = False
) -> tuple[Run, bool]:
    """Export for batches of any size if the model allows it, else for that of the inputs.

    Return how the file is run, and whether on any batch. `takes_list`: its forward is `*inputs`.
    """
    write = _WRITERS[format]
    pair, three = _stacked(inputs, 2), _stacked(inputs, 3)
    free = map_leaves(_free_batch, pair)
    free = (free,) if takes_list else free
    try:
        expected = outputs_of(model, three)
        with user_code(_FAILED):
            run = write(model, pair, free, path)
            found = run(three)
        if relative_difference(expected, found) <= TOLERANCE:
            return run, True
    except (UserCodeError, ArchitectureError):
        pass  # not for batches of any size, then
    with user_code(_FAILED):
        return write(model, inputs, None, path), False


def _stacked(inputs: Inputs, count: int) -> Inputs:
    """Return inputs with so many samples along axis 0, the first one repeated."""

    def repeat(value: Any) -> Any:
        is_batch = isinstance(value, torch.Tensor) and value.ndim
        return torch.cat([value[:1]] * count) if is_batch else value

    repeated: Inputs = map_leaves(repeat, inputs)
    return repeated


def _free_batch(value: Any) -> Shapes:
    """Return which axis of an input may have another size at every call."""
    is_batch = isinstance(value, torch.Tensor) and value.ndim
    return {0: torch.export.Dim.AUTO} if is_batch else None


def _write_pt2(model: nn.Module, inputs: Inputs, shapes: Shapes, path: Path) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the model's attributes
        made = torch.export.export(model, inputs, dynamic_shapes=shapes)
        _forget_places(made.graph_module)
        torch.export.save(made, path)
    program = torch.export.load(path).module()

    def run(values: Inputs) -> list[torch.Tensor]:
        outputs = program(*values)
        with own_code():
            return [tensor.detach() for tensor in tensors_in(outputs)]

    return run


def _forget_places(graph_module: torch.fx.GraphModule) -> None:
    """Drop where in which file every op was called: a file that is handed on tells no paths."""
    for part in graph_module.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                node.meta.pop("stack_trace", None)


def _write_onnx(model: nn.Module, inputs: Inputs, shapes: Shapes, path: Path) -> Run:
    missing = [n for n in ("onnx", "onnxscript", "onnxruntime") if not importlib.util.find_spec(n)]
    if missing:
        raise UsageError(
            f"`format=onnx` needs {', '.join(missing)}", "pip install 'fedmerge[onnx]'"
        )
    import onnxruntime

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            str(path),
            dynamo=True,
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(values: Inputs) -> list[torch.Tensor]:
        with own_code():
            feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        outputs = session.run(None, feed)
        with own_code():
            return [torch.from_numpy(array) for array in outputs]

    return run


_WRITERS: Mapping[str, Writer] = {
    "pt2": _write_pt2,
    "onnx": _write_onnx,
}
