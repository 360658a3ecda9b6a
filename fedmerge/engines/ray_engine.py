"""Run client work as tasks of a Ray cluster, which places them, moves arrays and sees failures."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedmerge.engines.calls import thread_limits, usable_cores
from fedmerge.engines.ray_cluster import connect, nodes_up
from fedmerge.engines.ray_flights import Flight, Flights, cause
from fedmerge.engines.ray_nodes import LABEL, Homes, Node, Share
from fedmerge.engines.ray_work import do_task
from fedmerge.engines.values import ClientInfo, Outcome, Task
from fedmerge.errors import UsageError
from fedmerge.types.work import Place

_PIN = 0.001  # of a label: it says where, not how many


class RayEngine:
    """Client work as tasks of Ray, one per slot: a node's CPUs or GPUs ÷ those of a client.

    A client named by the resource `client:<name>` of some node runs on such a node only, the
    others run anywhere. Ray is told to retry nothing: whoever runs the step decides that.
    """

    def __init__(
        self,
        clients: Sequence[str],
        *,
        address: str | None = None,
        share: Share | None = None,
        device: str = "cpu",
        threads: int = 1,
    ) -> None:
        self._clients = tuple(clients)
        self._share = share or Share(cpus=threads)
        self._device, self._threads = device, threads
        self._homes = Homes(self._share)
        self._end = connect(address, cpus=max(usable_cores(), math.ceil(self._share.cpus)))
        try:
            self._check_room()
            self._remote = self._task()
        except BaseException:
            self.close()
            raise

    def clients(self) -> Sequence[ClientInfo]:
        """Return the clients for which a node is up, in the order in which to start them."""
        homes = self._homes.find(self._clients, nodes_up())
        return [ClientInfo(name, _where(nodes)) for name, nodes in homes.items() if nodes]

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield one outcome per task as they end; at most one task per slot is in hand."""
        rest, flights = iter(tasks), Flights(timeout, self._names)

        def take_off() -> None:
            width = self._width()
            while len(flights) < width and (task := next(rest, None)):
                flights.add(self._begin(task, timeout))

        try:
            take_off()
            while flights:
                for outcome in flights.landed():
                    take_off()  # before the listener takes its time
                    yield outcome
        finally:  # whoever stopped listening wants no more results
            flights.cancel()

    def close(self) -> None:
        """Leave the cluster, and stop it if it was started here."""
        self._end()
        self._end = lambda: None

    def _check_room(self) -> None:
        nodes = nodes_up()
        if not any(map(self._share.slots, nodes)):
            raise UsageError(
                f"no node of the cluster has {self._share}, which a client is to get",
                "ask for less with --cpus-per-client and --gpus-per-client, or add nodes",
            )

    def _width(self) -> int:
        """Return how many tasks can run now; one is taken in any case, to be found lost."""
        return max(1, sum(map(self._share.slots, nodes_up())))

    def _names(self) -> set[str]:
        return {client.name for client in self.clients()}

    def _task(self) -> Any:
        """Return the function of all tasks: `num_gpus` here gives each its own fresh process."""
        import ray

        variables = {**thread_limits(self._threads), "PYTHONPATH": os.pathsep.join(_own_path())}
        return ray.remote(
            num_cpus=self._share.cpus,
            num_gpus=self._share.gpus,
            num_returns="streaming",
            max_retries=0,
            runtime_env={"env_vars": variables},
        )(do_task)

    def _begin(self, task: Task, timeout: float | None) -> Flight:
        """Submit a task; its arrays are in the object store until it ends."""
        import ray

        is_pinned = task.client in self._homes.labelled
        remote = self._remote.options(
            name=f"fedmerge {task.client}",
            resources={LABEL + task.client: _PIN} if is_pinned else None,
        )
        place = Place(self._device, self._threads, timeout)
        try:
            arrays = ray.put(dict(task.arrays))
            stream = remote.remote(task.function, arrays, task.settings, place, str(Path.cwd()))
        except ray.exceptions.RayError as error:  # the object store and its disk are full
            return Flight(task, problem=cause(error))
        return Flight(task, stream)


def _where(nodes: Sequence[Node]) -> str:
    addresses = list(dict.fromkeys(node.address for node in nodes))
    return f"Ray on {addresses[0]}" if len(addresses) == 1 else f"Ray on {len(addresses)} machines"


def _own_path() -> list[str]:
    """Return where the user's code is imported from, without what every Python here has."""
    folders = [Path(folder or ".").absolute() for folder in sys.path]
    installed = [Path(sys.prefix), Path(sys.base_prefix)]
    return [str(f) for f in folders if not any(f.is_relative_to(root) for root in installed)]
