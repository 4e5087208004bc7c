"""The controller's state of a trainer's connection: the tasks given on it, and the parameters at its other end."""

from __future__ import annotations

import msgspec

from planetary.fleet.protocol.sessions import WorkerSession
from planetary.machine.events import Received
from planetary.machine.task_times import InFlight
from planetary.sync.fragments import FragmentSteps

MOST_UNANSWERED = 3
"""Leases in a row that may come back without a sign of the worker. Each may leave a version in the worker's queue."""


class TrainInFlight(InFlight):
    """A train task."""

    task: int
    round: int
    leases: tuple[int, ...]  # leases in the order of training
    steps: int  # inner steps of all of them
    assigned_at: float
    progress_at: float
    version: int  # version of the first parameters
    mixes: int = -1  # the version it waits for on the way; -1: none
    after: int = 0  # the own task it goes on from; 0: from the version
    missed: tuple[int, ...] = ()  # versions mixed in at the start
    early: bool = False  # it is of the round after `round`, which is open
    ended: Received | None = None  # the result of an early one that is trained
    due_from: float = 0.0  # opening of the round of an early lease
    ends_early: bool = False  # the worker was asked for the steps trained so far
    step: int = 0
    started: bool = False
    loss: float | None = None

    @property
    def known_round(self) -> int:
        """The round named to the worker and in the result."""
        return self.round + self.early

    @property
    def mixed(self) -> int:
        """The newest version in its worker's own values at the end."""
        return max(self.version, self.mixes)

    @property
    def since(self) -> float:
        """Start of the worker's counted time: an early lease may pause for the previous round."""
        return max(self.assigned_at, self.due_from)


class EvalInFlight(InFlight):
    """An eval task."""

    task: int
    version: int
    chunk: int
    assigned_at: float


class Trainer(WorkerSession):
    """A trainer's connection."""

    version: int = -1  # the newest parameters sent on it, or that the worker made in the ring
    arriving: dict[int, float] = msgspec.field(default_factory=dict)  # message with tensors -> since when it comes in
    arrived_at: float = 0.0  # when the last of them was here
    arrival_s: float = 0.0  # seconds it took
    mixed: int = -1  # newest version in the worker's own values, after the last counted lease
    failed_after: int = 0  # own task with whose end parameters a lease failed; 0: none did
    own: FragmentSteps | None = None  # steps of these values, where the run's workers keep them
    unanswered: int = 0  # leases in a row that came back from it without a sign
    train: TrainInFlight | None = None
    next: TrainInFlight | None = None  # early lease behind `train`, starting from the end parameters of `train`
    evaluate: EvalInFlight | None = None

    @property
    def is_unresponsive(self) -> bool:
        """Whether it gets no more tasks and versions until it gives a sign or connects again."""
        return self.unanswered >= MOST_UNANSWERED
