"""Fields of option dataclasses that say what users may put into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, get_args

_KEY = "described"


@dataclass(frozen=True)
class Described:
    """An option in words: help, command line, configurations and reference follow from it."""

    name: str  # by which users call it
    help: str  # one sentence without its full stop
    values: str  # words it takes, or in capitals what stands for them; "" for a switch
    default: str  # in words; "" if there is none
    annotation: str  # of the field, without a None


def option(
    help_text: str,
    default: Any = None,
    *,
    values: str = "",
    unset: str = "",
    name: str = "",
    factory: Callable[[], Any] | None = None,
) -> Any:
    """Return a dataclass field that is an option; `unset` says what its default means."""
    metadata = {_KEY: (help_text, values, unset, name)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def words_in(choice: Any) -> str:
    """Return the words of a `Literal` as help shows them.

    >>> from typing import Literal
    >>> words_in(Literal["local", "ray"])
    'local|ray'
    """
    return "|".join(get_args(choice))


def name_of(own: Field[Any]) -> str:
    """Return the name by which users call a field."""
    return own.metadata[_KEY][3] or own.name if _KEY in own.metadata else own.name


def options_of(kind: type) -> Iterator[Described]:
    """Yield the options that a dataclass has among its fields."""
    for own in fields(kind):
        if _KEY in own.metadata:
            help_text, values, unset, _ = own.metadata[_KEY]
            annotation = str(own.type).removesuffix(" | None")
            default = unset or _in_words(own.default)
            yield Described(name_of(own), help_text, values, default, annotation)


def _in_words(default: Any) -> str:
    if any(default is nothing for nothing in (None, False, MISSING)) or default == ():
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)
