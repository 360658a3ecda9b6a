"""Write files whole or not at all, and never over a file that nobody gave away."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fedmerge.checkpoint._leftovers import claim_names, hidden_name, sweep
from fedmerge.checkpoint._locks import LockFile
from fedmerge.errors import CheckpointError, UsageError

_LOCK = ".fedmerge.lock"  # in the folder of outputs, while they get their names
_PATIENCE = 60.0  # seconds for other runs to give theirs
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Staging:
    """Files being written under hidden names, next to where they belong."""

    _stack: ExitStack
    _files: dict[Path, tuple[Path, BinaryIO]] = field(default_factory=dict)
    _claims: dict[Path, LockFile] = field(default_factory=dict)  # by folder

    def create(self, path: Path) -> BinaryIO:
        """Open a new hidden file that `commit` gives the name `path`."""
        if path.parent not in self._claims:
            sweep(path.parent)
            claim = self._claims[path.parent] = claim_names(path.parent)
            self._stack.callback(claim.release)
        hidden = hidden_name(self._claims[path.parent], len(self._files))
        # "x" and no tempfile: the mode then follows the umask as for any other file.
        self._stack.callback(hidden.unlink, missing_ok=True)
        file = self._stack.enter_context(hidden.open("xb+"))
        self._files[path] = (hidden, file)
        return file

    @property
    def paths(self) -> tuple[Path, ...]:
        """What the files are going to be called, in the order of their creation."""
        return tuple(self._files)

    def finish(self, path: Path) -> None:
        """Put a file on disk and close it."""
        _, file = self._files[path]
        if not file.closed:
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def commit(
        self,
        *,
        force: bool,
        again: bool = False,
        order: Sequence[Path] | None = None,
        gone: Sequence[Path] = (),
    ) -> None:
        """Put all files on disk, then give them their names, in order (default: of creation).

        If a name can't be given, nothing is changed. Without `force`, one that was taken meanwhile
        can't; `again`: a file with the same content is taken for this one, written before. With
        it, old files are replaced, and those that shall be `gone` removed before.
        """
        order = self.paths if order is None else order
        assert sorted(order) == sorted(self._files)
        for path in order:
            self.finish(path)
        if force:
            self._replace(order, gone)
        else:
            self._give_new_names(order, again=again)
        for folder in {path.parent for path in order}:
            _sync_folder(folder)

    def _replace(self, order: Sequence[Path], gone: Sequence[Path]) -> None:
        kept = self._kept(list(dict.fromkeys([*order, *gone])))
        try:
            for path in gone:
                path.unlink(missing_ok=True)
            for path in order:
                os.replace(self._files[path][0], path)  # noqa: PTH105 (atomic on every system)
        except BaseException:
            for path, old in kept.items():
                _restore(path, old)
            raise

    def _kept(self, paths: Sequence[Path]) -> dict[Path, Path]:
        """Give old files hidden names, too, as far as there are hard links.

        So nothing is lost if the new ones can't be named, and each takes its place at once: what a
        replaced file filled is set free later.
        """
        kept: dict[Path, Path] = {}
        for number, path in enumerate(paths, start=len(self._files)):
            hidden = hidden_name(self._claims[path.parent], number)
            self._stack.callback(hidden.unlink, missing_ok=True)
            with suppress(OSError):
                os.link(path, hidden)
                kept[path] = hidden
        return kept

    def _give_new_names(self, order: Sequence[Path], *, again: bool) -> None:
        given: list[Path] = []
        try:
            for path in order:
                hidden, _ = self._files[path]
                if _give_new_name(hidden, path):
                    given.append(path)
                elif not (again and _is_same(hidden, path)):
                    raise UsageError(
                        f"{path}: exists already, it was written meanwhile",
                        "overwrite it with --force, or choose another name",
                    )
        except BaseException:
            for path in reversed(given):
                path.unlink(missing_ok=True)
            raise


@contextmanager
def staging() -> Iterator[Staging]:
    """Yield a `Staging` whose files disappear unless they are committed."""
    with ExitStack() as stack:
        yield Staging(stack)


@contextmanager
def naming_alone(folder: Path) -> Iterator[None]:
    """Let no other run give names in a folder meanwhile, so that files of two never mix."""
    lock = LockFile.take(folder / _LOCK, patience=_PATIENCE)
    if lock is None:
        raise CheckpointError(f"{folder}: another run has been writing here for {_PATIENCE:g} s")
    try:
        yield
    finally:
        lock.release()


def _give_new_name(hidden: Path, path: Path) -> bool:
    """Give a file a name that nobody has; return whether that was so.

    The hidden name may stay beside it.
    """
    try:
        os.link(hidden, path)  # unlike a rename, it never replaces
    except FileExistsError:
        return False
    except OSError:  # no hard links here: between the question and the rename others might come
        if path.exists() or path.is_symlink():
            return False
        hidden.rename(path)
    return True


def _restore(path: Path, old: Path) -> None:
    """Give a name back to the old file that had it."""
    if not path.exists():
        os.link(old, path)
    elif not path.samefile(old):
        os.replace(old, path)  # noqa: PTH105


def _is_same(one: Path, other: Path) -> bool:
    """Return whether two files have the same content."""
    with one.open("rb") as first, other.open("rb") as second:
        while True:
            left, right = first.read(_CHUNK), second.read(_CHUNK)
            if left != right or not left:
                return left == right


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # folders cannot be opened there
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
