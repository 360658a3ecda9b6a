"""The user's own code by name: `package.module:name` or `file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from fedmerge.errors import FedmergeError, TrainingCodeError, UsageError, UserCodeError
from fedmerge.tracebacks import from_users
from fedmerge.user_code import user_code


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
    with loaded(place, error=TrainingCodeError, hint=f"it should define the {what}") as code:
        found = attribute_of(code, name, error=TrainingCodeError)
    if found is None:
        raise UsageError(f"'{place}' defines no '{name}'", f"it should be the {what}")
    return found


def attribute_of(code: ModuleType, name: str, *, error: type[UserCodeError]) -> object:
    """Return what a dotted name stands for in the user's code, None if there is nothing."""
    found: object = code
    with user_code(f"'{name}' can't be looked up", error=error):
        for part in name.split("."):
            found = getattr(found, part, None)
    return found


@contextmanager
def loaded(place: str, *, error: type[UserCodeError], hint: str) -> Iterator[ModuleType]:
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


def _import_module(name: str, error: type[UserCodeError], hint: str) -> ModuleType:
    with user_code(f"'{name}' cannot be imported", error=error, hint=hint):
        code = importlib.import_module(name)
    from_users(_home_of(name.partition(".")[0]))
    return code


def _home_of(package: str) -> Path:
    """Return the folder of a package that was imported, or the file of a single module."""
    file = Path(sys.modules[package].__file__ or Path.cwd())
    return file.parent if file.name == "__init__.py" else file


def _run_file(path: Path, error: type[UserCodeError]) -> ModuleType:
    from_users(path.resolve().parent)
    name = f"fedmerge_user_{path.stem}_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[name] = code  # dataclasses and pickling look their module up
    hint = "the file runs as a module: keep training code under `if __name__ == '__main__'`"
    try:
        with user_code(f"'{path}' cannot be loaded", error=error, hint=hint):
            spec.loader.exec_module(code)
    except FedmergeError:
        del sys.modules[name]
        raise
    return code
