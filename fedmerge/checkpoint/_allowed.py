"""Import the globals that the user admits by name."""

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from fedmerge.errors import UsageError

Admitted: TypeAlias = tuple[Callable[..., Any], str]  # the object and the name files use for it


def import_globals(names: Sequence[str]) -> list[Callable[..., Any] | Admitted]:
    """Return each "package.Class" together with its name, as `safe_globals` takes them."""
    return [(_import(name), name) for name in names]


def _import(name: str) -> Callable[..., Any]:
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # renamed modules, e.g. numpy.core
                found: Any = importlib.import_module(".".join(parts[:cut]))
                for part in parts[cut:]:
                    found = getattr(found, part)
        except (ImportError, AttributeError, ValueError):
            continue
        if callable(found):
            return found  # type: ignore[no-any-return]
    raise UsageError(
        f"cannot import '{name}', which was to be allowed",
        "give it as the file names it, e.g. --allow-global argparse.Namespace",
    )
