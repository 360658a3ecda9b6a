"""Read the weights of TorchScript archives: inert objects in place of modules, no code is run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fedmerge.checkpoint.files import (
    Archive,
    Contents,
    ReadOptions,
    SourceFile,
    damaged,
    open_archive,
)
from fedmerge.checkpoint.pickle_machine import Inert, Known, Trust
from fedmerge.checkpoint.pickle_steps import read_pickle
from fedmerge.checkpoint.tensors import StoredTensor
from fedmerge.checkpoint.torch_files import ArchiveStorages, admitting, tensor_names, understood
from fedmerge.errors import CheckpointError

_CONTAINER = "TorchScript"
_CLASSES = "__torch__."  # under which TorchScript names the classes that its own code defines
_CONSTANTS = "constants.pkl"
_CODE = "/code/"  # the folder of the classes' text
_MOST_ATTRIBUTES = 500_000  # of all modules; shared ones count wherever they are met
_MOST_CODE = 16_000_000  # bytes of all classes' text
_MOST_SLOTS = 200_000  # classes, and names of parameters and buffers, in their text
_DEEPEST = 64  # modules within each other
_LONGEST_PREFIX = 1_000  # characters of the names of modules within each other
_CLASS = re.compile(r"^class (\w+)\(Module\):\n", re.MULTILINE)
_TAGS: Mapping[str, Known] = {  # functions that only say the type of a list
    name: Known(name, call=lambda value, tag=None: value)
    for name in (
        *(f"torch.jit._pickle.build_{kind}list" for kind in ("int", "tensor", "double", "bool")),
        "torch.jit._pickle.restore_type_tag",
    )
}


@dataclass(frozen=True)
class Slots:
    """Which attributes of a module are its parameters and which its buffers."""

    parameters: frozenset[str]
    buffers: frozenset[str]


def read_scripted(file: SourceFile, options: ReadOptions) -> Contents:
    """Read the tensors that `torch.jit.load(path).state_dict()` has, under the same names."""
    archive = open_archive(file.whole, compressed=_CODE)
    root = next(n for n in archive.entries if n.endswith(f"/{_CONSTANTS}")).removesuffix(_CONSTANTS)
    model = _unpickle(archive, root, options)
    if not isinstance(model, Inert):
        raise damaged(file.path, "its data.pkl holds no module")
    tree = dict(_state(model, _Code(archive, root), "", (model,)))
    if not tree:
        raise _without_weights(archive, root)
    return Contents(_CONTAINER, tree, (file,))


def _without_weights(archive: Archive, root: str) -> CheckpointError:
    if archive.under(f"{root}constants/"):
        return CheckpointError(
            f"{archive.path}: a frozen TorchScript archive, its weights are constants of its code",
            "save the module before torch.jit.freeze, or the state dict that it was made from",
        )
    return CheckpointError(f"{archive.path}: a TorchScript archive without parameters")


def _unpickle(archive: Archive, root: str, options: ReadOptions) -> object:
    is_users = admitting(options.allow_globals)
    trust = Trust(
        {**tensor_names(archive.region.file.budget), **_TAGS},
        lambda name: name.startswith(_CLASSES) or is_users(name),
        load_storage=ArchiveStorages(archive, f"{root}data/").load,
    )
    content = archive.content(f"{root}data.pkl")
    content.check()
    return understood(archive.path, lambda: read_pickle(content, trust)).value


class _Code:
    """The text of an archive's classes, read for the names of parameters and buffers only."""

    def __init__(self, archive: Archive, root: str) -> None:
        self._archive = archive
        self._root = root
        self._files: dict[str, Mapping[str, Slots]] = {}  # by record: the modules it defines
        self._left = _MOST_CODE
        self._slots_left = _MOST_SLOTS
        self._attributes_left = _MOST_ATTRIBUTES

    def slots(self, module: Inert) -> Slots | None:
        """Return a module's parameters and buffers, None for an object that is no module."""
        if not isinstance(module.state, Mapping):
            return None
        self._attributes_left -= 1 + len(module.state)
        if self._attributes_left < 0:
            raise self._too_much(f"{_MOST_ATTRIBUTES:,} attributes of modules")
        place, _, name = module.name.rpartition(".")
        record = f"{self._root.rstrip('/')}{_CODE}{place.replace('.', '/')}.py"
        if record not in self._files:
            self._files[record] = self._modules(record)
        return self._files[record].get(name)

    def too_deep(self) -> CheckpointError:
        """Return the error of modules whose names would go on and on."""
        return damaged(
            self._archive.path, "its modules lie too deep in each other, or have long names"
        )

    def _modules(self, record: str) -> Mapping[str, Slots]:
        if record not in self._archive.entries:
            return {}
        text = self._archive.text(record, self._left + 1)
        self._left -= len(text)
        if self._left < 0:
            raise self._too_much(f"{_MOST_CODE:,} bytes of code")
        self._count_slots(len(_CLASS.findall(text)))
        _, *parts = _CLASS.split(text)
        return {
            name: Slots(*(self._listed(body, kind) for kind in ("parameters", "buffers")))
            for name, body in zip(parts[::2], parts[1::2], strict=True)
        }

    def _listed(self, body: str, kind: str) -> frozenset[str]:
        line = re.search(rf"^[ \t]+__{kind}__ = \[(.*)\]$", body, re.MULTILINE)
        if line is None:
            return frozenset()
        self._count_slots(line[1].count('"') // 2)
        return frozenset(re.findall(r'"([^"\\]+)"', line[1]))

    def _count_slots(self, count: int) -> None:
        self._slots_left -= count
        if self._slots_left < 0:
            raise self._too_much(f"{_MOST_SLOTS:,} classes, parameters and buffers")

    def _too_much(self, what: str) -> CheckpointError:
        return damaged(self._archive.path, f"it has more than {what}")


def _state(
    module: Inert, code: _Code, prefix: str, path: tuple[Inert, ...]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield tensors as a state dict has them: parameters, buffers, then the parts in order."""
    slots = code.slots(module)
    if slots is None:
        return
    assert isinstance(module.state, Mapping)
    if len(path) > _DEEPEST or len(prefix) > _LONGEST_PREFIX:
        raise code.too_deep()
    attributes = {str(name): value for name, value in module.state.items()}
    for own in (slots.parameters, slots.buffers):
        for name, value in attributes.items():
            if name in own and isinstance(value, StoredTensor):
                if len(prefix) + len(name) > _LONGEST_PREFIX:
                    raise code.too_deep()
                yield prefix + name, value
    for name, value in attributes.items():
        if isinstance(value, Inert) and not any(value is above for above in path):
            yield from _state(value, code, f"{prefix}{name}.", (*path, value))
