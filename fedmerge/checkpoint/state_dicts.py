"""The state dict among all that a checkpoint holds, under plain names."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard, TypeVar

import torch

from fedmerge.checkpoint.ema_copies import EMA, Tensors, choose_copy
from fedmerge.checkpoint.files import MOST_TENSORS, Contents, ReadOptions, listed
from fedmerge.checkpoint.lightning import STATE_DICT
from fedmerge.checkpoint.pickle_machine import Inert, is_module
from fedmerge.checkpoint.pickled_modules import class_of
from fedmerge.checkpoint.tensors import StoredTensor, describe
from fedmerge.errors import CheckpointError

_Leaf = TypeVar("_Leaf")
_COMPILED = "_orig_mod"  # torch.compile, anywhere in a name
_PARALLEL = "module"  # DataParallel, in front of all names
_IN_TRAINING = "current_model_state"  # beside the average, by Lightning's WeightAveraging
_AVERAGED = {  # there: which of the two is taken → the other, and what it is
    STATE_DICT: (_IN_TRAINING, "the average of the weights"),
    _IN_TRAINING: (STATE_DICT, "the weights in training"),
}
_WRAPPED = "model"  # Lightning and others, in front of all names; stays in written names


@dataclass(frozen=True)
class Names:
    """Stored names and what they are called without wrappers."""

    plain: Mapping[str, str]  # stored name -> normalised name
    prefix: str  # "model." as often as it was in front of all names
    removed: tuple[str, ...]  # wrappers that were dropped, e.g. ("module.",)


def strip_wrappers(names: Iterable[str]) -> Names:
    """Drop wrappers from names, in any order and repeatedly.

    >>> names = strip_wrappers(["module.model._orig_mod.fc.weight"])
    >>> list(names.plain.values()), names.prefix, names.removed
    (['fc.weight'], 'model.', ('module.', '_orig_mod.'))
    """
    stored = {name: name.split(".") for name in names}
    parts = {name: _without_compiled(split) for name, split in stored.items()}
    front = _common_front(list(parts.values()))
    plain = {name: ".".join(rest[len(front) :]) for name, rest in parts.items()}
    removed = {
        f"{_PARALLEL}.": _PARALLEL in front,
        f"{_COMPILED}.": any(len(parts[name]) < len(stored[name]) for name in stored),
    }
    prefix = f"{_WRAPPED}." * front.count(_WRAPPED)
    return Names(plain, prefix, tuple(name for name, there in removed.items() if there))


def _without_compiled(parts: list[str]) -> list[str]:
    kept = [part for part in parts[:-1] if part != _COMPILED]
    return [*kept, parts[-1]]


def _common_front(names: list[list[str]]) -> list[str]:
    """Return the wrappers' names that all names start with, leaving each at least one part."""
    front: list[str] = []
    shortest = min((len(parts) for parts in names), default=0)
    for place in range(shortest - 1):
        here = {parts[place] for parts in names}
        if len(here) != 1 or not here <= {_PARALLEL, _WRAPPED}:
            break
        front += here
    return front


_Path = tuple[str, ...]
_DEEPEST = 64  # levels searched; no real checkpoint nests its tensors as deep
_LONGEST_PATH = 1_000  # characters of all names on the way to a state dict
_LONGEST_CLASS = 120  # characters of a class's name that are shown
_MOST_CONTAINERS = 100_000  # lists and dictionaries searched


@dataclass(frozen=True)
class Candidate:
    """One mapping of names to tensors, and the names it holds besides."""

    location: str  # dotted path, "" for the top level
    tensors: Mapping[str, StoredTensor]
    ignored: tuple[str, ...]
    module: str | None = None  # the class, if it is a pickled module's

    @property
    def has_weights(self) -> bool:
        """Whether any of its tensors could be a layer's weights."""
        return any(tensor.is_weight for tensor in self.tensors.values())


@dataclass(frozen=True)
class Choice:
    """The state dict to use and what was passed over."""

    candidate: Candidate
    notes: tuple[str, ...] = ()


def choose(tree: object, options: ReadOptions, *, label: str) -> Choice:
    """Return the state dict that the options mean; raise if there is none or more than one."""
    root, start = _start(tree, options.key, label)
    if options.key is not None and (at_root := _candidate(start, root)):
        return Choice(at_root, _module_note(at_root))
    found, optimizer = _walk(root, start, label)
    found = [c for c in found if c.has_weights] or ([] if optimizer else found)
    pool = _pool(found, options)
    if not pool:
        raise _nothing(found, options, label, optimizer=optimizer)
    if len(pool) > 1:
        raise _several(pool, label)
    copies = [c.location for c in found if EMA.search(c.location) and c not in pool]
    notes = (
        *_module_note(pool[0]),
        *(["optimizer states ignored"] if optimizer else []),
        *(f"the EMA copy '{location}' ignored" for location in copies),
        *_averaged_note(found, pool[0].location),
    )
    return Choice(pool[0], notes)


def _averaged_note(found: list[Candidate], taken: str) -> tuple[str, ...]:
    """Say which weights are taken where Lightning averaged them in training."""
    other, what = _AVERAGED.get(taken, (None, ""))
    if all(c.location != other for c in found):
        return ()
    return (f"{what} ('{taken}') taken, '{other}' ignored",)


def _module_note(candidate: Candidate) -> tuple[str, ...]:
    if candidate.module is None:
        return ()
    name = ascii(candidate.module)[1:-1][:_LONGEST_CLASS]
    return (f"a pickled module (class {name}): tensors read, its code is not run",)


def _pool(found: list[Candidate], options: ReadOptions) -> list[Candidate]:
    if {STATE_DICT, _IN_TRAINING} <= {c.location for c in found}:
        passed_over = STATE_DICT if options.weights == "raw" else _IN_TRAINING
        found = [c for c in found if c.location != passed_over]
    raw = [c for c in found if not EMA.search(c.location)]
    ema = [c for c in found if EMA.search(c.location)]
    # An EMA copy may also hide among the names of the raw state dict.
    return {"raw": raw, "ema": ema or raw, None: raw or ema}[options.weights]


def _start(tree: object, key: str | None, label: str) -> tuple[_Path, object]:
    if key is None or key == ".":
        return (), tree
    places = dict(_descend(tree, key, (), set()))
    if not places:
        known, _ = _walk((), tree, label)
        held = listed(list(map(_describe, known))) or "none"
        raise CheckpointError(f"{label}: has no '{key}'", f"state dicts in it: {held}")
    return next(iter(places.items()))


def _descend(
    node: object, key: str, path: _Path, seen: set[tuple[int, int]]
) -> Iterator[tuple[_Path, object]]:
    """Yield what lies at a dotted path whose parts may have dots themselves.

    Each container is searched once for the same rest of the path, however many ways lead there.
    """
    if (id(node), len(key)) in seen:
        return
    seen.add((id(node), len(key)))
    for name, child in _children(node):
        if name == key:
            yield (*path, name), child
        elif name and key.startswith(name + "."):
            yield from _descend(child, key[len(name) + 1 :], (*path, name), seen)


def _walk(root: _Path, start: object, label: str) -> tuple[list[Candidate], bool]:
    """Return every mapping of tensors, and whether optimizer states were left out.

    Each container is visited once, so cycles do no harm.
    """
    queue, seen = deque([(root, start)]), {id(start)}
    candidates: list[Candidate] = []
    optimizer = False
    while queue:
        path, node = queue.popleft()
        if _is_optimizer(path, node):
            optimizer = True
            continue
        candidate = _candidate(node, path)
        candidates += [candidate] if candidate else []
        for name, child in _children(node):
            if _is_container(child) and id(child) not in seen and len(path) < _DEEPEST:
                seen.add(id(child))
                queue.append(((*path, name), child))
                _check_budget(len(seen), path, name, label)
    return candidates, optimizer


def is_tensor(node: object) -> TypeGuard[StoredTensor]:
    """Whether a node is a tensor."""
    return isinstance(node, StoredTensor)


def leaves(tree: object, is_leaf: Callable[[object], TypeGuard[_Leaf]]) -> list[_Leaf]:
    """Return what is wanted of lists, tuples and mappings, in order, of each container once."""
    found: list[_Leaf] = []
    seen: set[int] = set()
    pending = [iter([("", tree)])]
    while pending and len(seen) < _MOST_CONTAINERS:
        _, node = next(pending[-1], ("", None))
        if node is None:
            pending.pop()
        elif is_leaf(node):
            found.append(node)
        elif _is_container(node) and id(node) not in seen:
            seen.add(id(node))
            pending.append(_children(node))
    return found


def _check_budget(count: int, path: _Path, name: str, label: str) -> None:
    if count > _MOST_CONTAINERS:
        raise CheckpointError(f"{label}: holds more than {_MOST_CONTAINERS:,} lists and mappings")
    if len(name) + sum(map(len, path)) > _LONGEST_PATH:
        raise CheckpointError(
            f"{label}: names in it have more than {_LONGEST_PATH:,} characters",
            "save the state dict alone, under names of ordinary length",
        )


def _is_container(node: object) -> bool:
    return isinstance(node, Mapping | list | tuple | Inert)


def _children(node: object) -> Iterator[tuple[str, object]]:
    if isinstance(node, Inert):
        node = node.content
    if isinstance(node, Mapping):
        yield from ((str(k), child) for k, child in node.items() if isinstance(k, str | int))
    elif isinstance(node, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(node))


def _is_optimizer(path: _Path, node: object) -> bool:
    if path and "optim" in path[-1].lower():
        return True
    return isinstance(node, Mapping) and "param_groups" in node and "state" in node


def _candidate(node: object, path: _Path) -> Candidate | None:
    module = None
    if isinstance(node, Inert):
        module = class_of(node) if is_module(node) else None
        node = node.content
    if not isinstance(node, Mapping):
        return None
    tensors = {
        key: describe(value) if isinstance(value, torch.Tensor) else value
        for key, value in node.items()
        if isinstance(key, str) and isinstance(value, torch.Tensor | StoredTensor)
    }
    ignored = tuple(str(key) for key in node if key not in tensors and isinstance(key, str | int))
    return Candidate(".".join(path), tensors, ignored, module) if tensors else None


def _describe(candidate: Candidate) -> str:
    place = f"'{candidate.location}'" if candidate.location else "'.' (the top level)"
    count = len(candidate.tensors)
    return f"{place} ({count} tensor{'s' if count > 1 else ''})"


def _several(pool: list[Candidate], label: str) -> CheckpointError:
    return CheckpointError(
        f"{label}: holds several state dicts: {listed(list(map(_describe, pool)))}",
        f"choose one, e.g. `key={pool[0].location or '.'}`",
    )


def _nothing(
    found: list[Candidate], options: ReadOptions, label: str, *, optimizer: bool
) -> CheckpointError:
    if found:
        return CheckpointError(
            f"{label}: has no {options.weights} weights, only {_describe(found[0])}",
            "leave out `weights`, or choose the others",
        )
    if optimizer:
        return CheckpointError(
            f"{label}: holds optimizer state only, no model", "give the model's checkpoint"
        )
    return CheckpointError(f"{label}: holds no tensors under names, so no state dict")


_TIMES_THE_SIZE = 4  # of a file's bytes, which all its tensors may read together
_BESIDES = 4_000_000_000  # bytes that they may read in any case: views with gaps read these, too
_LONGEST_NAME = 1_000  # characters
_MOST_PARTS = 64  # between dots
_MOST_CHARACTERS = 5_000_000  # of all names: those of fifty thousand tensors, a hundred each
# The last parts of a library's names, all of which must be there, and the library.
_QUANTISED: tuple[tuple[tuple[str, ...], str], ...] = (
    (("bitsandbytes__nf4",), "bitsandbytes, 4 bits"),
    (("bitsandbytes__fp4",), "bitsandbytes, 4 bits"),
    (("absmax", "quant_map"), "bitsandbytes, 4 bits"),
    (("SCB",), "bitsandbytes, 8 bits"),
    (("qweight", "qzeros", "g_idx"), "GPTQ"),
    (("qweight", "qzeros", "scales"), "AWQ"),
    (("weight_packed", "weight_scale"), "compressed-tensors"),
    (("weight_scale_inv",), "8-bit floats"),
    (("W_q", "scale", "zero"), "HQQ"),
)
_COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel, beside its "module." names


@dataclass(frozen=True)
class StateDict:
    """Tensors under normalised names, and where they come from."""

    location: str
    weights: str
    prefix: str
    notes: tuple[str, ...]
    tensors: Tensors
    aliases: Mapping[str, str]


def normalise(contents: Contents, options: ReadOptions, label: str) -> StateDict:
    """Find the state dict of a container, choose raw or EMA weights, strip names, find ties."""
    choice = choose(contents.tree, options, label=label)
    chosen = choice.candidate
    _check_names(chosen.tensors, label)
    _check_not_quantised(chosen.tensors, label)
    tensors, weights, ema_notes = chosen.tensors, "raw", list[str]()
    if options.weights == "ema" or any(map(EMA.search, (chosen.location, *tensors))):
        copy = choose_copy(chosen.location, tensors, options.weights, label)
        tensors, weights, ema_notes = copy
    tensors = {name: t for name, t in tensors.items() if name != _COUNTER}
    if contents.files:
        tensors = {name: tensor.within(contents.size) for name, tensor in tensors.items()}
        _check_total(tensors, contents.size, label)
    _check(tensors, label)
    names = strip_wrappers(tensors)
    plain = _rename(tensors, names, label)
    notes = (
        *choice.notes,
        *_ignored_note(chosen),
        *ema_notes,
        *(f"stripped '{wrapper}' from the names" for wrapper in names.removed),
    )
    return StateDict(
        *(chosen.location, weights, names.prefix, notes),
        tensors=MappingProxyType(plain),
        aliases=MappingProxyType(_ties(plain)),
    )


def _check_names(tensors: Tensors, label: str) -> None:
    if len(tensors) > MOST_TENSORS:
        raise CheckpointError(f"{label}: holds more than {MOST_TENSORS:,} tensors")
    for name in tensors:
        if len(name) > _LONGEST_NAME or name.count(".") > _MOST_PARTS:
            raise CheckpointError(
                f"{label}: a tensor's name has {len(name):,} characters and {name.count('.'):,} "
                f"dots, allowed are {_LONGEST_NAME:,} and {_MOST_PARTS:,}",
                "save the tensors under names of ordinary length",
            )
        if not name.isprintable():
            raise CheckpointError(f"{label}: the tensor name {name!a} is no printable text")
    if (characters := sum(map(len, tensors))) > _MOST_CHARACTERS:
        raise CheckpointError(
            f"{label}: the names of its tensors have {characters:,} characters, allowed are "
            f"{_MOST_CHARACTERS:,}",
            "save the tensors under names of ordinary length",
        )


def _check_not_quantised(names: Iterable[str], label: str) -> None:
    """Refuse weights that are stored as packed whole numbers with scales beside them."""
    by_end = {name.rpartition(".")[2]: name for name in names}
    for ends, kind in _QUANTISED:
        if all(end in by_end for end in ends):
            raise CheckpointError(
                f"{label}: quantised weights ({kind}: '{by_end[ends[0]]}'), which can't be merged",
                "merge the models before they are quantised, or save them dequantised (in "
                "transformers: model.dequantize(), then save_pretrained)",
            )


def _check(tensors: Tensors, label: str) -> None:
    for name, tensor in tensors.items():
        if tensor.problem:
            raise CheckpointError(
                f"{label}: '{name}' {tensor.problem}",
                "save dense tensors of dtype float64, float32, float16, bfloat16, int or bool",
            )
    if not any(tensor.info.is_float for tensor in tensors.values()):
        raise CheckpointError(f"{label}: holds no float tensors, so nothing to merge")


def _check_total(tensors: Tensors, size: int, label: str) -> None:
    """Refuse tensors that show the same few bytes in very many ways."""
    reads = {tensor.memory or name: tensor.reads for name, tensor in tensors.items()}
    if sum(reads.values()) > _TIMES_THE_SIZE * size + _BESIDES:
        raise CheckpointError(
            f"{label}: its tensors are views of {sum(reads.values()):,} bytes, but the file has "
            f"{size:,}",
            "save every tensor with numbers of its own (`tensor.clone()`)",
        )


def _rename(tensors: Tensors, names: Names, label: str) -> Tensors:
    origin: dict[str, str] = {}
    for stored, plain in names.plain.items():
        if plain in origin:
            raise CheckpointError(
                f"{label}: '{origin[plain]}' and '{stored}' are both '{plain}' "
                "without their wrappers' names",
                "save the state dict of one of the two models only",
            )
        origin[plain] = stored
    return {plain: tensors[stored] for plain, stored in origin.items()}


def _ties(tensors: Tensors) -> dict[str, str]:
    """Return each further name of a tensor with its first name."""
    first: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.memory is not None and first.setdefault(tensor.memory, name) != name:
            aliases[name] = first[tensor.memory]
    return aliases


def _ignored_note(chosen: Candidate) -> list[str]:
    ignored = [ascii(name[:_LONGEST_NAME])[1:-1] for name in chosen.ignored]
    ignored += [_COUNTER] if _COUNTER in chosen.tensors else []
    if not ignored:
        return []
    what = "entry that is no weight" if len(ignored) == 1 else "entries that are no weights"
    return [f"ignored {len(ignored)} {what}: {listed(ignored)}"]
