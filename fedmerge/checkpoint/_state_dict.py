"""From a container's contents to one state dict under plain names."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fedmerge.checkpoint._budget import MOST_TENSORS
from fedmerge.checkpoint._contents import Contents, ReadOptions
from fedmerge.checkpoint._ema import Tensors, is_ema, split_ema
from fedmerge.checkpoint._failures import listed
from fedmerge.checkpoint._names import Names, strip_wrappers
from fedmerge.checkpoint._search import Candidate, choose
from fedmerge.errors import CheckpointError

_TIMES_THE_SIZE = 4  # of a file's bytes, which all its tensors may read together
_BESIDES = 4_000_000_000  # bytes that they may read in any case: views with gaps read these, too
_LONGEST_NAME = 1_000  # characters
_MOST_PARTS = 64  # between dots
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
    tensors, weights, ema_notes = _choose_weights(chosen, options, label)
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


def _choose_weights(
    chosen: Candidate, options: ReadOptions, label: str
) -> tuple[Tensors, str, list[str]]:
    if is_ema(chosen.location):
        copies: dict[str, Tensors] = {"raw": {}, "ema": chosen.tensors}
    else:
        raw, ema = split_ema(chosen.tensors)
        copies = {"raw": raw, "ema": ema}
    weights = options.weights or ("raw" if copies["raw"] else "ema")
    taken, left = copies[weights], copies["ema" if weights == "raw" else "raw"]
    if not taken:
        raise CheckpointError(
            f"{label}: has no {weights} weights", "leave out --weights, or choose the others"
        )
    lacking = [name for name in left if name not in taken] if weights == "ema" else []
    notes = [f"the EMA copy lacks {listed(lacking)}"] if lacking else []
    if weights == "raw" and left:
        notes.append(f"an EMA copy of {len(left)} tensors ignored")
    return taken, weights, notes


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
