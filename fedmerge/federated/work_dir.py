"""Files of a work dir: sealed by digests, and those that reports look at."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from fedmerge.checkpoint import open_tensors, readable, values_digest, write_model, write_text
from fedmerge.decoding import Fail, decode_json, read_text
from fedmerge.errors import CheckpointError
from fedmerge.federated.federation import Federation, Layer, Round
from fedmerge.federated.fedma import layers_of
from fedmerge.values.arrays import Array
from fedmerge.values.clients import TensorInfo
from fedmerge.values.plans import Plan, Widths, axis_size
from fedmerge.values.work import Arrays

RECORD = "fedmerge"  # of the safetensors metadata
_DAMAGED = re.compile(r"truncated or damaged \((.*)\)", re.DOTALL)  # as the readers say it
SEAL = "sha256"  # among the values of a text
_Value = TypeVar("_Value")


class _Sealed(msgspec.Struct, frozen=True):
    """What a file of tensors says of itself."""

    about: msgspec.Raw
    sha256: str


@dataclass(frozen=True)
class SealedTensors:
    """The tensors of a file, and what was said of them as text."""

    arrays: Mapping[str, Array]
    about: bytes  # JSON


def write_sealed(path: Path, arrays: Arrays, about: Mapping[str, Any]) -> None:
    """Replace a file by arrays and what is to be said of them, with a digest of both."""
    infos = {name: TensorInfo(array.shape, array.dtype.name) for name, array in arrays.items()}

    def record(digests: Mapping[str, str]) -> dict[str, Any]:
        return {"about": about, SEAL: _tensors_digest(_compact(about), infos, digests)}

    write_model(path, infos, lambda name: arrays[name], record=record, force=True)


def read_sealed(path: Path, *, fail: Fail) -> SealedTensors:
    """Return the arrays of a file and what was said of them, if all is as it was written."""
    try:
        opened = open_tensors(path)
        arrays = {name: opened.read(name) for name in opened.tensors}
    except CheckpointError as error:
        raise fail(_reason(path, error)) from error
    sealed = decode_json(opened.metadata.get(RECORD, "{}"), _Sealed, fail=fail)
    about = bytes(sealed.about)
    digests = {n: values_digest(array, opened.tensors[n].dtype) for n, array in arrays.items()}
    if _tensors_digest(about, opened.tensors, digests) != sealed.sha256:
        raise fail("it is not as it was written")
    return SealedTensors(arrays, about)


def write_sealed_text(path: Path, values: Mapping[str, Any]) -> None:
    """Replace a text file by JSON values and their digest."""
    write_text(path, readable({**values, SEAL: digest_of(values)}), force=True)


def read_sealed_text(path: Path, kind: type[_Value], *, fail: Fail) -> _Value:
    """Return the values of a text file, if all is as it was written."""
    content = read_text(path, fail=fail)
    values = decode_json(content, dict[str, Any], fail=fail)
    if digest_of({name: v for name, v in values.items() if name != SEAL}) != values.get(SEAL):
        raise fail("it is not as it was written")
    return decode_json(content, kind, fail=fail)


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, which may have been read from a file."""
    return hashlib.sha256(_compact(values)).hexdigest()


def _tensors_digest(
    about: bytes, infos: Mapping[str, TensorInfo], digests: Mapping[str, str]
) -> str:
    tensors = [[name, info.dtype, info.shape, digests[name]] for name, info in infos.items()]
    return hashlib.sha256(about + b"\n" + _compact({"tensors": tensors})).hexdigest()


def _compact(values: Mapping[str, Any]) -> bytes:
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode(errors="surrogatepass")


def _reason(path: Path, error: CheckpointError) -> str:
    """Return why a file can't be read, without its name."""
    found = _DAMAGED.fullmatch(error.problem.removeprefix(f"{path}: "))
    return found[1] if found else error.problem.removeprefix(f"{path}: ")


def damaged_file(path: Path, hint: str) -> Callable[[str], CheckpointError]:
    """Return what makes an error of the reason why a file can't be used."""
    return lambda reason: CheckpointError(f"{path}: is damaged ({reason})", hint)


MOST_CLIENTS = 6  # with more beside each other the average leaves a screen
CONVOLUTION = 4  # axes of a weight: units, inputs, height, width
KEPT_FILES = "matched-*.safetensors"  # by the group's place in the plan
_AVERAGE = "average"


@dataclass(frozen=True)
class MatchedLayer:
    """One layer as it was matched: what it reads in global units, what it makes in the clients'."""

    group: str
    clients: Mapping[str, Arrays]  # the first ones → the layer's tensors
    assignments: Mapping[str, tuple[int, ...]]  # client → global unit of each of its units
    average: Arrays  # of all clients, by place; empty where their widths differ


class _LayerFile(msgspec.Struct, frozen=True):
    """What a file says beside the tensors of a layer."""

    group: str
    assignments: tuple[tuple[str, tuple[int, ...]], ...]  # clients, and the places of their units


def keep_layer(
    folder: Path, plan: Plan, current: Round, before: Federation, after: Federation
) -> None:
    """Write the layer that a round matched into a folder, if it is a convolution.

    `before` are the clients' models when they were matched, `after` what came of it.
    """
    layer = current.layer
    if layer.group is None or not _convolutions(plan, layer):
        return
    own = [{name: model.arrays[name] for name in layer.tensors} for model in before.locals]
    arrays = dict(_named(own[:MOST_CLIENTS], _averaged(own)))
    kept = zip(before.locals[:MOST_CLIENTS], after.placements, strict=False)
    about = {
        "group": layer.group,
        "assignments": [
            [model.name, placement[layer.group].indices.tolist()] for model, placement in kept
        ],
    }
    write_sealed(_path(folder, plan, layer.group), arrays, about)


def load_layer(folder: Path, plan: Plan, group: str, widths: Widths) -> MatchedLayer | None:
    """Return what a run kept of a group's layer, None if there is nothing.

    `widths` are those of all groups, of units that belong to somebody.
    """
    path = _path(folder, plan, group)
    if not os.path.lexists(path):
        return None
    fail = damaged_file(path, "run the rounds again")
    found = read_sealed(path, fail=fail)
    about = decode_json(found.about, _LayerFile, fail=fail)
    owners: dict[str, dict[str, Array]] = {}
    for name, array in found.arrays.items():
        owner, _, tensor = name.partition("/")
        owners.setdefault(owner, {})[tensor] = array
    average = owners.pop(_AVERAGE, {})
    try:
        if about.group != group:
            raise ValueError(f"it is of the group '{about.group}'")
        _check_layer(about, owners, average, plan, widths)
    except ValueError as error:
        raise fail(str(error)) from error
    names = [name for name, _ in about.assignments]
    return MatchedLayer(
        group=group,
        clients={name: owners[str(number)] for number, name in enumerate(names)},
        assignments=dict(about.assignments),
        average=average,
    )


def _check_layer(
    about: _LayerFile,
    owners: Mapping[str, Arrays],
    average: Arrays,
    plan: Plan,
    widths: Widths,
) -> None:
    """Raise ValueError if a layer is not one of the plan's, for as many clients as it names."""
    if not about.assignments or list(owners) != [str(k) for k in range(len(about.assignments))]:
        raise ValueError(f"it has the layers of {len(owners)} clients")
    [layer] = [layer for layer in layers_of(plan) if layer.group == about.group]
    for (_, units), arrays in zip(about.assignments, owners.values(), strict=True):
        _check_tensors(arrays, layer, plan, {**widths, about.group: len(units)})
    if average:
        first = len(about.assignments[0][1])
        _check_tensors(average, layer, plan, {**widths, about.group: first})


def _check_tensors(arrays: Arrays, layer: Layer, plan: Plan, widths: Widths) -> None:
    if arrays.keys() != set(layer.tensors):
        raise ValueError(f"it has other tensors than {', '.join(layer.tensors)}")
    for name, array in arrays.items():
        shape = tuple(axis_size(layout, widths) for layout in plan.tensors[name].axes)
        if array.shape != shape or array.dtype.kind != "f":
            raise ValueError(f"'{name}' is {array.shape} of {array.dtype}, expected {shape}")


def _path(folder: Path, plan: Plan, group: str) -> Path:
    place = [own.name for own in plan.groups].index(group)
    return folder / KEPT_FILES.replace("*", str(place + 1))


def _convolutions(plan: Plan, layer: Layer) -> list[str]:
    """Return the convolutions among a layer's tensors that make its group's units."""
    return [
        name
        for name in layer.tensors
        if len(plan.tensors[name].axes) == CONVOLUTION
        and layer.group in plan.tensors[name].produces
    ]


def _averaged(own: Sequence[Arrays]) -> Arrays:
    """Return the clients' element-wise mean, nothing where their widths differ."""
    shapes = [{name: array.shape for name, array in arrays.items()} for arrays in own]
    if any(found != shapes[0] for found in shapes):
        return {}
    summed = {name: np.zeros(array.shape) for name, array in own[0].items()}
    for arrays in own:  # one at a time: there may be many
        summed = {name: total + arrays[name] for name, total in summed.items()}
    return {name: (summed[name] / len(own)).astype(own[0][name].dtype) for name in summed}


def _named(own: Sequence[Arrays], average: Arrays) -> Iterator[tuple[str, Array]]:
    for owner, arrays in (*((str(k), a) for k, a in enumerate(own)), (_AVERAGE, average)):
        for name, array in arrays.items():
            yield f"{owner}/{name}", array
