"""The zip archives that torch writes: their records, measured against the file."""

import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedmerge.checkpoint._failures import damaged, reason_of
from fedmerge.checkpoint._files import Region
from fedmerge.checkpoint._zip import DEFLATED, STORED, Entry, content_region, read_directory
from fedmerge.decoding import shortened
from fedmerge.errors import CheckpointError

_RESAVE = "save it again with a current torch"


@dataclass(frozen=True)
class Archive:
    """A zip file, or one inside another, whose records are stored as they are, each once."""

    region: Region
    entries: Mapping[str, Entry]  # by name
    _contents: dict[str, Region] = field(repr=False, default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.region.file.path

    def content(self, name: str) -> Region:
        """Return where a record's bytes lie, always the same region, so that it is checked once."""
        if name not in self.entries:
            raise damaged(self.path, f"its record '{name}' is missing")
        if name not in self._contents:
            self._contents[name] = content_region(self.region, self.entries[name])
        return self._contents[name]

    def read(self, name: str) -> bytes:
        """Return a record's bytes, which must agree with their checksum."""
        region = self.content(name)
        content = region.read()
        region.check(memoryview(content))
        return content

    def text(self, name: str, most: int) -> str:
        """Return at most so many bytes of a text; torch compresses code."""
        content = self.content(name).read()
        if self.entries[name].method == DEFLATED:
            try:
                content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, most)
            except zlib.error as error:
                raise damaged(self.path, f"its record '{name}': {reason_of(error)}") from error
        return content[:most].decode("utf-8", "replace")

    def under(self, folder: str) -> list[str]:
        """Return the names of the records below a folder, without it."""
        return [name.removeprefix(folder) for name in self.entries if name.startswith(folder)]


def open_archive(region: Region, *, compressed: str = "") -> Archive:
    """Read the directory of a zip file and refuse what its size contradicts.

    Only records with `compressed` in their names may be so (default: none).
    """
    path, entries = region.file.path, read_directory(region)
    twice = [name for name, count in Counter(e.name for e in entries).items() if count > 1]
    if twice:
        raise damaged(path, f"it holds the record '{twice[0]}' more than once")
    for entry in entries:
        is_plain = entry.method == STORED and entry.stored_size == entry.size
        is_plain |= bool(compressed) and compressed in entry.name and entry.method == DEFLATED
        if not is_plain or entry.is_encrypted:
            raise CheckpointError(
                f"{path}: its record '{shortened(entry.name)}' is compressed or encrypted, "
                "which torch never writes",
                _RESAVE,
            )
    if sum(entry.stored_size for entry in entries) > region.size:
        raise damaged(path, "its records claim more bytes than the file has")
    return Archive(region, {entry.name: entry for entry in entries})
