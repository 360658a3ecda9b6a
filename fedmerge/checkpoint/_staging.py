"""Write files whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO


@dataclass(frozen=True)
class Staging:
    """Files being written under hidden names, next to where they belong."""

    _stack: ExitStack
    _files: dict[Path, tuple[Path, BinaryIO]] = field(default_factory=dict)

    def create(self, path: Path) -> BinaryIO:
        """Open a new hidden file that `commit` renames to `path`."""
        hidden = path.with_name(f".fedmerge-{secrets.token_hex(8)}.tmp")
        # "x" and no tempfile: the mode then follows the umask as for any other file.
        self._stack.callback(hidden.unlink, missing_ok=True)
        file = self._stack.enter_context(hidden.open("xb+"))
        self._files[path] = (hidden, file)
        return file

    @property
    def paths(self) -> tuple[Path, ...]:
        """What the files are going to be called, in the order in which they get their names."""
        return tuple(self._files)

    def finish(self, path: Path) -> None:
        """Put a file on disk and close it."""
        _, file = self._files[path]
        if not file.closed:
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def commit(self) -> None:
        """Put all files on disk, then give them their names, in the order of their creation."""
        for path in self._files:
            self.finish(path)
        for path, (hidden, _) in self._files.items():
            os.replace(hidden, path)  # noqa: PTH105 (atomic on every system, as its name says)
        for folder in {path.parent for path in self._files}:
            _sync_folder(folder)


@contextmanager
def staging() -> Iterator[Staging]:
    """Yield a `Staging` whose files disappear unless they are committed."""
    with ExitStack() as stack:
        yield Staging(stack)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
