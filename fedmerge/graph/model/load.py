"""Load a model from the user's own code: `package.module:name` or `file.py:name`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from fedmerge.errors import ArchitectureError, ModelCodeError
from fedmerge.references import attribute_of, loaded
from fedmerge.user_code import remember, user_code

_HINT = (
    "--model is package.module:name or file.py:name, where name() returns an nn.Module, "
    "or a .pt2 or TorchScript file"
)
_ARCHIVES = (".pt2", ".ts", ".pt", ".pth", ".jit", ".torchscript")


def load_factory(reference: str, arguments: Mapping[str, object]) -> nn.Module:
    """Return the module that a class, function or lambda of the user's code builds.

    Runs that code. The file's folder is importable while it loads and builds. A `.pt2` exported
    program or a TorchScript file is a model by itself.
    """
    if (archive := Path(reference).expanduser()).suffix in _ARCHIVES and ":" not in archive.name:
        return _load_archive(archive)
    place, separator, name = reference.rpartition(":")
    if not separator or not place or not name:
        raise ArchitectureError(f"'{reference}' names no model", _HINT)
    with loaded(place, error=ModelCodeError, hint=_HINT) as code:
        built = _build(code, name, reference, arguments)
    remember(built, reference)
    return built


def _build(
    code: ModuleType, name: str, reference: str, arguments: Mapping[str, object]
) -> nn.Module:
    target = attribute_of(code, name, error=ModelCodeError)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        names = [n for n, v in vars(code).items() if callable(v) and not n.startswith("_")]
        found = f"; it defines {', '.join(names[:8])}" if names else ""
        raise ArchitectureError(f"'{reference}': there is no callable '{name}'{found}", _HINT)
    given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    hint = "pass what it needs with --model-arg key=value"
    with user_code(f"'{reference}': {name}({given}) fails", hint=hint):
        built = target(**arguments)
    if not isinstance(built, nn.Module):
        kind = type(built).__name__
        raise ArchitectureError(f"'{reference}': {name}() returns {kind}, no nn.Module", _HINT)
    return built


def _load_archive(path: Path) -> nn.Module:
    """Return the model of an exported program or a TorchScript file."""
    if not path.is_file():
        raise ArchitectureError(f"'{path}': there is no such file", _HINT)
    what = f"'{path}' is neither an exported program (.pt2) nor TorchScript"
    with user_code(what, hint=_HINT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own about the format
        if path.suffix == ".pt2":
            return torch.export.load(path).module()
        scripted: nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        return scripted
