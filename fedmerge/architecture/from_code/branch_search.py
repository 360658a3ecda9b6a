"""The ways through a model that decides by data, and inputs that take them."""

from __future__ import annotations

import dis
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fedmerge.architecture.from_code.branches import (
    OTHER_DATA,
    Answers,
    Departure,
    Key,
    Kind,
    Leaving,
    Telling,
    answering,
    watched,
)
from fedmerge.architecture.from_code.dependence import Dependence
from fedmerge.architecture.from_code.dispatch import (
    EagerMode,
    eagerly,
    noting,
    plain_kernels,
    taking,
)
from fedmerge.architecture.from_code.followed_numbers import Globals
from fedmerge.architecture.from_code.modules import StatePairs, looking_copy
from fedmerge.errors import ArchitectureError, UntoldError, UserCodeError
from fedmerge.private_torch import leaves, map_tensors
from fedmerge.tracebacks import last_line
from fedmerge.user_code import StopRun, run_model, state_of

Inputs: TypeAlias = tuple[Any, ...]
Outcome: TypeAlias = tuple[Key, Any]  # what was told where

MOST_TRIALS = 64  # in which a module is told something
MOST_WAYS = 8  # that are followed, unless outcomes need more
ATTEMPTS = 3  # at an outcome, from different runs
MOST_HITS = 4  # of one place in the code that are tried: a loop may come there without end
MORE_OPS = 10  # times those of the first run: more than that is taken for an endless loop
FEW_OPS = 500  # that any run may take
_FLOATS = (0.0, 1.0, -1.0, 1e6, -1e6)  # that modules are told in place of a number
_INTEGERS = (0, 1, -1, 2, 3, 4096)


@dataclass(frozen=True)
class Run:
    """A run that ended: what left it, and sketches of what it computed."""

    inputs: Inputs
    forced: Answers
    departures: tuple[Departure, ...]
    sketch: int
    ops: int
    unseen: Mapping[str, str] = field(default_factory=dict)  # where numbers get out of sight → how

    @property
    def outcomes(self) -> frozenset[Outcome]:
        """The truths that Python was told."""
        truths = (d for d in self.departures if d.kind == "truth")
        return frozenset((d.key, bool(self.forced.get(d.key, d.value))) for d in truths)

    @property
    def answers(self) -> Answers:
        """What makes another run go the same way: all truths, and what was forced."""
        return {**dict(self.outcomes), **self.forced}


@dataclass
class Search:
    """Runs a module, and remembers what was seen."""

    module: nn.Module
    state: StatePairs
    branch: bool | None = None  # that every `torch.cond` takes
    most_ops: int | None = None
    runs: list[Run] = field(default_factory=list)
    failures: dict[Outcome, str] = field(default_factory=dict)
    ends: set[Outcome] = field(default_factory=set)  # outcomes that lines of code refuse
    tried: set[tuple[int, Outcome]] = field(default_factory=set)  # from which run
    modules: dict[int, Globals] = field(default_factory=dict)  # of the user's, that ask for numbers

    def look(self, inputs: Inputs) -> None:
        """Look for all that the module may do, on inputs like these."""
        first = self.run(inputs, {})
        self.most_ops = MORE_OPS * first.ops + FEW_OPS
        self.runs.append(first)
        for other in _variants(inputs, self.state) if first.departures else ():
            self._try(other, {})
        trials = 0
        while trials < MOST_TRIALS and (trial := self._next()) is not None:
            trials += 1
            number, told = trial
            start = self.runs[number]
            asked = self._try(start.inputs, {**start.forced, **told})
            self.tried |= {(number, (key, told[key])) for key in asked if key in told}

    def run(self, inputs: Inputs, forced: Answers, *, is_sketched: bool = True) -> Run:
        """Run the module on inputs, told some values."""
        while True:
            found = self._run(inputs, forced, is_sketched=is_sketched)
            if self._ops.asking.keys() <= self.modules.keys():
                return found
            self.modules |= self._ops.asking

    def _run(self, inputs: Inputs, forced: Answers, *, is_sketched: bool) -> Run:
        """Run the module once, with numbers followed in the modules that are known to ask."""
        given = map_tensors(torch.clone, inputs)
        tensors = [leaf for leaf in leaves(given) if isinstance(leaf, Tensor)]
        weights = state_of(self.module, keep_vars=True)
        seen = Dependence(tensors, weights, most_ops=self.most_ops, is_sketched=is_sketched)
        self._ops = Leaving(Telling(forced, tuple(self.modules.values())), seen)
        with torch.no_grad(), plain_kernels(), taking(self.branch):
            watched(self.module, given, self._ops)
        ops, sketch = self._ops, hash(tuple(seen.sketch))
        return Run(inputs, forced, tuple(ops.departures), sketch, seen.ops, ops.unseen)

    def _try(self, inputs: Inputs, forced: Answers) -> list[Key]:
        """Run the module, if it does run so, and return which of the values it asked for.

        What it was told last is why it does not.
        """
        try:
            with _asking_nobody():
                self.runs.append(self.run(inputs, forced))
        except UserCodeError as error:
            asked = [d.key for d in self._ops.departures if d.key in forced]
            if asked:
                self._fail((asked[-1], forced[asked[-1]]), error)
            return asked[-1:]
        return [d.key for d in self._ops.departures if d.key in forced]

    def _fail(self, told: Outcome, error: UserCodeError) -> None:
        """Take note that a module can't be told a value: it fails, or refuses such data itself."""
        reason = error.__cause__
        if reason is not None and _is_meant(reason):
            self.ends.add(_line_of(told))
        else:
            self.failures.setdefault(told, last_line(reason or error))

    def _next(self) -> tuple[int, Answers] | None:
        """Return what is to be told next, and from which run on.

        First all outcomes at once that no run has had, then other values, then single outcomes:
        these also show what goes together.
        """
        had = {outcome for run in self.runs for outcome in run.outcomes}
        attempts = Counter(told for _, told in self.tried)
        for number in range(len(self.runs)):
            turns = [told for told in self._turns(number, "truth") if told not in had]
            if turned := {key: told for key, told in turns if attempts[key, told] < ATTEMPTS}:
                return number, turned
        for number in range(len(self.runs)):
            untried = [told for told in self._values(number) if not attempts[told[1]]]
            if untried:  # at once what comes first of each: numbers that belong together agree
                return number, dict(told for place, told in untried if place == untried[0][0])
        if len({run.sketch for run in self.runs}) >= MOST_WAYS:
            return None
        every = ((k, told) for k in range(len(self.runs)) for told in self._turns(k, "truth"))
        return next(((k, dict([told])) for k, told in every), None)

    def _turns(self, number: int, kind: Kind) -> Iterator[Outcome]:
        """Yield all that was not tried yet in place of what a run was told."""
        return (told for _, told in self._untried(number, kind))

    def _values(self, number: int) -> Iterator[tuple[Any, Outcome]]:
        """Yield the same of all but truths, each with its place among the answers of its kind."""
        for kind in _ANSWERS:
            if kind != "truth":
                yield from (((kind, k), told) for k, told in self._untried(number, kind))

    def _untried(self, number: int, kind: Kind) -> Iterator[tuple[int, Outcome]]:
        run = self.runs[number]
        for departure in run.departures:
            if departure.kind == kind and departure.key not in run.forced:
                for place, answer in enumerate(_others(departure)):
                    told = (departure.key, answer)
                    if (number, told) not in self.tried and _line_of(told) not in self.ends:
                        yield place, told

    @property
    def needed(self) -> dict[Outcome, str]:
        """Both outcomes of every truth, but for those that the code itself refuses → where."""
        truths = [d for run in self.runs for d in run.departures if d.kind == "truth"]
        both = {(d.key, told): d.where for d in truths for told in (True, False)}
        return {
            outcome: where
            for outcome, where in both.items()
            if _is_tried(outcome[0]) and _line_of(outcome) not in self.ends
        }

    @property
    def unseen(self) -> tuple[str, str]:
        """Where a number gets out of sight, and how; or nothing."""
        places = (place for run in self.runs for place in run.unseen.items())
        return next(places, ("", ""))

    def told(self, run: Run) -> Telling | None:
        """Return what makes another run go the way of a run, if that depends on anything."""
        if not run.departures:
            return None
        return Telling(run.answers, tuple(self.modules.values()))

    @property
    def is_following(self) -> bool:
        """Whether numbers of data were on their way when the last run ended."""
        seen = self._ops.dependence
        return seen is not None and seen.has_left

    @property
    def chosen(self) -> list[Run]:
        """The first run, those with outcomes of their own, and some of other sketches."""
        found: list[Run] = []
        seen: set[Outcome] = set()
        for run in self.runs:
            is_new = run.sketch not in {known.sketch for known in found}
            if run.outcomes - seen or (is_new and len(found) < MOST_WAYS):
                seen |= run.outcomes
                found.append(run)
        return found


def _others(departure: Departure) -> Sequence[Any]:
    """Return what a module may be told in place of a value."""
    return _ANSWERS[departure.kind](departure.value) if _is_tried(departure.key) else ()


def _is_tried(key: Key) -> bool:
    """Return whether other values are tried there; a graph's places can't be told apart."""
    *steps, _, hits = key
    return hits < MOST_HITS or not steps


def _line_of(told: Outcome) -> Outcome:
    """Return what was told to a line of code, in whatever layer, however often."""
    (*steps, op, _), answer = told
    return ((*(step[:-1] for step in steps), op), answer) if steps else told


def _numbers(value: Any) -> Sequence[Any]:
    if isinstance(value, complex):
        return ()
    return _INTEGERS if isinstance(value, int) else _FLOATS


_ANSWERS: Mapping[Kind, Callable[[Any], Sequence[Any]]] = {
    "truth": lambda value: (not value,),
    "number": _numbers,
    "shape": lambda _: (0, 1),
    "array": lambda _: tuple(OTHER_DATA),
}


def _is_meant(error: BaseException) -> bool:
    """Return whether code raised an error on purpose, rather than ran into one.

    A check of torch's own that fails on made-up data says nothing of others.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or isinstance(error, StopRun) or not isinstance(error, Exception):
        return isinstance(error, SystemExit)
    code = trace.tb_frame.f_code
    is_raised = code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    is_torchs = code.co_filename.startswith(str(torch.__path__[0]))
    return is_raised and (not is_torchs or code.co_name.startswith(("_assert", "_check")))


@contextmanager
def _asking_nobody() -> Iterator[None]:
    """Let code that asks the user (a debugger where numbers are odd) find nobody there."""
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


def _variants(inputs: Inputs, state: StatePairs) -> Iterator[Inputs]:
    """Yield inputs of other signs, sizes and spreads; states stay as they are."""
    carried = {argument for argument, _ in state}
    for number in range(len(_FLOAT_CHANGES)):
        yield tuple(
            given if place in carried else map_tensors(partial(_changed, number=number), given)
            for place, given in enumerate(inputs)
        )


def _changed(tensor: Tensor, *, number: int) -> Tensor:
    """Return another tensor: whole numbers stay among those that there are."""
    if tensor.is_floating_point() or tensor.is_complex():
        return _FLOAT_CHANGES[number](tensor)
    changes = _TRUTH_CHANGES if tensor.dtype == torch.bool else _INTEGER_CHANGES
    return changes[number % len(changes)](tensor) if tensor.numel() else tensor


_FLOAT_CHANGES: Sequence[Callable[[Tensor], Tensor]] = (
    lambda x: -x,
    torch.zeros_like,
    torch.ones_like,
    lambda x: 1000 * x,
    lambda x: 1000 * x.abs(),
    lambda x: -1000 * x.abs(),
    lambda x: x / 1000,
    lambda x: x + 5,
    lambda x: x - 5,
)
_INTEGER_CHANGES: Sequence[Callable[[Tensor], Tensor]] = (
    lambda x: x.flatten().flip(0).reshape(x.shape),
    lambda x: x.min().expand(x.shape).clone(),
    lambda x: x.max().expand(x.shape).clone(),
    lambda x: x.flatten().sort().values.reshape(x.shape),
)
_TRUTH_CHANGES: Sequence[Callable[[Tensor], Tensor]] = (
    torch.logical_not,
    torch.zeros_like,
    torch.ones_like,
)


_TOO_MANY = f"more than {MOST_TRIALS} trials would be needed"
_HINT = "take the branch out, or describe the axes in a plan of your own (`plan`)"


@dataclass(frozen=True)
class Way:
    """One way through a model: inputs, and what it is told where it asks."""

    inputs: Inputs
    told: Telling | None = None
    branch: bool | None = None  # that every `torch.cond` takes
    is_graph: bool = False  # whether there are higher-order ops
    outcomes: frozenset[Outcome] = frozenset()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let models go this way for a while; higher-order ops run as plain calls."""
        with ExitStack() as stack:
            stack.enter_context(answering(self.told))
            if self.is_graph:
                for context in (eagerly(), taking(self.branch), EagerMode()):
                    stack.enter_context(context)
            yield


@dataclass(frozen=True)
class Ways:
    """The ways through a model that were found, the first as its inputs go by nature."""

    all: tuple[Way, ...]
    decisions: Mapping[Outcome, str] = field(default_factory=dict)  # that count → where they fall
    failures: Mapping[Outcome, str] = field(default_factory=dict)  # why some can't be tried
    unseen: tuple[str, str] = ("", "")  # where a number gets out of sight, and how

    def follow(self, check: Callable[[Inputs], None]) -> None:
        """Check something on every way, and refuse a model that can also go others.

        Not all that a model is told can happen: what fails then is of no interest, as long as
        every outcome of its decisions was checked on some way.
        """
        failures = dict(self.failures)
        seen: set[Outcome] = set()
        for way in self.all:
            try:
                with way.taken():
                    check(way.inputs)
            except (UserCodeError, UntoldError) as error:
                if way is self.all[0]:
                    raise
                failures.update(dict.fromkeys(way.outcomes - failures.keys(), error.problem))
            else:
                seen |= way.outcomes
        for outcome, where in self.decisions.items():
            if outcome not in seen:
                raise ArchitectureError(
                    f"the model decides by its data or weights ({where}), and what it does where "
                    f"that is {outcome[1]} can't be checked: {failures.get(outcome, _TOO_MANY)}",
                    _HINT,
                )

    @property
    def notes(self) -> tuple[str, ...]:
        """What can't be known of what was found."""
        where, how = self.unseen
        if not where:
            return ()
        return (
            f"taken on trust (`numbers`): a number from the model's data {how} "
            f"({Path(where).name}); the plan holds for all that were tried",
        )


def ways_of(
    model: nn.Module, inputs: Inputs, *, state: StatePairs = (), trusts_numbers: bool = False
) -> Ways:
    """Return the ways through a model; those of `torch.cond` go with all conditions alike.

    A model that takes numbers out of its data, and uses them where that can't be followed, is
    refused unless it is trusted.
    """
    module = looking_copy(model)
    first = Search(module, state)
    try:
        with noting() as met:
            run = first.run(inputs, {}, is_sketched=False)
    except UserCodeError as error:
        if first.is_following and _runs(module, inputs):
            raise _unseen(
                "", f"can't be followed: {last_line(error.__cause__ or error)}"
            ) from error
        return Ways((Way(inputs),))  # whoever runs it next says why it fails
    if not met and not run.departures and not run.unseen:
        return Ways((Way(inputs),))
    searches = [Search(module, state, b) for b in ((True, False) if "cond" in met else (None,))]
    for search in searches:
        search.look(inputs)
    unseen = next((search.unseen for search in searches if any(search.unseen)), ("", ""))
    if any(unseen) and not trusts_numbers:
        raise _unseen(*unseen)
    return Ways(
        tuple(
            Way(run.inputs, search.told(run), search.branch, bool(met), run.outcomes)
            for search in searches
            for run in search.chosen
        ),
        {outcome: where for search in searches for outcome, where in search.needed.items()},
        {outcome: why for search in searches for outcome, why in search.failures.items()},
        unseen,
    )


def _runs(module: nn.Module, inputs: Inputs) -> bool:
    """Return whether a model runs if nobody looks."""
    try:
        with torch.no_grad():
            run_model(module, map_tensors(torch.clone, inputs))
    except UserCodeError:
        return False
    return True


def _unseen(where: str, how: str) -> ArchitectureError:
    """Return the refusal of a number whose use can't be followed."""
    place = f" ({where})" if where else ""
    return ArchitectureError(
        f"the model takes a number out of its data that {how}{place}: whether it decides there "
        "what units are used for can't be seen",
        "keep it in tensors (`torch.where`), or compare it before that; if it decides nothing "
        "about units, say so with `numbers=trusted`",
    )
