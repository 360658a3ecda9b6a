"""The tensors of pickled modules (`torch.save(model)`), read from inert objects: no code is run."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fedmerge.checkpoint.files import MOST_TENSORS, RESAVE
from fedmerge.checkpoint.pickle_machine import Inert, is_module
from fedmerge.checkpoint.tensors import StoredTensor
from fedmerge.decoding import shortened
from fedmerge.errors import CheckpointError

_MOST_ENTRIES = 500_000  # of all modules; shared ones count wherever they are met
_DEEPEST = 64  # modules within each other
_LONGEST_NAME = 1_000  # characters of a tensor's, with the modules that it lies in
_WRAPPED = "module"  # what DataParallel and others call the one module in them
_PARAMETRISED = "parametrizations"


def class_of(module: Inert) -> str:
    """Return the name of a module's class, or of the one that wrappers hold."""
    for _ in range(_DEEPEST):
        parts = _entries(module, "_modules")
        inner = parts.get(_WRAPPED)
        if len(parts) != 1 or not is_module(inner) or _entries(module, "_parameters"):
            break
        module = inner
    return module.name


def read_modules(modules: Iterable[Inert], path: Path) -> None:
    """Give every module the tensors of its `state_dict()`, by their names there, as its content."""
    reader = _Reader(path)
    for module in modules:
        module.content = dict(reader.state(module))


class _Reader:
    """What is left of the budget for all modules of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries_left = _MOST_ENTRIES
        self._tensors_left = MOST_TENSORS

    def state(self, module: Inert) -> dict[str, StoredTensor]:
        """Return parameters, persistent buffers, then those of the parts, in order."""
        found: dict[str, StoredTensor] = {}
        for name, tensor in self._tensors(module, "", (module,)):
            self._tensors_left -= 1
            if self._tensors_left < 0:
                raise self._senseless(f"more than {MOST_TENSORS:,} tensors")
            if name in found:
                raise self._senseless(f"two tensors are called '{name}'")
            found[name] = tensor
        return found

    def _tensors(
        self, module: Inert, prefix: str, path: tuple[Inert, ...]
    ) -> Iterator[tuple[str, StoredTensor]]:
        self._count(module)
        if len(path) > _DEEPEST:
            raise self._senseless(f"more than {_DEEPEST} modules within each other")
        temporary = _temporary(module)
        buffers = _entries(module, "_buffers").items()
        own = [
            *_entries(module, "_parameters").items(),
            *((name, value) for name, value in buffers if name not in temporary),
        ]
        for key, value in own:
            name = self._name(prefix, key)
            if isinstance(value, StoredTensor):
                yield name, value
            elif value is not None:
                raise self._senseless(f"'{name}' is no tensor")
        for key, part in _entries(module, "_modules").items():
            if part is not None:
                name = self._name(prefix, key)
                module_in_it = self._part(name, part, path)
                yield from self._tensors(module_in_it, f"{name}.", (*path, module_in_it))

    def _part(self, name: str, part: object, path: tuple[Inert, ...]) -> Inert:
        if not is_module(part):
            raise self._senseless(f"'{name}' is no module")
        if any(part is above for above in path):
            raise self._senseless(f"'{name}' lies within itself")
        if name.rpartition(".")[2] == _PARAMETRISED:
            raise CheckpointError(
                f"{self._path}: a pickled module with parametrisations ('{shortened(name)}'), "
                "whose weights only its code can compute",
                f"remove them (torch.nn.utils.parametrize.remove_parametrizations) and {RESAVE}",
            )
        return part

    def _name(self, prefix: str, key: object) -> str:
        if not isinstance(key, str) or not key or len(prefix) + len(key) > _LONGEST_NAME:
            raise self._senseless(f"a tensor or module without an ordinary name in '{prefix}'")
        return prefix + key

    def _count(self, module: Inert) -> None:
        names = ("_parameters", "_buffers", "_modules")
        entries = sum(len(_entries(module, name)) for name in names)
        self._entries_left -= 1 + entries + len(_temporary(module))
        if self._entries_left < 0:
            raise self._senseless(f"more than {_MOST_ENTRIES:,} parameters, buffers and modules")

    def _senseless(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: a pickled module that torch cannot have written ({shortened(reason)})",
            f"where it comes from, {RESAVE}",
        )


def _entries(module: Inert, name: str) -> Mapping[object, object]:
    assert isinstance(module.state, Mapping)
    entries = module.state[name]
    return entries if isinstance(entries, Mapping) else {}


def _temporary(module: Inert) -> set[object]:
    """Return the names of the buffers that no state dict has; old files know of none."""
    assert isinstance(module.state, Mapping)
    names = module.state.get("_non_persistent_buffers_set")
    listed = names.content if isinstance(names, Inert) else names
    return {n for n in listed if isinstance(n, str)} if isinstance(listed, list) else set()
