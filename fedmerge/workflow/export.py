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

from fedmerge.checkpoint import check_targets, write_bytes
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.graph.model import evaluating
from fedmerge.workflow.load import load_model
from fedmerge.workflow.models import ModelCode, outputs_of, tensors_in
from fedmerge.workflow.outputs import relative_difference

TOLERANCE = 1e-4  # of float32 outputs, relative to the largest

Inputs: TypeAlias = tuple[Any, ...]
Run: TypeAlias = Callable[[Inputs], list[torch.Tensor]]


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its outputs are from the model's."""

    output: Path
    format: str
    difference: float


def export(
    path: str | Path, code: ModelCode, output: str | Path, *, format: str, force: bool = False
) -> Exported:
    """Write the merged model as an exported program or ONNX file that agrees with it."""
    output = Path(output)
    if format not in _WRITERS:
        raise UsageError(f"--format is {format!r}, expected {' or '.join(_WRITERS)}")
    check_targets([output], inputs=[path], force=force)
    model = evaluating(load_model(code.build, path))
    inputs = code.inputs(model)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / f"model.{format}"
        run = _WRITERS[format](model, inputs, draft)
        difference = relative_difference(outputs_of(model, inputs), run(inputs))
        if not difference <= TOLERANCE:
            raise ArchitectureError(
                f"the exported model's outputs differ from the merged model's by {difference:.2g}"
            )
        write_bytes(output, draft.read_bytes())
    return Exported(output, format, difference)


def _write_pt2(model: nn.Module, inputs: Inputs, path: Path) -> Run:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own about the model's attributes
            torch.export.save(torch.export.export(model, inputs), path)
    except Exception as error:
        raise _failed(error) from error
    program = torch.export.load(path).module()
    return lambda values: [tensor.detach() for tensor in tensors_in(program(*values))]


def _write_onnx(model: nn.Module, inputs: Inputs, path: Path) -> Run:
    missing = [n for n in ("onnx", "onnxscript", "onnxruntime") if not importlib.util.find_spec(n)]
    if missing:
        raise UsageError(
            f"--format onnx needs {', '.join(missing)}", "pip install 'fedmerge[onnx]'"
        )
    import onnxruntime

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model, inputs, str(path), dynamo=True, external_data=False, verbose=False
            )
    except Exception as error:
        raise _failed(error) from error
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(values: Inputs) -> list[torch.Tensor]:
        feed = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, feed)]

    return run


_WRITERS: Mapping[str, Callable[[nn.Module, Inputs, Path], Run]] = {
    "pt2": _write_pt2,
    "onnx": _write_onnx,
}


def _failed(error: Exception) -> ArchitectureError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ArchitectureError(f"torch can't export the model: {reason}")
