"""Options of probes: the inputs on which clients are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from fedmerge.errors import UsageError
from fedmerge.values.option_fields import (
    Rule,
    check_options,
    each,
    number,
    one_of,
    option,
    whole,
    words_in,
)

if TYPE_CHECKING:
    from fedmerge.training import Preparation
    from fedmerge.training.samples import Data

IN_MEMORY = "in memory"  # what a record calls data that are no file

Source: TypeAlias = Literal["noise", "synthetic", "none"]
Change: TypeAlias = Literal["none", "views", "flips", "mixtures", "pastes"]

CHANGES: tuple[str, ...] = get_args(Change)  # of probes

DEFAULT_COUNT = 1000
FEWEST, MOST = 10, 100_000  # probes; all are made at once
LARGEST = 1e6  # of noise: squares of what nets make of it are finite
_STANDARD = ((0.0,), (1.0,))  # mean and deviation of noise


@dataclass(frozen=True)
class ProbeOptions:
    """Inputs on which clients are compared; None leaves the choice to fedmerge."""

    source: Source | None = option(
        "Inputs on which units are compared: noise, made from the clients, or none, for weights "
        "alone",
        values=words_in(Source),
        unset="synthetic; noise for costly models",
        name="probe",
    )
    data: Data | None = option(
        "Real inputs as probes, without labels: x in .npz, .pt or .safetensors",
        values="FILE",
        name="probe_data",
    )
    count: int | None = option(
        f"How many probes, {FEWEST} to {MOST:,}",
        values="N",
        unset=f"up to {DEFAULT_COUNT:,}",
        name="probe_count",
    )
    mean: tuple[float, ...] = option(
        "Mean of noise, one number or one per channel",
        _STANDARD[0],
        values="X,X,…",
        unset="0",
        name="probe_mean",
    )
    std: tuple[float, ...] = option(
        "Deviation of noise, one number or one per channel",
        _STANDARD[1],
        values="X,X,…",
        unset="1",
        name="probe_std",
    )
    augment: tuple[str, ...] = option(
        "How probes are changed to refine and to judge merges; repeatable",
        (),
        values=words_in(Change),
        unset="what suits the input",
    )
    preparation: Preparation | None = None  # of the file's arrays

    def __post_init__(self) -> None:
        for name in ("mean", "std"):  # one number for all channels
            value = getattr(self, name)
            if isinstance(value, int | float):
                object.__setattr__(self, name, (float(value),))
        check_options(self, _RULES)
        if self.data is not None and self.source is not None:
            raise UsageError("`probe_data` and `probe` exclude each other")
        if self.data is not None and (self.mean, self.std) != _STANDARD:
            raise UsageError("`probe_mean` and `probe_std` are for noise, not for `probe_data`")
        if self.source == "none" and self.asked_for:
            raise UsageError("`probe=none` takes no other options of probes")

    @property
    def asked_for(self) -> tuple[str, ...]:
        """What the user said, as messages name it, that needs a model which can be run."""
        said = {
            "`probe`": self.source not in (None, "none"),
            "`probe_data`": self.data is not None,
            "`probe_count`": self.count is not None,
            "`probe_mean`": self.mean != _STANDARD[0],
            "`probe_std`": self.std != _STANDARD[1],
            "`augment`": bool(self.augment),
        }
        return tuple(name for name, is_said in said.items() if is_said)

    def to_json(self) -> dict[str, Any]:
        """Return the options as the merge record keeps them, files without their folders."""
        prepared = None if self.preparation is None else vars(self.preparation)
        file = None if self.data is None else IN_MEMORY
        if isinstance(self.data, str | Path):
            file = Path(self.data).name
        return {**vars(self), "data": file, "augment": list(self.augment), "preparation": prepared}


def _is_deviation(value: Any) -> bool:
    return number(0, LARGEST)(value) and value > 0


_RULES: Mapping[str, Rule] = {
    "source": one_of(*get_args(Source)),
    "augment": (each(lambda name: name in CHANGES), f"some of {', '.join(CHANGES)}"),
    "count": (whole(FEWEST, MOST), f"a whole number from {FEWEST} to {MOST:,}"),
    "mean": (each(number(-LARGEST, LARGEST)), f"finite numbers, at most {LARGEST:,.0f}"),
    "std": (each(_is_deviation), f"finite numbers above 0, at most {LARGEST:,.0f}"),
}
