"""The clients' convolutions as they were matched, kept beside a run for pictures of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from fedmerge.decoding import decode_json
from fedmerge.types.arrays import Array
from fedmerge.types.layouts import Widths, axis_size
from fedmerge.types.plans import Plan
from fedmerge.types.work import Arrays
from fedmerge.workflow.retrain.federation import Federation
from fedmerge.workflow.retrain.schedule import Layer, Round, layers_of
from fedmerge.workflow.retrain.sealed import damaged_file, read_sealed, write_sealed

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
