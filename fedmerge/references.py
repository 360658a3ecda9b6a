"""The user's own code by name: `package.module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fedmerge.errors import FedmergeError, TrainingError, UsageError


def is_reference(text: str) -> bool:
    """Whether a text is `place:name` rather than a path.

    >>> is_reference("my_data.py:load"), is_reference("shards/c1.npz"), is_reference("C:/c1.npz")
    (True, False, False)
    """
    place, separator, name = text.rpartition(":")
    return bool(place) and bool(separator) and name.replace(".", "").isidentifier()


def find_object(reference: str, *, what: str) -> object:
    """Return the object that a reference names; this runs the user's code.

    `what` says in messages what the object should be, e.g. "task".
    """
    if not is_reference(reference):
        raise UsageError(
            f"'{reference}' names no {what}", "give package.module:name or file.py:name"
        )
    place, _, name = reference.rpartition(":")
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise UsageError(f"'{place}': there is no such file", f"it should define the {what}")
    with loaded(place, error=TrainingError, hint=f"it should define the {what}") as code:
        target: object = code
    for part in name.split("."):
        if not hasattr(target, part):
            raise UsageError(f"'{place}' defines no '{name}'", f"it should be the {what}")
        target = getattr(target, part)
    return target


@contextmanager
def loaded(place: str, *, error: type[FedmergeError], hint: str) -> Iterator[ModuleType]:
    """Run a file (`.py`) or import a module, and keep its surroundings importable for a while.

    These are the file's folder, or the current one for a module. What fails is an `error`.
    """
    path = Path(place).expanduser()
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise error(f"'{path}': there is no such file", hint)
    with _importable(path.resolve().parent if is_file else Path.cwd()):
        yield _run_file(path, error) if is_file else _import_module(place, error, hint)


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put a folder first on the import path for a while."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _import_module(name: str, error: type[FedmergeError], hint: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as reason:
        message = f"'{name}' cannot be imported: {type(reason).__name__}: {reason}"
        raise error(message, hint) from reason


def _run_file(path: Path, error: type[FedmergeError]) -> ModuleType:
    name = f"fedmerge_user_{path.stem}_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[name] = code  # dataclasses and pickling look their module up
    try:
        spec.loader.exec_module(code)
    except (Exception, SystemExit) as reason:
        del sys.modules[name]
        raise error(
            f"'{path}' cannot be loaded: {type(reason).__name__}: {reason}",
            "the file runs as a module: keep training code under `if __name__ == '__main__'`",
        ) from reason
    return code
