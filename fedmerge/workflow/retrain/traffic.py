"""Count what an engine really moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fedmerge.engines import ClientInfo, Engine, Outcome, Task


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
