"""What every container reader returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedmerge.checkpoint._files import SourceFile
from fedmerge.types.programs import Program


@dataclass(frozen=True)
class ReadOptions:
    """What to take from a container that holds more than one state dict, and whom to trust."""

    key: str | None = None  # dotted path of the state dict, e.g. "nets.G"; "." is the top level
    weights: Literal["raw", "ema"] | None = None  # None: raw if there, else the EMA copy
    allow_globals: tuple[str, ...] = ()  # "package.Class", whose objects are kept, inert


@dataclass(frozen=True)
class Contents:
    """A container's object tree; its leaves of interest are tensors, loaded or described."""

    container: str
    tree: object
    files: tuple[SourceFile, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, Program] = field(default_factory=dict)  # by their weights' location

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)
