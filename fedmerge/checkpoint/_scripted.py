"""Read the weights of TorchScript archives: inert objects in place of modules, no code is run."""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._weights_only_unpickler import Unpickler

from fedmerge.checkpoint._allowed import Admitted, import_globals
from fedmerge.checkpoint._archive import Archive, open_archive
from fedmerge.checkpoint._contents import Contents, ReadOptions
from fedmerge.checkpoint._failures import damaged
from fedmerge.checkpoint._globals import is_plumbing, scan_pickles
from fedmerge.checkpoint._refusals import refusal
from fedmerge.errors import CheckpointError

_CONTAINER = "TorchScript"
_CLASSES = "__torch__."  # under which TorchScript names the classes that its own code defines
_CONSTANTS = "constants.pkl"
_CODE = "/code/"  # the folder of the classes' text
_MOST_MODULES = 1_000_000  # shared modules count wherever they are met, so few could be many
_TAGS: Mapping[str, Callable[..., object]] = {  # functions that only say the type of a list
    **dict.fromkeys(
        (f"torch.jit._pickle.build_{kind}list" for kind in ("int", "tensor", "double", "bool")),
        lambda value: value,
    ),
    "torch.jit._pickle.restore_type_tag": lambda value, tag: value,
}


class Inert:
    """An object of a class that TorchScript code defines: its state and nothing else."""

    qualified = ""
    state: object = None

    def __new__(cls, *args: object) -> "Inert":
        """Take and drop whatever the class would be made from."""
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Keep the state as it was stored."""
        self.state = state


@dataclass(frozen=True)
class Slots:
    """Which attributes of a module are its parameters and which its buffers."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def read_scripted(path: Path, options: ReadOptions) -> Contents:
    """Read the tensors that `torch.jit.load(path).state_dict()` has, under the same names."""
    archive = open_archive(path, compressed=_CODE)
    root = next(n for n in archive.entries if n.endswith(f"/{_CONSTANTS}")).removesuffix(_CONSTANTS)
    if f"{root}data.pkl" not in archive.entries:
        raise damaged(path, f"its record '{root}data.pkl' is missing")
    model = _unpickle(archive, root, options)
    if not isinstance(model, Inert):
        raise damaged(path, "its data.pkl holds no module")
    try:
        tree = dict(_state(model, _Code(archive, root), "", (model,)))
    except RecursionError as error:
        raise damaged(path, "its modules lie too deep in each other") from error
    if not tree:
        raise _without_weights(archive, root)
    return Contents(_CONTAINER, tree, (path,), archive.size)


def _without_weights(archive: Archive, root: str) -> CheckpointError:
    if archive.under(f"{root}constants/"):
        return CheckpointError(
            f"{archive.path}: a frozen TorchScript archive, its weights are constants of its code",
            "save the module before torch.jit.freeze, or the state dict that it was made from",
        )
    return CheckpointError(f"{archive.path}: a TorchScript archive without parameters")


def _unpickle(archive: Archive, root: str, options: ReadOptions) -> object:
    content = archive.read(f"{root}data.pkl")
    scan = scan_pickles(io.BytesIO(content), most=1)
    classes = [_inert(name) for name in scan.globals if name.startswith(_CLASSES)]
    tags: list[Callable[..., Any] | Admitted] = [(tag, name) for name, tag in _TAGS.items()]
    admitted = [*classes, *tags, *import_globals(options.allow_globals)]
    unpickler: Any = Unpickler(io.BytesIO(content), encoding="utf-8")
    unpickler.persistent_load = lambda key: _storage(archive, root, key)
    with torch.serialization.safe_globals(admitted), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return unpickler.load()
        except CheckpointError:
            raise
        except Exception as error:  # hostile bytes make torch raise nearly anything
            raise refusal(archive.path, error, scan, options, _is_harmless) from error


def _is_harmless(name: str) -> bool:
    return is_plumbing(name) or name.startswith(_CLASSES) or name in _TAGS


def _inert(name: str) -> Admitted:
    return type("Inert", (Inert,), {"qualified": name}), name


def _storage(archive: Archive, root: str, key: tuple[Any, ...]) -> Any:
    """Return the numbers that a pickle refers to as ("storage", type, record, device, count)."""
    _, kind, name, _, count = key
    record = f"{root}data/{name}"
    dtype: torch.dtype = kind.dtype
    held = archive.entries[record].file_size if record in archive.entries else None
    if held is None or not isinstance(count, int) or count * dtype.itemsize > held:
        wrong = "is missing" if held is None else f"has {held:,} bytes, too few for {count:,}"
        raise damaged(archive.path, f"its record '{record}' {wrong}")
    storage = archive.storage(record) if held else torch.empty(0).untyped_storage()
    typed: Any = torch.storage.TypedStorage
    return typed(wrap_storage=storage, dtype=dtype, _internal=True)


class _Code:
    """The text of an archive's classes, read for the names of parameters and buffers only."""

    def __init__(self, archive: Archive, root: str) -> None:
        self._archive = archive
        self._root = root
        self._slots: dict[str, Slots | None] = {}
        self._asked = 0

    def slots(self, qualified: str) -> Slots | None:
        """Return a module's parameters and buffers, None for a class that is no module."""
        self._asked += 1
        if self._asked > _MOST_MODULES:
            raise damaged(self._archive.path, f"it has more than {_MOST_MODULES:,} modules")
        if qualified not in self._slots:
            self._slots[qualified] = self._find(qualified)
        return self._slots[qualified]

    def _find(self, qualified: str) -> Slots | None:
        place, _, name = qualified.rpartition(".")
        record = f"{self._root.rstrip('/')}{_CODE}{place.replace('.', '/')}.py"
        if record not in self._archive.entries:
            return None
        head = rf"^class {re.escape(name)}\(Module\):\n((?:[ \t].*\n|\n)*)"
        found = re.search(head, self._archive.text(record), re.MULTILINE)
        if found is None:
            return None
        return Slots(*(_listed(found[1], kind) for kind in ("parameters", "buffers")))


def _listed(body: str, kind: str) -> tuple[str, ...]:
    line = re.search(rf"^\s+__{kind}__ = \[(.*)\]$", body, re.MULTILINE)
    return tuple(re.findall(r'"([^"\\]+)"', line[1])) if line else ()


def _state(
    module: Inert, code: _Code, prefix: str, path: tuple[Inert, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors as a state dict has them: parameters, buffers, then the parts in order."""
    slots = code.slots(module.qualified)
    if slots is None or not isinstance(module.state, Mapping):
        return
    attributes = {str(name): value for name, value in module.state.items()}
    for own in (slots.parameters, slots.buffers):
        for name, value in attributes.items():
            if name in own and isinstance(value, torch.Tensor):
                yield prefix + name, value
    for name, value in attributes.items():
        if isinstance(value, Inert) and not any(value is above for above in path):
            yield from _state(value, code, f"{prefix}{name}.", (*path, value))
