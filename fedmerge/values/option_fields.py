"""Options as fields of dataclasses, and what they and arguments may be.

A field says in words what users may put into it. Rules go by its name, else by its annotation.

Whatever a user gives is checked before it is used: what is wrong with it is an error of ours that
names it, never a TypeError from the depths.
"""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args

from fedmerge.errors import UsageError

Check: TypeAlias = Callable[[Any], bool]
Rule: TypeAlias = tuple[Check, str]  # and what is expected, for messages
Function = TypeVar("Function", bound=Callable[..., Any])

Options = TypeVar("Options")

_LEAST_LIKENESS = 0.6  # of a wrong name and the option that it may stand for
MOST_SEED = 2**63 - 1
LARGEST = 1e100  # of any number: sums and squares of such numbers stay finite


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


def changed(options: Options, changes: Mapping[str, Any], also: Iterable[str] = ()) -> Options:
    """Return options with some fields changed; a name that is no field is refused."""
    check_names(type(options), changes, also=also)
    return replace(options, **changes)  # type: ignore[type-var]


def check_names(kind: Any, names: Iterable[str], also: Iterable[str] = ()) -> None:
    """Refuse a name that is no field of a dataclass of options, nor of `also`."""
    known = [*(field.name for field in fields(kind)), *also]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=_LEAST_LIKENESS)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no option `{name}`", hint)


def number(low: float, high: float = LARGEST) -> Check:
    """Return whether a value is a number in a range, both ends included."""

    def check(value: Any) -> bool:
        return isinstance(value, int | float) and type(value) is not bool and low <= value <= high

    return check


def positive(value: Any) -> bool:
    """Return whether a value is a number above 0."""
    return number(0)(value) and value > 0


def whole(low: int, high: float = LARGEST) -> Check:
    """Return whether a value is a whole number in a range, both ends included."""
    return lambda value: type(value) is int and low <= value <= high


def from_one() -> Rule:
    """Return the rule that a value is a whole number from 1."""
    return whole(1), "a whole number from 1"


def seed_rule() -> Rule:
    """Return the rule that a value is a seed, which torch takes in 63 bits."""
    return whole(0, MOST_SEED), f"a whole number from 0 to {MOST_SEED:,}"


def one_of(*choices: str) -> Rule:
    """Return the rule that a value is one of these words."""
    return lambda value: isinstance(value, str) and value in choices, _any_of(choices)


def each(check: Check) -> Check:
    """Return whether a value is a list or a tuple of what a check allows."""
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def check_options(options: Any, rules: Mapping[str, Rule] | None = None) -> None:
    """Refuse the first field that breaks its rule, or has none and is not as it is annotated.

    A field may be None where that is its default.
    """
    for own in fields(options):
        value = getattr(options, own.name)
        rule = (rules or {}).get(own.name) or rule_of(str(own.type))
        if value is not None or own.default is not None:
            check_value(name_of(own), value, rule)


def check_value(name: str, value: Any, rule: Rule) -> None:
    """Refuse a value that breaks a rule."""
    is_valid, expected = rule
    if not is_valid(value):
        raise UsageError(f"`{name}` is {_shown(value)}, expected {expected}")


def checked(function: Function) -> Function:
    """Return a function of the API that refuses arguments that are not as they are annotated."""
    parameters = signature(function).parameters.values()
    names = [own.name for own in parameters if own.kind is Parameter.POSITIONAL_OR_KEYWORD]
    annotations = {own.name: str(own.annotation) for own in parameters}

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        for name, value in {**dict(zip(names, arguments, strict=False)), **options}.items():
            if name in annotations:
                check_value(name, value, rule_of(annotations[name]))
        return function(*arguments, **options)

    return call  # type: ignore[return-value]


@cache
def rule_of(annotation: str) -> Rule:
    """Return the rule that an annotation stands for; what only other code can tell, it allows.

    >>> is_valid, expected = rule_of("Sequence[str | Path] | None")
    >>> is_valid(["a.pt"]), is_valid("a.pt"), is_valid([3]), expected
    (True, False, False, 'a list of paths or None')
    """
    nodes = {ast.unparse(n): n for n in _alternatives(ast.parse(annotation, mode="eval").body)}
    if "Path" in nodes:  # text is one, but not every text
        nodes.pop("str", None)
    parts = [_rule_of(node) for node in nodes.values()]
    words = dict.fromkeys(expected for _, expected in parts)
    return lambda value: any(check(value) for check, _ in parts), _any_of(list(words))


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return [node]


def _rule_of(node: ast.expr) -> Rule:
    if isinstance(node, ast.Subscript):
        return _PARTED.get(ast.unparse(node.value), _of_any)(node.slice)
    return _RULES.get(ast.unparse(node), _ANYTHING)


def _of_any(inner: ast.expr) -> Rule:
    return _ANYTHING


def _sequence(inner: ast.expr) -> Rule:
    kind = inner.elts[0] if isinstance(inner, ast.Tuple) else inner  # tuple[str, ...]
    check, expected = rule_of(ast.unparse(kind))
    return each(check), f"a list of {_MANY.get(expected, expected)}"


def _function(inner: ast.expr) -> Rule:
    return _FUNCTION


def _kind(name: str) -> Rule:
    """Return the rule that a value is of a class, which need not be imported to be compared."""
    return (
        lambda value: any(base.__name__ == name for base in type(value).__mro__),
        f"{'an' if name[0] in 'AEIOU' else 'a'} {name}",
    )


def _any_of(words: Sequence[str]) -> str:
    """Return a choice in words: a, b or c."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def is_path(value: Any) -> bool:
    """Return whether a value can be a path: a name that this system can write."""
    if not isinstance(value, str | Path):
        return False
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


_SHORT = 60  # characters of a value in a message


def _shown(value: Any) -> str:
    """Return a value in a message if that is short, else its type."""
    is_plain = value is None or isinstance(value, str | bytes | int | float | tuple | list | dict)
    text = repr(value) if is_plain else ""
    return text if text and len(text) <= _SHORT and "\n" not in text else type(value).__name__


_ANYTHING: Rule = (lambda value: True, "")
_FUNCTION: Rule = (callable, "a function")
_OPTIONS = (
    *("EvaluationOptions", "ImageOptions", "MatchOptions", "PartitionOptions", "Plan"),
    *("Preparation", "ProbeOptions", "ReadOptions", "RetrainOptions", "RetryPolicy"),
    *("Running", "TrainSettings"),
)
_RULES: Mapping[str, Rule] = {
    "None": (lambda value: value is None, "None"),
    "bool": (lambda value: type(value) is bool, "True or False"),
    "int": (lambda value: type(value) is int, "a whole number"),
    "float": (number(-LARGEST), "a number"),
    "str": (lambda value: isinstance(value, str), "text"),
    "Path": (is_path, "a path"),
    "Progress": _FUNCTION,
    "HearEvent": _FUNCTION,
    **{name: _kind(name) for name in _OPTIONS},
}
_PARTED: Mapping[str, Callable[[ast.expr], Rule]] = {  # by what stands before the bracket
    "Sequence": _sequence,
    "tuple": _sequence,
    "Callable": _function,
}
_MANY: Mapping[str, str] = {
    "a path": "paths",
    "text": "texts",
    "a number": "numbers",
    "a whole number": "whole numbers",
}
