"""The libraries that build models by a name or from a folder: a table, one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from fedmerge.architecture.from_library.transformers_models import (
    LIBRARY as TRANSFORMERS,
)
from fedmerge.architecture.from_library.transformers_models import (
    build_from_folder,
)
from fedmerge.checkpoint.model_folders import ModelFolder, model_folder
from fedmerge.errors import ArchitectureError
from fedmerge.user_code import remember, user_code


@dataclass(frozen=True)
class FolderCode:
    """The code that a folder's config.json stands for, as a reference with its arguments."""

    reference: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    input_shape: tuple[int, ...] | None = None  # of one sample, where the folder says it

    @property
    def is_installed(self) -> bool:
        """Whether the library is there; it is not imported for that."""
        return find_spec(self.reference.partition(":")[0]) is not None


def code_of_folder(folder: ModelFolder) -> FolderCode | None:
    """Return which library's model a folder holds; None where no library we know saved it."""
    if isinstance(folder.config.get("model_type"), str):
        return FolderCode(f"{TRANSFORMERS}:{folder.path}")
    name, cfg = folder.config.get("architecture"), folder.config.get("pretrained_cfg")
    if not isinstance(name, str) or not isinstance(cfg, Mapping):
        return None
    given = folder.config.get("model_args")
    arguments = dict(given) if isinstance(given, Mapping) else {}
    if isinstance(classes := folder.config.get("num_classes"), int):
        arguments["num_classes"] = classes
    return FolderCode(f"timm:{name}", arguments, _whole_numbers(cfg.get("input_size")))


def _whole_numbers(value: Any) -> tuple[int, ...] | None:
    is_shape = isinstance(value, list) and value and all(type(size) is int for size in value)
    return tuple(value) if is_shape else None


def library_model(reference: str, arguments: Mapping[str, Any]) -> nn.Module | None:
    """Return the model of a reference such as timm:resnet18; None if its library knows none.

    Weights are never fetched.
    """
    library, _, name = reference.partition(":")
    model = LIBRARIES[library](name, arguments)
    if model is not None:
        remember(model, reference)
    return model


def _of_transformers(place: str, arguments: Mapping[str, Any]) -> nn.Module | None:
    """Return the model of a folder; what is no folder may be a function of the library's."""
    path = Path(place).expanduser()
    if place.isidentifier() and not path.exists():
        return None
    folder = model_folder(path)
    if folder is None:
        raise ArchitectureError(
            f"'{TRANSFORMERS}:{place}': no folder with a config.json",
            "give a folder that the library saved; nothing is fetched",
        )
    if arguments:
        raise ArchitectureError(
            f"'{TRANSFORMERS}:{place}' takes no arguments", "change its config.json instead"
        )
    return build_from_folder(folder)


def _of_timm(name: str, arguments: Mapping[str, Any]) -> nn.Module | None:
    """Return what `timm.create_model` builds of a name that timm knows."""
    timm = _imported("timm")
    if not timm.is_model(name):
        return None
    return _made("timm", name, lambda: timm.create_model(name, pretrained=False, **arguments))


def _of_torchvision(name: str, arguments: Mapping[str, Any]) -> nn.Module | None:
    """Return what `torchvision.models.get_model` builds of a name that torchvision knows."""
    models = _imported("torchvision.models")
    if name not in models.list_models():
        return None
    return _made("torchvision", name, lambda: models.get_model(name, weights=None, **arguments))


def _imported(library: str) -> Any:
    package = library.partition(".")[0]
    with user_code(f"{package} can't be imported", hint=f"pip install {package}"):
        return import_module(library)


def _made(library: str, name: str, build: Callable[[], nn.Module]) -> nn.Module:
    with user_code(f"{library} can't build '{name}'", hint="pass what it needs with `model_arg`"):
        return build()


LIBRARIES: Mapping[str, Callable[[str, Mapping[str, Any]], nn.Module | None]] = {
    TRANSFORMERS: _of_transformers,
    "timm": _of_timm,
    "torchvision": _of_torchvision,
}
