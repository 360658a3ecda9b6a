"""The model that clients were fine-tuned from: checked, and what they changed of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from fedmerge.checkpoint import Checkpoint
from fedmerge.errors import ArchitectureError, UsageError
from fedmerge.merging.averages import PIECE
from fedmerge.merging.client_sources import in_library_names, pieces_of
from fedmerge.merging.options import MATCHES, RecordedOptions
from fedmerge.values.clients import Client
from fedmerge.values.wording import count, listed, percent

LARGEST_CHANGE = 1.0  # length of a client's change ÷ the base's, from which on it is no fine-tune
FEWEST = 0.5  # of the clients' numbers, that a base has to have
MOST_NAMES = 3  # tensors that a warning names


@dataclass(frozen=True)
class Base:
    """A base model under the first client's tensor names, and how its fine-tunes differ from it."""

    checkpoint: Checkpoint
    missing: tuple[str, ...]  # the clients' float tensors that it does not have in their shapes
    changes: tuple[float, ...]  # length of each client's change ÷ the base's length, of matrices
    idle: frozenset[int]  # the clients that changed no number at all
    cosine: float | None  # between two clients' changes, in the mean
    partial: float  # share of the changed numbers that some clients left as they were

    @property
    def name(self) -> str:
        """How messages and the record call it."""
        return self.checkpoint.name

    def has(self, name: str) -> bool:
        """Return whether the clients' tensor of this name goes back to the base."""
        return name in self.checkpoint.tensors and name not in self.missing

    def warnings(self, clients: Sequence[Client]) -> Iterator[str]:
        """Say what of the clients does not go back to the base, and who changed nothing."""
        if self.missing:
            named = listed([f"'{name}'" for name in self.missing], MOST_NAMES)
            yield f"{self.name} has no {named} as the clients have: their mean is taken"
        for number in sorted(self.idle):
            yield (
                f"{clients[number].name} is {self.name} itself: it changes nothing, but counts in "
                "the mean; leave it out"
            )

    def lines(self, clients: Sequence[Client]) -> Iterator[str]:
        """Say in words how the clients differ from the base."""
        sizes = [
            f"{client.name} by {percent(change)}"
            for client, change in zip(clients, self.changes, strict=True)
        ]
        yield f"changes of {self.name}, by length: {listed(sizes, MOST_NAMES)}"
        if self.cosine is not None:
            yield f"cosine of two clients' changes: {self.cosine:.2f}"
        if self.partial:
            yield f"numbers that only some clients changed: {percent(self.partial)}"

    def to_json(self, clients: Sequence[Client], *, scale: float | None) -> dict[str, object]:
        """Return what a script wants to know of it."""
        changes = dict(zip((client.name for client in clients), self.changes, strict=True))
        return {
            "name": self.name,
            "changes": changes,
            "cosine": self.cosine,
            "partial": self.partial,
            "missing": list(self.missing),
            "scale": scale,
        }


def base_of(
    checkpoint: Checkpoint, clients: Sequence[Client], first: Checkpoint, names: Sequence[str]
) -> Base:
    """Return a base with what clients changed of it; refuse one that they are no fine-tunes of.

    `clients` are under the names of the first one, which is given as it is, too; `names` are the
    float tensors that are merged.
    """
    named = _with_prefix(in_library_names([first, checkpoint])[1], first)
    missing = tuple(name for name in names if not _is_alike(named, first, name))
    _check_overlap(named, first, names, missing)
    found = [name for name in names if name not in missing]
    change = _measured(named, clients, found)
    sizes = change.products.diagonal().clamp_min(0).sqrt()
    lengths = (sizes / max(change.square, torch.finfo(torch.float64).tiny) ** 0.5).tolist()
    for client, length in zip(clients, lengths, strict=True):
        if not length < LARGEST_CHANGE:
            raise ArchitectureError(
                f"{client.name} is no fine-tune of {named.name}: its weights differ from these by "
                f"{length:.2f} times their length, expected less than {LARGEST_CHANGE:g}",
                "leave `base` out, or give the model that the clients began as",
            )
    idle = frozenset(range(len(clients))) - change.busy
    cosine = _mean_cosine(change.products)
    return Base(named, missing, tuple(lengths), idle, cosine, change.partial)


def _with_prefix(base: Checkpoint, first: Checkpoint) -> Checkpoint:
    """Return a base whose tensors lie within the clients' under a prefix, by the clients' names.

    So it is where a head was put on a bare model: `bert.encoder…` beside `encoder…`.
    """
    if not base.tensors or any(name in first.tensors for name in base.tensors):
        return base
    some = next(iter(base.tensors))
    own = next((name for name in first.tensors if name.endswith(f".{some}")), None)
    if own is None:
        return base
    prefix = own.removesuffix(some)
    return base.with_names({name: prefix + name for name in base.tensors}, base.prefix)


def _is_alike(base: Checkpoint, first: Checkpoint, name: str) -> bool:
    found = base.tensors.get(name)
    return found is not None and found.is_float and found.shape == first.tensors[name].shape


def _check_overlap(
    base: Checkpoint, first: Checkpoint, names: Sequence[str], missing: Sequence[str]
) -> None:
    """Refuse a base that has less than half of what is merged."""
    sizes = {name: first.tensors[name].size for name in names}
    lacking = sum(sizes[name] for name in missing)
    if lacking <= (1 - FEWEST) * sum(sizes.values()):
        return
    name = missing[0]
    own = base.tensors.get(name)
    what = "no such tensor" if own is None else f"shape {own.shape}"
    raise ArchitectureError(
        f"{base.name}: is no base of {first.name}: {count(len(missing))} of {count(len(names))} "
        f"tensors are not in it as there ('{name}': {what})",
        "give the model that the clients were fine-tuned from, as the same kind of file; compare "
        "them with `fedmerge inspect`",
    )


@dataclass
class _Change:
    """Sums over what clients changed.

    Lengths are those of matrices and kernels alone: scales of norms are near 1 in every net.
    """

    products: Tensor  # (clients, clients), of their changes
    square: float = 0.0  # of the base
    changed: int = 0  # numbers that any client changed
    partly: int = 0  # that some client left as it was
    busy: set[int] = field(default_factory=set)  # the clients that changed any

    @property
    def partial(self) -> float:
        return self.partly / self.changed if self.changed else 0.0


def _measured(base: Checkpoint, clients: Sequence[Client], names: Sequence[str]) -> _Change:
    """Read all tensors once, piece by piece."""
    found = _Change(torch.zeros(len(clients), len(clients), dtype=torch.float64))
    has_matrices = any(len(base.tensors[name].shape) > 1 for name in names)
    for name in names:
        for origin, *parts in zip(
            *(pieces_of(model, name, PIECE) for model in (base, *clients)), strict=True
        ):
            start = origin.double()
            changes = torch.stack([part.double() - start for part in parts])
            moved = changes != 0
            if len(base.tensors[name].shape) > 1 or not has_matrices:
                found.products += changes @ changes.T
                found.square += float(start @ start)
            found.busy.update(torch.nonzero(moved.any(1)).flatten().tolist())
            found.changed += int(moved.any(0).sum())
            found.partly += int((moved.any(0) & ~moved.all(0)).sum())
    return found


def _mean_cosine(products: Tensor) -> float | None:
    """Return the mean cosine of two clients' changes; None where any changed nothing."""
    lengths = products.diagonal().sqrt()
    if len(lengths) < 2 or not bool((lengths > 0).all()):
        return None
    cosines: list[list[float]] = (products / torch.outer(lengths, lengths)).tolist()
    pairs = [cosines[i][j] for i, j in combinations(range(len(lengths)), 2)]
    return sum(pairs) / len(pairs)


def check_base_options(options: RecordedOptions, *, has_base: bool) -> None:
    """Refuse options that say nothing without a base model, or with one."""
    if not has_base:
        if options.scale is not None:
            raise UsageError("`scale` says nothing without `base`", "give the base model, too")
        return
    said = [name for name in MATCHES if getattr(options, name) is not None]
    if options.method in ("ensemble", "ot"):
        said.append(f"method={options.method}")
    if options.merge_units == "fit":
        said.append("merge_units=fit")
    if options.max_growth not in (None, 1):
        said.append("max_growth")
    if said:
        raise UsageError(
            f"`{said[0]}` and `base` exclude each other",
            "with a base model, what its fine-tunes changed is merged place by place; leave one "
            "of the two out",
        )
