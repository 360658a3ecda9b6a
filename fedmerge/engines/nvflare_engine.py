"""The engine that runs client work at the sites of an NVFLARE job.

The job's controller is the transport: a task is broadcast to its client's site alone, an outcome is
what the site submits. Messages are one array of bytes, which no filter of formats changes.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmerge.engines.engine import ClientInfo, Outcome, Reply, Status, Task
from fedmerge.engines.remote import (
    GRACE,
    Answer,
    Order,
    Site,
    answer_of,
    from_bytes,
    order_of,
    outcome_of,
    reply_of,
    to_bytes,
    unreadable,
)
from fedmerge.errors import TrainingError
from fedmerge.values.arrays import Array

if TYPE_CHECKING:
    from nvflare.apis.controller_spec import Task as SentTask
    from nvflare.app_common.workflows.model_controller import ModelController

LOOK = 0.5  # seconds between looks at whether the job goes on
TASK = "train"  # what NVFLARE calls all of our tasks: clients' executors know it
MESSAGE = "fedmerge"  # the only parameter of our models
_FAIL = unreadable("NVFLARE")


class NvflareEngine:
    """Client work at the sites of a job, one task per site at a time; clients have sites' names.

    A site that NVFLARE deems disconnected is lost, and may come back. NVFLARE can't stop work that
    hangs: its site is given up until it answers.
    """

    def __init__(self, controller: ModelController, clients: Sequence[str] = ()) -> None:
        self._controller = controller
        self._clients = tuple(clients) or tuple(sorted(self._up()))

    def clients(self) -> Sequence[ClientInfo]:
        """Return the clients whose sites are up."""
        up = self._up()
        return [ClientInfo(name, f"NVFLARE's site {name}") for name in self._clients if name in up]

    def run(self, tasks: Iterable[Task], *, timeout: float | None) -> Iterator[Outcome]:
        """Yield one outcome per task as they end; at most one task per site is in hand."""
        rest, flights = iter(tasks), Flights(self._controller, timeout)
        try:
            while True:
                up = self._up()
                while len(flights) < max(1, len(up)) and (task := next(rest, None)):
                    flights.add(task, is_up=task.client in up)
                if not flights:
                    return
                yield from flights.landed()
        finally:
            flights.cancel()

    def close(self) -> None:
        """Do nothing: the job is not ours."""

    def _up(self) -> set[str]:
        """Return the sites that NVFLARE does not deem disconnected."""
        names = {client.name for client in self._controller.engine.get_clients()}
        return {name for name in names if not self._controller.get_client_disconnect_time(name)}


class Flights:
    """The tasks in hand of one run."""

    def __init__(self, controller: ModelController, timeout: float | None) -> None:
        self._controller, self._timeout = controller, timeout
        self._waiting: list[Task] = []
        self._sent: dict[str, tuple[str, SentTask]] = {}  # task's id → its client, whose site works
        self._ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._count = 0

    def __len__(self) -> int:
        """Return how many are in hand."""
        return self._count

    def add(self, task: Task, *, is_up: bool) -> None:
        """Take another one in hand, and send it if its site is free."""
        self._count += 1
        if is_up:
            self._waiting.append(task)
            self._send()
        else:
            lost = Reply("lost", message="its site left NVFLARE's job")
            self._ended.put(outcome_of(task, lost))

    def landed(self) -> Iterator[Outcome]:
        """Yield the outcome of the task that ends first, or nothing if none does for a moment."""
        if self._controller.abort_signal.triggered:
            raise TrainingError("NVFLARE's job was aborted")
        try:
            outcome = self._ended.get(timeout=LOOK)
        except queue.Empty:
            return
        self._count -= 1
        self._sent.pop(outcome.task, None)
        self._send()
        yield outcome

    def cancel(self) -> None:
        """Let NVFLARE forget all that is in hand; what sites still submit is dropped."""
        for _, sent in self._sent.values():
            self._controller.cancel_task(sent)

    def _send(self) -> None:
        busy = {client for client, _ in self._sent.values()}
        for task in list(self._waiting):
            if task.client in busy:
                continue
            busy.add(task.client)
            self._waiting.remove(task)
            sent, context = self._task_of(task), self._controller.fl_ctx
            self._sent[task.id] = task.client, sent
            self._controller.broadcast(sent, context, targets=[task.client], min_responses=1)

    def _task_of(self, task: Task) -> SentTask:
        """Return a task as NVFLARE sends it; the first that it says of it is how it ended."""
        from nvflare.apis.controller_spec import Task as SentTask
        from nvflare.app_common.abstract.fl_model import FLModel
        from nvflare.app_common.utils.fl_model_utils import FLModelUtils

        limit = 0 if self._timeout is None else math.ceil(self._timeout + GRACE)
        heard: list[Reply] = []

        def end(reply: Reply) -> None:
            heard.append(reply)
            if len(heard) == 1:
                self._ended.put(outcome_of(task, reply))

        message = to_bytes(task.arrays, order_of(task, self._timeout))
        return SentTask(
            TASK,
            FLModelUtils.to_shareable(FLModel(params={MESSAGE: message})),
            timeout=limit,
            result_received_cb=lambda client_task, fl_ctx: end(_reply_of(client_task.result)),
            task_done_cb=lambda task, fl_ctx: end(self._unanswered(task)),
        )

    def _unanswered(self, sent: SentTask) -> Reply:
        """Return the reply that stands for none, of a task that is over."""
        from nvflare.apis.controller_spec import TaskCompletionStatus

        late = f"did not answer within {self._timeout or 0:g} s"
        causes: Mapping[str, tuple[Status, str]] = {
            TaskCompletionStatus.TIMEOUT: ("timeout", late),
            TaskCompletionStatus.CLIENT_DEAD: ("lost", "its site left NVFLARE's job"),
        }
        unknown: tuple[Status, str] = ("lost", f"NVFLARE ended its task: {sent.completion_status}")
        status, message = causes.get(sent.completion_status, unknown)
        return Reply(status, message=message)


def _reply_of(result: Any) -> Reply:
    """Return what a site submitted; whatever is wrong with it is that client's failure."""
    from nvflare.apis.shareable import ReturnCode
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils

    code = result.get_return_code()
    if code != ReturnCode.OK:
        return Reply("app", message=f"NVFLARE says {code}; the site's own log says why")
    try:
        model = FLModelUtils.from_shareable(result)
        arrays, answer = from_bytes(message_in(model.params), Answer, fail=_FAIL)
    except TrainingError as error:
        return Reply("app", message=error.problem)
    except Exception as error:  # NVFLARE's, of results that are no models
        return Reply("app", message=_FAIL(f"{type(error).__name__}: {error}").problem)
    return reply_of(arrays, answer)


def message_in(params: Any) -> Array:
    """Return the bytes among the parameters of a model."""
    if not isinstance(params, Mapping) or MESSAGE not in params:
        raise _FAIL(f"its model has no '{MESSAGE}'")
    return np.asarray(params[MESSAGE])


def answer_model(params: Any, site: Site) -> Array:
    """Return a site's answer to the parameters of a model that a server sent."""
    arrays, order = from_bytes(message_in(params), Order, fail=_FAIL)
    reply = site.reply(arrays, order)
    return to_bytes(reply.arrays, answer_of(reply))
