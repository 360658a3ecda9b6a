"""Exported programs (`.pt2`): weights and graph as data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from fedmerge.checkpoint.files import (
    Archive,
    Contents,
    ReadOptions,
    SourceFile,
    damaged,
    open_archive,
    reason_of,
)
from fedmerge.checkpoint.state_dicts import is_tensor, leaves
from fedmerge.checkpoint.tensors import StoredTensor, View, strided, torch_dtype
from fedmerge.checkpoint.torch_files import check_byte_order, zip_tree
from fedmerge.decoding import decode_json, shortened
from fedmerge.errors import CheckpointError, UnsafeCheckpointError
from fedmerge.values.clients import DTYPES, Program

Tensors: TypeAlias = dict[str, Any]

_STRIDED = 7  # the number of torch.strided


@dataclass(frozen=True)
class Payload:
    """Where a tensor lies in the archive, and how its numbers lie in its record."""

    record: str
    is_pickled: bool
    meta: Mapping[str, Any] | None

    @staticmethod
    def from_json(described: Mapping[str, Any]) -> "Payload":
        """Return what a weights or constants config says of one tensor."""
        return Payload(
            record=str(described["path_name"]),
            is_pickled=bool(described["use_pickle"]),
            meta=described.get("tensor_meta"),
        )


def read_payload(
    archive: Archive,
    folder: str,
    name: str,
    payload: Payload,
    read_pickled: Callable[[str], object],
) -> object:
    """Return a tensor; an object that is no tensor stays None."""
    record = folder + payload.record
    if "/" in payload.record or "\\" in payload.record or payload.record in ("", ".", ".."):
        raise CheckpointError(
            f"{archive.path}: '{shortened(name)}' names a record outside its folder: "
            f"{shortened(payload.record)!r}",
            "do not trust this file",
        )
    if record not in archive.entries:
        raise damaged(archive.path, f"'{name}' names the record '{record}', which is missing")
    if payload.meta is None:
        return None
    if payload.is_pickled:
        return read_pickled(record)
    return _strided(archive, record, name, payload.meta)


def _strided(archive: Archive, record: str, name: str, meta: Mapping[str, Any]) -> StoredTensor:
    """Return the view of a record's numbers that a tensor is, if it lies within them."""
    if meta["layout"] != _STRIDED or meta["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{archive.path}: '{shortened(name)}' is sparse or has an unknown dtype",
            "save dense tensors of dtype float64, float32, float16, bfloat16, int or bool",
        )
    dtype = torch_dtype(DTYPES[meta["dtype"]])
    (offset,) = _numbers([meta["storage_offset"]])
    view = View(offset, _numbers(meta["sizes"]), _numbers(meta["strides"]))
    region = archive.content(record)
    try:
        return strided(lambda: region, dtype, view, held=region.size, owner=(archive.path, record))
    except ValueError as error:
        raise damaged(archive.path, f"'{name}': {error}") from error


def _numbers(described: list[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return sizes that are written as {"as_int": n}; symbols have no place in stored tensors."""
    numbers = tuple(entry["as_int"] for entry in described)
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"sizes that are no numbers: {numbers}")
    return numbers


_CONTAINER = "exported program"
_FORMAT = "archive_format"  # the record whose folder is the archive's root
_OLD_STATES = ("serialized_state_dict.pt", "serialized_state_dict.json")  # before torch 2.8
_MOST_PICKLED = 100  # tensors that are archives of their own: of subclasses, which are rare
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError)


def read_exported(file: SourceFile, options: ReadOptions) -> Contents:
    """Read parameters and buffers under their own names, in the model's order.

    Constants are listed without values: they are part of the graph, not weights.
    """
    archive = open_archive(file.whole)
    old = [name for name in archive.entries if name in _OLD_STATES]
    if old:
        return Contents(_CONTAINER, zip_tree(archive.content(old[0]), options), (file,))
    roots = [name for name in archive.entries if name.endswith(_FORMAT)]
    if not roots:
        raise damaged(file.path, f"neither '{_FORMAT}' nor '{_OLD_STATES[0]}' is in it")
    root = roots[0].removesuffix(_FORMAT)
    check_byte_order(archive, root)
    models = [m.removesuffix(".json") for m in archive.under(f"{root}models/")]
    if not models:
        raise CheckpointError(
            f"{file.path}: a compiled package (.pt2) without an exported program in it",
            "save the program itself with torch.export.save, or the model's state dict",
        )
    programs = {name: _read_program(archive, root, name, options) for name in models}
    trees = {name: _tree(program) for name, program in programs.items()}
    if len(models) == 1:
        (name,) = models
        trees, programs = trees[name], {"": programs[name]}
    return Contents(_CONTAINER, trees, (file,), programs=programs)


def _tree(program: Program) -> dict[str, Any]:
    return {**program.weights, **dict.fromkeys(program.constants)}


def _read_program(archive: Archive, root: str, name: str, options: ReadOptions) -> Program:
    try:
        described = _json(archive, f"{root}models/{name}.json")
        graph_module = described["graph_module"]
        weights = _read_tensors(archive, f"{root}data/weights/", name, options)
        constants = _read_tensors(archive, f"{root}data/constants/", name, options)
        examples = _examples(archive, f"{root}data/sample_inputs/{name}.pt", options)
        ordered = {key: weights[key] for key in _model_order(graph_module, list(weights))}
        if not all(isinstance(tensor, StoredTensor) for tensor in ordered.values()):
            raise TypeError("a weight that is no tensor")
    except _MALFORMED as error:
        raise damaged(archive.path, reason_of(error)) from error
    held = {k: v if isinstance(v, StoredTensor) else None for k, v in constants.items()}
    return Program(graph_module, ordered, held, examples)


def _json(archive: Archive, record: str) -> Any:
    return decode_json(
        archive.read(record), Any, fail=lambda reason: damaged(archive.path, f"{record}: {reason}")
    )


def _read_tensors(archive: Archive, folder: str, model: str, options: ReadOptions) -> Tensors:
    """Return the tensors of a folder, which one JSON file describes (once it was a pickle)."""
    if f"{folder}{model}.pt" in archive.entries:
        tree = zip_tree(archive.content(f"{folder}{model}.pt"), options)
        if not isinstance(tree, Mapping):
            raise damaged(archive.path, f"'{folder}{model}.pt' is no mapping of names to tensors")
        return {str(name): tensor for name, tensor in tree.items()}
    kind = folder.rstrip("/").rpartition("/")[2]
    config = _json(archive, f"{folder}{model}_{kind}_config.json")["config"]
    archive.region.file.budget.take_tensors(len(config))
    payloads = {str(name): Payload.from_json(described) for name, described in config.items()}
    if sum(payload.is_pickled for payload in payloads.values()) > _MOST_PICKLED:
        raise ValueError(f"more than {_MOST_PICKLED:,} of its tensors are pickled")
    read_pickled = cache(lambda record: zip_tree(archive.content(record), options))
    return {
        name: read_payload(archive, folder, name, payload, read_pickled)
        for name, payload in payloads.items()
    }


def _examples(archive: Archive, record: str, options: ReadOptions) -> tuple[torch.Tensor, ...]:
    """Return the inputs that the program was exported with, where they are plain tensors."""
    if record not in archive.entries or not archive.entries[record].size:
        return ()
    region = archive.content(record)
    try:
        tensors = [
            tensor.within(region.size) for tensor in leaves(zip_tree(region, options), is_tensor)
        ]
        if any(t.problem for t in tensors) or sum(t.reads for t in tensors) > 2 * region.size:
            return ()
        return tuple(t.load() for t in tensors)
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
