"""Read the weights of exported programs (.pt2): JSON and raw bytes, nothing is run.

`torch.export.load` unpickles what it finds with all of Python, so it is never called here.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.utils import _pytree as pytree

from fedmerge.checkpoint._archive import Archive, open_archive
from fedmerge.checkpoint._contents import Contents, ReadOptions
from fedmerge.checkpoint._failures import damaged, reason_of
from fedmerge.checkpoint._payloads import Payload, Tensors, read_payload
from fedmerge.checkpoint._torch_files import load_record
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from fedmerge.types.programs import Program

_CONTAINER = "exported program"
_FORMAT = "archive_format"  # the record whose folder is the archive's root
_OLD_STATES = ("serialized_state_dict.pt", "serialized_state_dict.json")  # before torch 2.8
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError)


def read_exported(path: Path, options: ReadOptions) -> Contents:
    """Read parameters and buffers under their own names, in the model's order, memory-mapped.

    Constants are listed without values: they are part of the graph, not weights.
    """
    archive = open_archive(path)
    old = [name for name in archive.entries if name in _OLD_STATES]
    if old:
        return Contents(_CONTAINER, load_record(archive, old[0], options), (path,), archive.size)
    root = next(name for name in archive.entries if name.endswith(_FORMAT)).removesuffix(_FORMAT)
    _check_byte_order(archive, root)
    models = [m.removesuffix(".json") for m in archive.under(f"{root}models/")]
    if not models:
        raise CheckpointError(
            f"{path}: a compiled package (.pt2) without an exported program in it",
            "save the program itself with torch.export.save, or the model's state dict",
        )
    programs = {name: _read_program(archive, root, name, options) for name in models}
    trees = {name: _tree(program) for name, program in programs.items()}
    if len(models) == 1:
        (name,) = models
        trees, programs = trees[name], {"": programs[name]}
    return Contents(_CONTAINER, trees, (path,), archive.size, programs=programs)


def _tree(program: Program) -> dict[str, Any]:
    return {**program.weights, **dict.fromkeys(program.constants)}


def _check_byte_order(archive: Archive, root: str) -> None:
    if f"{root}byteorder" not in archive.entries:
        return
    order = archive.read(f"{root}byteorder").decode("ascii", "replace")
    if order != sys.byteorder:
        raise CheckpointError(
            f"{archive.path}: numbers are {order}-endian, this machine is {sys.byteorder}-endian",
            "save the model's state dict with torch.save on the machine that made it",
        )


def _read_program(archive: Archive, root: str, name: str, options: ReadOptions) -> Program:
    try:
        described = _json(archive, f"{root}models/{name}.json")
        graph_module = described["graph_module"]
        weights = _read_tensors(archive, f"{root}data/weights/", name, options)
        constants = _read_tensors(archive, f"{root}data/constants/", name, options)
        examples = _examples(archive, f"{root}data/sample_inputs/{name}.pt", options)
        ordered = {key: weights[key] for key in _model_order(graph_module, list(weights))}
    except _MALFORMED as error:
        raise damaged(archive.path, reason_of(error)) from error
    return Program(graph_module, ordered, constants, examples)


def _json(archive: Archive, record: str) -> Any:
    if record not in archive.entries:
        raise damaged(archive.path, f"its record '{record}' is missing")
    return json.loads(archive.read(record))


def _read_tensors(archive: Archive, folder: str, model: str, options: ReadOptions) -> Tensors:
    """Return the tensors of a folder, which one JSON file describes (once it was a pickle)."""
    if f"{folder}{model}.pt" in archive.entries:
        tree = load_record(archive, f"{folder}{model}.pt", options)
        if not isinstance(tree, Mapping):
            raise damaged(archive.path, f"'{folder}{model}.pt' is no mapping of names to tensors")
        return {str(name): tensor for name, tensor in tree.items()}
    kind = folder.rstrip("/").rpartition("/")[2]
    config = _json(archive, f"{folder}{model}_{kind}_config.json")["config"]
    payloads = {str(name): Payload.from_json(described) for name, described in config.items()}
    return {
        name: read_payload(archive, folder, name, payload, options)
        for name, payload in payloads.items()
    }


def _examples(archive: Archive, record: str, options: ReadOptions) -> tuple[Any, ...]:
    """Return the inputs that the program was exported with, where they are plain tensors."""
    if record not in archive.entries or not archive.entries[record].file_size:
        return ()
    try:
        return tuple(pytree.tree_leaves(load_record(archive, record, options)))
    except UnsafeCheckpointError:
        raise
    except CheckpointError:  # no torch file: nothing that the weights need
        return ()


def _model_order(graph_module: Mapping[str, Any], names: list[str]) -> list[str]:
    """Return names in the order of the model's state dict, as far as the graph tells it.

    The signature lists all parameters before all buffers; the module tree is listed in order.
    """
    signature = list(_signature_names(graph_module["signature"]["input_specs"]))
    modules = [str(entry["fqn"]) for entry in graph_module.get("module_call_graph", ())]
    places = {module: number for number, module in reversed(list(enumerate(modules)))}
    ranks = {name: number for number, name in reversed(list(enumerate(signature)))}
    end = len(modules) + len(signature)

    def rank(name: str) -> tuple[int, int]:
        return places.get(name.rpartition(".")[0], end), ranks.get(name, end)

    return sorted(names, key=rank)


def _signature_names(specs: list[Mapping[str, Any]]) -> Iterator[str]:
    for spec in specs:
        for kind in ("parameter", "buffer"):
            if kind in spec:
                yield str(spec[kind][f"{kind}_name"])
