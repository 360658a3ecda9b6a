"""The ways through a model that decides by its data or its weights.

A truth that Python asks for has two outcomes, and both are tried: on inputs that differ in sign,
size and spread, and by telling the model what it did not find. Where a number leaves, the same
inputs and some other numbers show whether anything hangs on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from fedmerge.errors import ArchitectureError, UntoldError, UserCodeError
from fedmerge.graph.model.departures import Answers, answering
from fedmerge.graph.model.dispatch import EagerMode, eagerly
from fedmerge.graph.model.higher_order import noting, taking
from fedmerge.graph.model.modules import StatePairs, copied
from fedmerge.graph.model.search import MOST_TRIALS, Inputs, Outcome, Search

_TOO_MANY = f"more than {MOST_TRIALS} trials would be needed"
_HINT = "take the branch out, or describe the axes in a plan of your own (--plan)"


@dataclass(frozen=True)
class Way:
    """One way through a model: inputs, and what it is told where it asks."""

    inputs: Inputs
    answers: Answers = field(default_factory=dict)
    branch: bool | None = None  # that every `torch.cond` takes
    is_graph: bool = False  # whether there are higher-order ops
    outcomes: frozenset[Outcome] = frozenset()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let models go this way for a while; higher-order ops run as plain calls."""
        with ExitStack() as stack:
            stack.enter_context(answering(self.answers))
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
    opaque: str = ""  # where something leaves whose every value can't be tried
    flows: int = 1  # how many different things were seen to be computed

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
        if not self.opaque or self.flows == 1:
            return ()
        return (
            f"the model decides by numbers that depend on its data ({Path(self.opaque).name}): the "
            f"plan holds on the {len(self.all)} ways through it that were found",
        )


def ways_of(model: nn.Module, inputs: Inputs, *, state: StatePairs = ()) -> Ways:
    """Return the ways through a model; those of `torch.cond` go with all conditions alike."""
    module = copied(model)
    try:
        with noting() as met:
            first = Search(module, state).run(inputs, {}, is_sketched=False)
    except UserCodeError:  # whoever runs it next says so
        return Ways((Way(inputs),))
    if not met and not first.departures:
        return Ways((Way(inputs),))
    searches = [Search(module, state, b) for b in ((True, False) if "cond" in met else (None,))]
    for search in searches:
        search.look(inputs)
    return Ways(
        tuple(
            Way(run.inputs, run.answers, search.branch, bool(met), run.outcomes)
            for search in searches
            for run in search.chosen
        ),
        {outcome: where for search in searches for outcome, where in search.needed.items()},
        {outcome: why for search in searches for outcome, why in search.failures.items()},
        next((search.opaque for search in searches if search.opaque), ""),
        max(len({run.flow for run in search.runs}) for search in searches),
    )
