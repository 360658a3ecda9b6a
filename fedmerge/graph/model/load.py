"""Load a model from the user's own code: `package.module:name` or `file.py:name`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from fedmerge.errors import ArchitectureError, FedmergeError
from fedmerge.references import loaded

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
    with loaded(place, error=ArchitectureError, hint=_HINT) as code:
        return _build(code, name, reference, arguments)


def _build(
    code: ModuleType, name: str, reference: str, arguments: Mapping[str, object]
) -> nn.Module:
    target: object = code
    for part in name.split("."):
        target = getattr(target, part, None)
    if isinstance(target, nn.Module):
        return target
    if not callable(target):
        names = [n for n, v in vars(code).items() if callable(v) and not n.startswith("_")]
        found = f"; it defines {', '.join(names[:8])}" if names else ""
        raise ArchitectureError(f"'{reference}': there is no callable '{name}'{found}", _HINT)
    try:
        built = target(**arguments)
    except FedmergeError:
        raise
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise ArchitectureError(
            f"'{reference}': {name}({given}) fails: {type(error).__name__}: {error}",
            "pass what it needs with --model-arg key=value",
        ) from error
    if not isinstance(built, nn.Module):
        kind = type(built).__name__
        raise ArchitectureError(f"'{reference}': {name}() returns {kind}, no nn.Module", _HINT)
    return built


def _load_archive(path: Path) -> nn.Module:
    """Return the model of an exported program or a TorchScript file."""
    if not path.is_file():
        raise ArchitectureError(f"'{path}': there is no such file", _HINT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own about the format
            if path.suffix == ".pt2":
                return torch.export.load(path).module()
            scripted: nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
            return scripted
    except (Exception, SystemExit) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ArchitectureError(
            f"'{path}' is neither an exported program (.pt2) nor TorchScript: {reason}", _HINT
        ) from error
