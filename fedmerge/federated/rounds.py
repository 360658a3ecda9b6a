"""The rounds of a run: clients train, the server decides, the state is saved.

`Rounds.finish` is the loop. What the server decides is the method's: `FedMA.exchange` or
`FedAvg.exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fedmerge.engines import ClientInfo, Engine, Outcome, StepResult, Task
from fedmerge.federated.client_training import check_own
from fedmerge.federated.events import (
    ClientFinished,
    ClientStarted,
    GroupMatched,
    HearEvent,
    client_failed,
    round_done,
    round_started,
)
from fedmerge.federated.federation import Exchange, Federation, Round
from fedmerge.federated.options import Running
from fedmerge.federated.preparation import Run
from fedmerge.federated.state import SavedState
from fedmerge.merging.record_schema import Metrics, RoundEntry
from fedmerge.values.work import Arrays

Keep: TypeAlias = Callable[[Round, Federation, Federation], None]  # models before, and after


def keep_nothing(current: Round, before: Federation, after: Federation) -> None:
    """Keep nothing of a round."""


@dataclass(frozen=True)
class Rounds:
    """How the rounds of a run are carried out, and who hears of them."""

    run: Run
    engine: Engine
    running: Running
    data: str | None  # what whole global models are evaluated on
    save: Callable[[SavedState], None]
    hear: HearEvent
    keep: Keep = keep_nothing  # what the last pass matched

    def finish(self, state: SavedState) -> SavedState:
        """Run the rounds that are left and return the state after the last."""
        began, already = time.monotonic(), len(state.rounds)
        for current in self.run.method.rounds[already:]:
            federation, entry = self._round(state.federation, current)
            state = SavedState(federation, (*state.rounds, entry))
            self.save(state)
            left = _seconds_left(self.run.method.rounds, already, current.number, began)
            self.hear(round_done(entry, len(self.run.method.rounds), left))
        return state

    def _round(self, federation: Federation, current: Round) -> tuple[Federation, RoundEntry]:
        """Let the clients train, and decide on the models of those that delivered."""
        began = time.monotonic()
        self.hear(round_started(current))
        federation = self.run.method.begin(federation, current)
        engine, step = CountedEngine(self.engine), StepResult({}, {})
        if current.epochs:
            federation, step = self.run.trainer.train(
                engine,
                federation,
                self.run.method,
                current,
                policy=self.running.policy,
                begin=lambda client: self.hear(ClientStarted(current.number, client)),
                hear=lambda outcome: self._tell(outcome, current, engine),
            )
            self._tell_unplaced(step.missing.values(), current)
        present = [k for k, m in enumerate(federation.locals) if m.name not in step.missing]
        exchange = self.run.method.exchange(federation, current, present)
        losses = {n: float(outcome.values["losses"][0]) for n, outcome in step.done.items()}
        weighed = self.run.method.weigh(exchange.federation, losses)
        exchange = replace(exchange, federation=weighed)
        if current.pass_number == self.run.method.rounds[-1].pass_number:
            self.keep(current, federation, exchange.federation)
        if exchange.matched is not None:
            matched = exchange.matched
            self.hear(GroupMatched(current.number, matched.name, matched.width, matched.match_rate))
        entry = _entry(
            current, step, exchange, self._evaluated(exchange.federation, current, engine)
        )
        return exchange.federation, replace(
            entry,
            moved_up=sum(engine.up.values()),
            moved_down=sum(engine.down.values()),
            seconds=round(time.monotonic() - began, 3),
        )

    def _tell(self, outcome: Outcome, current: Round, engine: CountedEngine) -> None:
        """Tell of one attempt of one client."""
        check_own(outcome)
        if outcome.status != "ok":
            self.hear(client_failed(outcome, current, is_last=self._is_last(outcome)))
            return
        self.hear(
            ClientFinished(
                current.number,
                outcome.client,
                loss=_last_loss(outcome),
                samples=outcome.values["samples"],
                seconds=round(outcome.seconds, 3),
                attempt=outcome.attempts,
                bytes_up=engine.up[outcome.client],
                bytes_down=engine.down[outcome.client],
            )
        )

    def _is_last(self, outcome: Outcome) -> bool:
        return outcome.attempts > self.running.policy.retries

    def _tell_unplaced(self, missing: Iterable[Outcome], current: Round) -> None:
        """Tell who is left out although attempts were left: there was no place for them."""
        for outcome in missing:
            if not self._is_last(outcome):
                self.hear(client_failed(outcome, current, is_last=True))

    def _evaluated(self, federation: Federation, current: Round, engine: Engine) -> Metrics | None:
        """Return how good the global model is, where there is one and data."""
        if not current.completes:
            return None
        model, widths, trainer = whole_model(federation), federation.widths, self.run.trainer
        metrics: dict[str, float | None] = {}
        if self.data is not None:
            metrics |= trainer.evaluate(
                model,
                widths,
                self.data,
                device=self.running.devices[0],
                threads=self.running.threads_per_client,
            )
        if self.run.options.held_out:
            policy = self.running.policy
            metrics |= trainer.evaluate_held_out(engine, model, widths, policy=policy)
        return metrics or None


def whole_model(federation: Federation) -> Arrays:
    """Return every tensor of a global model; counters and the like are the first client's."""
    return {**federation.locals[0].arrays, **federation.fixed}


def _last_loss(outcome: Outcome) -> float:
    return float(outcome.values["losses"][-1])


def _entry(
    current: Round,
    step: StepResult,
    exchange: Exchange,
    metrics: Metrics | None,
) -> RoundEntry:
    return RoundEntry(
        number=current.number,
        pass_number=current.pass_number,
        layer=current.layer.label,
        stage=current.stage,
        epochs=current.epochs,
        losses={name: _last_loss(outcome) for name, outcome in step.done.items()},
        metrics=metrics,
        widths=exchange.federation.widths,
        bytes_up=exchange.up,
        bytes_down=exchange.down,
        missing={name: outcome.status for name, outcome in step.missing.items()},
        client_weights={
            model.name: weight
            for model, weight in zip(
                exchange.federation.locals, exchange.federation.weights, strict=False
            )
        },
    )


def _seconds_left(rounds: Sequence[Round], first: int, done: int, began: float) -> float:
    """Return how long the other rounds will take if an epoch takes as long as until now."""
    past = sum(max(1, current.epochs) for current in rounds[first:done])
    ahead = sum(max(1, current.epochs) for current in rounds[done:])
    return (time.monotonic() - began) * ahead / past


@dataclass
class CountedEngine:
    """An engine that knows the bytes of numbers that went to and came from its clients.

    Every attempt counts, also that of a client whose result is refused.
    """

    engine: Engine
    up: dict[str, int] = field(default_factory=dict)  # client → bytes
    down: dict[str, int] = field(default_factory=dict)

    def clients(self) -> Sequence[ClientInfo]:
        """Return the clients that can be placed now."""
        return self.engine.clients()

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield one outcome per task."""
        for outcome in self.engine.run(self._sent(tasks), timeout=timeout):
            self.up[outcome.client] = self.up.get(outcome.client, 0) + outcome.nbytes
            yield outcome

    def _sent(self, tasks: Iterable[Task]) -> Iterator[Task]:
        for task in tasks:
            self.down[task.client] = self.down.get(task.client, 0) + task.nbytes
            yield task

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()
