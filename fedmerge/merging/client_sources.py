"""The clients of a merge: opened, named, brought to one set of tensor names, compared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from fedmerge.checkpoint import (
    Checkpoint,
    ModelFolder,
    ReadOptions,
    client_names,
    expand_paths,
    from_state_dict,
    model_folder,
    open_checkpoint,
)
from fedmerge.decoding import shortened
from fedmerge.errors import ArchitectureError, CheckpointError, UsageError
from fedmerge.user_code import state_of
from fedmerge.values.arrays import Array
from fedmerge.values.clients import Client, TensorInfo, name_difference
from fedmerge.values.wording import listed as shown

Source: TypeAlias = str | Path | Mapping[str, torch.Tensor] | torch.nn.Module
State: TypeAlias = Mapping[str, torch.Tensor]

_COMPARE_HINT = "all clients must share one architecture; compare them with `fedmerge inspect`"


def listed(clients: Any, argument: str = "clients") -> tuple[list[Source], list[str] | None]:
    """Return clients in a list, and their names where they have any."""
    if isinstance(clients, Mapping):
        named: dict[str, Any] = {str(name): value for name, value in clients.items()}
        if any(isinstance(value, torch.Tensor) for value in named.values()):
            return [named], None  # a single state dict
        return list(named.values()), list(named)
    if isinstance(clients, str | Path | torch.nn.Module):
        return [clients], None
    if not isinstance(clients, Iterable) or isinstance(clients, torch.Tensor):
        raise UsageError(
            f"`{argument}` is {type(clients).__name__}, expected paths, state dicts or modules"
        )
    return list(clients), None


def expand_sources(sources: Sequence[Source], *, least: int = 2) -> list[Path | State]:
    """Return one entry per client, folders and globs replaced by the files in them."""
    if isinstance(sources, str | Path | Mapping | torch.nn.Module):
        sources = [sources]
    expanded: list[Path | State] = []
    for source in sources:
        if isinstance(source, torch.nn.Module):
            expanded.append(state_of(source))
        elif isinstance(source, Mapping):
            expanded.append(source)
        elif isinstance(source, str | Path):
            expanded += expand_paths([source])
        else:
            raise UsageError(
                f"a client is {type(source).__name__}, expected a path, a state dict or a module"
            )
    if len(expanded) < least:
        raise UsageError(
            f"at least {least} clients are needed, got {len(expanded)}",
            "give two or more checkpoint files, a folder of them or a quoted glob",
        )
    return expanded


def paths_of(clients: Any) -> list[Path]:
    """Return the files among clients, which an output must not overwrite."""
    sources, _ = listed(clients)
    return [source for source in expand_sources(sources, least=0) if isinstance(source, Path)]


def first_folder(clients: Any) -> ModelFolder | None:
    """Return the folder with a config.json that the first client is, if it is one."""
    sources, _ = listed(clients)
    if not sources or not isinstance(sources[0], str | Path):
        return None
    first = next(iter(expand_sources(sources[:1], least=0)), None)
    return model_folder(first) if isinstance(first, Path) and first.is_dir() else None


def open_clients(
    sources: Sequence[Path | State], options: ReadOptions, names: Sequence[str] | None = None
) -> list[Checkpoint]:
    """Open every client; a state dict without a name is client-1, client-2, … by its place."""
    places = [
        Path(f"client-{number}") if isinstance(source, Mapping) else source
        for number, source in enumerate(sources, start=1)
    ]
    clients = [
        from_state_dict(source, name=name)
        if isinstance(source, Mapping)
        else open_checkpoint(source, options, name=name)
        for source, name in zip(sources, names or client_names(places), strict=True)
    ]
    _check_weights(clients)
    return clients


def open_base(source: Source, options: ReadOptions) -> Checkpoint:
    """Open the model that clients were fine-tuned from: one file or folder, or one in memory."""
    if not isinstance(source, str | Path | Mapping | torch.nn.Module):
        raise UsageError(
            f"`base` is {type(source).__name__}, expected a path, a state dict or a module"
        )
    found = expand_sources([source], least=0)
    if len(found) != 1:
        raise UsageError(
            f"`base` is {len(found)} files, expected one",
            "give one checkpoint, or one folder of it",
        )
    [own] = found
    name = "base" if isinstance(own, Mapping) else client_names([own])[0]
    return open_clients(found, options, [name])[0]


def _check_weights(clients: Sequence[Checkpoint]) -> None:
    first = clients[0]
    for client in clients[1:]:
        if client.weights != first.weights:
            raise CheckpointError(
                f"{client.name} gives {client.weights} weights, {first.name} {first.weights} ones",
                "choose one kind for all with `weights=raw` or `weights=ema`",
            )


def keep_matches(patterns: Sequence[str], client: Checkpoint) -> tuple[str, ...]:
    """Return the first client's tensors that the patterns of --keep name."""
    kept: dict[str, None] = {}
    for pattern in patterns:
        found = [
            client.aliases.get(name, name)
            for name in client.tensors
            if fnmatchcase(name, pattern) or fnmatchcase(client.output_name(name), pattern)
        ]
        if not found:
            raise UsageError(
                f"`keep={pattern!r}` names no tensor of {client.name}",
                "patterns match whole names, e.g. `keep='head.*'`; see `fedmerge inspect`",
            )
        kept.update(dict.fromkeys(found))
    return tuple(kept)


@dataclass(frozen=True)
class RenamedClient:
    """A client whose tensors are known by another client's names."""

    client: Client
    own_names: Mapping[str, str]  # name here → name in the client

    @property
    def name(self) -> str:
        """How messages and records call this client."""
        return self.client.name

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors under their new names."""
        return {name: self.client.tensors[own] for name, own in self.own_names.items()}

    @property
    def aliases(self) -> Mapping[str, str]:
        """The tied names among the new names."""
        renamed = {own: name for name, own in self.own_names.items()}
        return {renamed[alias]: renamed[name] for alias, name in self.client.aliases.items()}

    def read(self, name: str) -> Array:
        """Return one tensor by its new name."""
        return self.client.read(self.own_names[name])


def in_library_names(clients: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return folders under the first one's names where their library loads them into one model.

    Its versions call tensors by other names when they save, and read all of them.
    """
    first, *others = clients
    return [
        first,
        *(c if c.tensors.keys() == first.tensors.keys() else _like(c, first) for c in others),
    ]


def _like(client: Checkpoint, first: Checkpoint) -> Checkpoint:
    if model_folder(client.path) is None or model_folder(first.path) is None:
        return client
    from fedmerge.architecture.folder_config import library_names  # files do without

    own, wanted = library_names(client), library_names(first)
    if own is None or wanted is None or set(own.values()) != set(wanted.values()):
        return client
    by_model = {of_model: name for name, of_model in wanted.items()}
    names = {name: by_model[of_model] for name, of_model in own.items()}
    return client.with_names(names, first.prefix)


_NO_MATTER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # to shapes
_MOST_FIELDS = 3  # of config.json, that a hint names


@contextmanager
def naming_configs(clients: Sequence[Checkpoint]) -> Iterator[None]:
    """Say in what the config.json of clients differ where these do not fit together."""
    try:
        yield
    except ArchitectureError as error:
        fields = list(_different_fields(clients))
        if not fields:
            raise
        said = f"their config.json say {shown(fields, _MOST_FIELDS)}"
        raise ArchitectureError(error.problem, f"{said}; {error.hint}") from error


def _different_fields(clients: Sequence[Checkpoint]) -> Iterator[str]:
    """Yield fields in which any client's config.json differs from the first one's, with values."""
    folders = [model_folder(client.path) for client in clients]
    first, *others = [{} if folder is None else folder.config for folder in folders]
    for name, value in first.items():
        if name in _NO_MATTER or isinstance(value, Mapping):
            continue
        found = next((own[name] for own in others if own.get(name, value) != value), None)
        if found is not None:
            yield f"{name} {shortened(str(value))} and {shortened(str(found))}"


def pieces_of(client: Client, name: str, most: int) -> Iterator[torch.Tensor]:
    """Return a client's tensor as flat pieces of at most so many numbers, as they are stored."""
    if isinstance(client, RenamedClient):
        return pieces_of(client.client, client.own_names[name], most)
    if isinstance(client, Checkpoint):
        return client.pieces(name, most)
    return iter(torch.split(torch.from_numpy(client.read(name)).reshape(-1), most))


def align_names(clients: Sequence[Client], *, by_order: bool, keep: Sequence[str]) -> list[Client]:
    """Return the clients under the first one's tensor names, or say how the names differ.

    Tensors that the patterns `keep` name are the first client's and need no partner; nor do
    integer buffers.
    """
    first, *others = clients
    aligned = [first, *(_aligned(client, first, by_order, keep) for client in others)]
    for client in aligned[1:]:
        _check_ties(client, first)
    return aligned


def _aligned(client: Client, first: Client, by_order: bool, keep: Sequence[str]) -> Client:
    difference = name_difference(_merged_names(client, keep), _merged_names(first, keep))
    if difference is None:
        return client
    same_shapes = [i.shape for i in first.tensors.values()] == [
        i.shape for i in client.tensors.values()
    ]
    if same_shapes and by_order:
        return RenamedClient(client, dict(zip(first.tensors, client.tensors, strict=True)))
    raise ArchitectureError(
        f"{client.name}: {difference}, compared with {first.name}",
        "the shapes agree one by one: `match_by_order` pairs the tensors in stored order"
        if same_shapes
        else _COMPARE_HINT,
    )


def _merged_names(client: Client, keep: Sequence[str]) -> list[str]:
    """Return the names of the tensors that are matched and averaged."""
    return [
        name
        for name, info in client.tensors.items()
        if info.is_float and not any(fnmatchcase(name, pattern) for pattern in keep)
    ]


def _check_ties(client: Client, first: Client) -> None:
    """Refuse a client whose tied tensors differ from the first one's, unless their values agree."""
    for one, other in ((first, client), (client, first)):
        for alias, name in one.aliases.items():
            is_tied = alias not in other.tensors or other.aliases.get(alias) == name
            if not is_tied and not np.array_equal(other.read(alias), other.read(name)):
                raise ArchitectureError(
                    f"'{alias}' is tied to '{name}' in {one.name}, but not in {other.name}",
                    _COMPARE_HINT,
                )


def check_dtypes(clients: Sequence[Client], names: Collection[str]) -> None:
    """Refuse clients that store the same tensor in different dtypes."""
    first, *others = clients
    for client in others:
        for name in names:
            found, expected = client.tensors[name].dtype, first.tensors[name].dtype
            if found != expected:
                raise ArchitectureError(
                    f"{client.name}: '{name}' is {found}, expected {expected} as in {first.name}",
                    "say which dtype the result shall have with `dtype`",
                )


def check_shapes(clients: Sequence[Client], kept: Collection[str]) -> None:
    """Refuse clients whose tensors can't be averaged place by place."""
    first, *others = clients
    for client in others:
        for name, expected in first.tensors.items():
            if not expected.is_float or name in kept:
                continue
            found = client.tensors[name]
            if found.shape != expected.shape:
                raise ArchitectureError(
                    f"{client.name}: '{name}' is {_shape(found)}, expected {_shape(expected)} as "
                    f"in {first.name}: an element-wise average needs equal shapes",
                    "use `method=fedma`, which merges nets of different widths",
                )


def first_difference(client: Client, first: Client) -> str | None:
    """Return the first difference in names, shapes or dtypes between two clients, in words."""
    difference = name_difference(client.tensors, first.tensors)
    if difference is not None:
        return f"{difference}, compared with {first.name}"
    for name, expected in first.tensors.items():
        found = client.tensors[name]
        if found.shape != expected.shape:
            return f"'{name}' is {_shape(found)}, in {first.name} {_shape(expected)}"
        if found.dtype != expected.dtype:
            return f"'{name}' is {found.dtype}, in {first.name} {expected.dtype}"
    return None


def _shape(info: TensorInfo) -> str:
    return "×".join(map(str, info.shape)) or "a scalar"
