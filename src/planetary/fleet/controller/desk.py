"""The state, the live connections and the instructions of the current event, which a controller's parts share."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.policy import FabricPolicy
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.sessions import SupervisorSession, WorkerSession
from planetary.machine.events import Append, Instruction, Payload, Send
from planetary.machine.journal import Record
from planetary.wire.message import Message, Order


class InFlightPayloads:
    """Payloads of messages sent in turn, by session and in that order, until they have left this machine."""

    def __init__(self) -> None:
        """Start with no payload in flight."""
        self._queues: dict[int, deque[Payload]] = {}

    def add(self, session: int, message: Message, payload: Payload | None) -> None:
        """A message was given to a connection."""
        if payload is not None and message.sending_order() is Order.IN_TURN:
            self._queues.setdefault(session, deque()).append(payload)

    def sent(self, session: int, message: Message) -> bool:
        """A message with a payload has left; return whether it was one of these."""
        queue = self._queues.get(session)
        if not queue or message.sending_order() is not Order.IN_TURN:
            return False
        queue.popleft()
        return True

    def count(self, session: int) -> int:
        """Return how many are under way on a connection."""
        return len(self._queues.get(session, ()))

    def payloads(self) -> list[Payload]:
        """Return all of them."""
        return [payload for queue in self._queues.values() for payload in queue]

    def forget(self, session: int) -> None:
        """A connection has ended."""
        self._queues.pop(session, None)


MOST_REMEMBERED = 64
"""Tasks of a connection that are remembered. A worker has two at most, and reports on a few that were cancelled."""


class Standing(StrEnum):
    """Relation of a report's sender to the task it reports on."""

    OWN = "own"  # given on this connection, or the report is about no task
    STALE = "stale"  # message of an earlier connection, or of an earlier life of the gateway
    FOREIGN = "foreign"  # given to another worker, or impossible


def task_of(message: Message) -> int | None:
    """Return the number of the task a message gives or reports on; None: it is about none."""
    if isinstance(message, m.TaskFailed) and message.task == 0:
        return None  # the failure of a role
    number = getattr(message, "task", getattr(message, "call", None))
    return number if isinstance(number, int) else None


class GivenTasks:
    """The tasks given on each connection: who may report on which task.

    Every message with a field `task` or `call` counts, of every kind of run, so no handler has to compare sessions.
    Whether an own task is still under way is the handler's decision.
    """

    def __init__(self) -> None:
        """Start with no task given."""
        self._tasks: dict[int, deque[int]] = {}  # task ids by session

    def give(self, session: int, message: Message) -> None:
        """Take note of a message to a worker."""
        task = task_of(message)
        if task is not None:
            tasks = self._tasks.setdefault(session, deque(maxlen=MOST_REMEMBERED))
            if task not in tasks:
                tasks.append(task)

    def standing(self, session: int, message: Message) -> Standing:
        """Return whether a worker may send a message, as far as the task of it is concerned."""
        task = task_of(message)
        if task is None or task in self._tasks.get(session, ()):
            return Standing.OWN
        is_foreign = task <= 0 or any(task in tasks for tasks in self._tasks.values())
        return Standing.FOREIGN if is_foreign else Standing.STALE

    def forget(self, session: int) -> None:
        """A connection has ended."""
        self._tasks.pop(session, None)


Policy_co = TypeVar("Policy_co", bound=FabricPolicy, covariant=True)
State_co = TypeVar("State_co", bound=RunFold, covariant=True)
SessionT = TypeVar("SessionT", bound=WorkerSession)


class Desk(Generic[Policy_co, State_co, SessionT]):
    """One per controller. Holds no decisions.

    Attributes:
        session: class of a worker's connection, `SessionT`.
        workers, supervisors: the live connections, by session.
        out: the instructions of the current event, in order.
        under_way: payloads that have not left this machine yet.
        tasks: given on each connection.
    """

    session: ClassVar[type[WorkerSession]] = WorkerSession

    def __init__(self, policy: Policy_co, state: State_co) -> None:
        """Begin with no connection; `state` is changed only through `append`."""
        self._policy, self._state = policy, state
        self.workers: dict[int, SessionT] = {}
        self.supervisors: dict[int, SupervisorSession] = {}
        self.out: list[Instruction] = []
        self.under_way = InFlightPayloads()
        self.tasks = GivenTasks()

    @property
    def policy(self) -> Policy_co:
        """The constants of the run."""
        return self._policy

    @property
    def state(self) -> State_co:
        """The fold of the journal; changed through `append` alone."""
        return self._state

    def use_policy(self, policy: Policy_co) -> None:  # type: ignore[misc]
        """Let these be the run's constants from now on."""
        self._policy = policy

    def append(self, record: Record) -> None:
        """Apply a record to the state and put it in the journal."""
        self._state.apply(record)
        self.out.append(Append(record))

    def send(self, session: int, message: m.Message, payload: Payload | None = None) -> None:
        """Send a message on a connection."""
        self.under_way.add(session, message, payload)
        self.tasks.give(session, message)
        self.out.append(Send(session, message, payload))

    def payload_sent(self, session: int, message: m.Message) -> bool:
        """Take note that a payload has left the gateway; return whether it was one sent in turn."""
        return self.under_way.sent(session, message)

    def forget(self, session: int) -> None:
        """Drop the records of a connection that ended. A worker is removed by `Membership`."""
        self.supervisors.pop(session, None)
        self.under_way.forget(session)
        self.tasks.forget(session)

    def all_workers(self) -> list[SessionT]:
        """All that are connected, in order of their names, so the same events give the same assignment."""
        return sorted(self.workers.values(), key=lambda w: w.worker)

    def ready_workers(self) -> list[SessionT]:
        """Return the workers that take tasks, in order of their names."""
        return [w for w in self.all_workers() if w.ready and not w.leaving]


AnyDesk = Desk[FabricPolicy, RunFold, Any]
"""A desk of whatever kind of run."""
