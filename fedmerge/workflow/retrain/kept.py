"""The clients' convolutions as they were matched, kept beside a run for pictures of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from fedmerge.checkpoint import write_model
from fedmerge.errors import CheckpointError
from fedmerge.types.arrays import Array
from fedmerge.types.clients import TensorInfo
from fedmerge.types.plans import Plan
from fedmerge.types.work import Arrays
from fedmerge.workflow.retrain.federation import Federation
from fedmerge.workflow.retrain.schedule import Layer, Round

MOST_CLIENTS = 6  # with more beside each other the average leaves a screen
CONVOLUTION = 4  # axes of a weight: units, inputs, height, width
_FILE = "matched-{}.safetensors"  # by the group's place in the plan
_AVERAGE = "average"


@dataclass(frozen=True)
class MatchedLayer:
    """One layer as it was matched: what it reads in global units, what it makes in the clients'."""

    group: str
    clients: Mapping[str, Arrays]  # the first ones → the layer's tensors
    assignments: Mapping[str, tuple[int, ...]]  # client → global unit of each of its units
    average: Arrays  # of all clients, by place; empty where their widths differ


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
    write_model(
        _path(folder, plan, layer.group),
        {name: TensorInfo(array.shape, array.dtype.name) for name, array in arrays.items()},
        lambda name: arrays[name],
        record=lambda digests: about,
        force=True,
    )


def load_layer(folder: Path, plan: Plan, group: str) -> MatchedLayer | None:
    """Return what a run kept of a group's layer, None if there is nothing."""
    path = _path(folder, plan, group)
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()["fedmerge"])
            found: dict[str, dict[str, Array]] = {}
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                owner, _, tensor = name.partition("/")
                found.setdefault(owner, {})[tensor] = np.array(file.get_tensor(name))
        clients = [name for name, _ in about["assignments"]]
        return MatchedLayer(
            group=str(about["group"]),
            clients={name: found[str(number)] for number, name in enumerate(clients)},
            assignments={name: tuple(units) for name, units in about["assignments"]},
            average=found.get(_AVERAGE, {}),
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is damaged ({error})", "run the rounds again") from error


def _path(folder: Path, plan: Plan, group: str) -> Path:
    return folder / _FILE.format([own.name for own in plan.groups].index(group) + 1)


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
