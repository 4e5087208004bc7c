"""Where the results of a round are reduced, and who has which parameters: the interface of the star and the ring."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Literal

from planetary.core.configuration.needs import Need
from planetary.core.extension_points import OVERLAPS
from planetary.fleet.controller.stalls import Wait
from planetary.machine.events import Received
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.overlap import LeaseStart, Overlap
from planetary.runs.rounds.events import OuterStepDone
from planetary.runs.rounds.records import LeaseMark
from planetary.runs.rounds.sessions import Trainer, TrainInFlight
from planetary.runs.rounds.state import OpenRound
from planetary.sync.deltas import Table

if TYPE_CHECKING:
    from planetary.core.configuration.schema import Config


class ReductionOutcome(StrEnum):
    """Outcome of the reduction under way."""

    WAIT = "wait"
    RETRY = "retry"  # no worker has a result
    DONE = "done"  # the round's parameters exist, and are at the gateway where they have to be


class Topology(ABC):
    """One per controller of a run in rounds. The defaults are those of a topology without state on workers.

    Attributes:
        in_ring: whether workers reduce among themselves and hold the outer state, led by a master at the gateway.
        fixed_step: why no other training step can be rolled out to a run; "": it can.
        without: key or pattern without effect -> reason; see `HonouredKeys`.
        keys: optional ones of `[sync]` that it uses.
        needs: of the configuration.
        overlap: the training while a round is reduced.
        result: place of the parameters in a worker's `TrainResult`.
        stall: why the reduction cannot go on, "" while it can.
        unfit: why the run cannot go on in this topology, and from where it goes on in a star; None while it can.
        delta_norm: Euclidean norm of the merged delta of the round reduced last; None: the gateway has not seen it.
        autocorrelation: cosine with the previous round's delta; None: the gateway has not seen both.
    """

    in_ring: ClassVar[bool] = False
    fixed_step: ClassVar[str] = ""
    without: ClassVar[Mapping[str, str]] = {}
    keys: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[Need, ...]] = ()
    result: Literal["end_parameters", "held", "delta"]

    def __init__(self, desk: RoundsDesk) -> None:
        """Start from the newest version of the desk's state; nothing is reduced."""
        self._desk = desk
        self.overlap: Overlap = OVERLAPS.find(desk.policy.overlap)()
        self.stall = ""
        self.unfit: tuple[str, LeaseMark] | None = None
        self.delta_norm: float | None = None
        self.autocorrelation: float | None = None

    @staticmethod
    def objection(config: Config) -> str:
        """Return why values of the configuration do not suit the topology, naming the key; "" where they do."""
        return ""

    @property
    def version(self) -> int:
        """The run's newest version."""
        return self._desk.state.version

    # --- parameters -------------------------------------------------------------------------------------------

    @abstractmethod
    def able_workers(self) -> list[Trainer]:
        """Return the ready workers that can be given a lease now, in order of their names."""

    @abstractmethod
    def send_parameters(self, worker: Trainer, version: int) -> None:
        """Make `version` the parameters of the worker's next task, unless they already are."""

    def lacks_parameters(self, worker: Trainer) -> bool:
        """Take note of a worker without the version sent last; return whether that is news."""
        return True

    def announce(self, round_: int) -> None:
        """Send the new parameters of a round while the checkpoint is written."""
        ready = self._desk.ready_workers()
        for worker in self._desk.all_workers():
            # A leaving worker needs it for the last lease.
            pauses = worker.train is not None and worker.train.mixes == round_
            if pauses or (worker in ready and self.overlap.sends(worker.train, round_)):
                self.send_parameters(worker, round_)

    def finished(self, round_: int) -> None:
        """Take note that a round is finished: where a checkpoint was due, it is written."""

    def reports_steps(self, worker: Trainer) -> bool:
        """Whether a lease of this worker without a report means that it stands still."""
        return True

    def evaluators(self) -> list[Trainer]:
        """Return the ready workers that may be asked for held-out losses, in order of their names."""
        return self._desk.ready_workers()

    @property
    def is_evaluated(self) -> bool:
        """Whether versions are evaluated in this run, as far as workers are concerned."""
        return True

    @abstractmethod
    def can_evaluate(self, worker: Trainer, version: int) -> bool:
        """Whether a worker that is ready has `version`, or can be sent it now."""

    def start(self, worker: Trainer, *, early: bool = False) -> LeaseStart:
        """Return where a worker begins the next lease; `early`: of the round after the open one."""
        state = self._desk.state
        before, newest = state.open if early else state.closing, state.version
        contributed = () if before is None else before.contributions
        own = [c.task for c in contributed if c.task != worker.failed_after and self.holds(worker, c.task)]
        mixed = worker.mixed
        if early and worker.train is not None:
            own, mixed = [worker.train.task], worker.train.mixed
        return self.overlap.start(before, own, range(mixed + 1, newest + 1), newest)

    def holds(self, worker: Trainer, task: int) -> bool:
        """Whether a worker still holds the contribution of `task`, on the same connection."""
        return False

    def supply(self, now: float) -> LeaseMark | None:
        """Bring every ready worker to the newest version; return the mark to go back to when none has that."""
        return None

    def went_back(self, version: int) -> None:
        """Take note that the run was rolled back to `version`."""

    def restored(self, mark: LeaseMark, digest: str) -> None:
        """The gateway has the outer state after `mark` again, which has this digest; workers may drop their copies."""

    def newest(self) -> int:
        """Return the newest version that anybody may be asked to evaluate; older ones are given up."""
        return 0

    # --- contributions ----------------------------------------------------------------------------------------

    @abstractmethod
    def accept(self, worker: Trainer, task: int, attachment: int) -> None:
        """Keep where the result of an accepted task is."""

    def begins_to_arrive(self, worker: Trainer, train: TrainInFlight, message: int) -> bool:
        """Take note of a sound result whose tensors have begun to arrive; return whether it counts from now on.

        `message`: id of the message that brings it.
        """
        return False

    def arrived(self, task: int, event: Received) -> str | None:
        """Keep the tensors of a counted result; return the defect or "", None for an uncounted one."""
        return None

    def lost(self, ended: OpenRound) -> dict[int, str]:
        """Forget uncounted results of a round, and those without a live holder.

        Returns their tasks, and why.
        """
        return {}

    def keeps(self, worker: Trainer) -> bool:
        """Whether a worker has the only copy of needed state."""
        return False

    def take_refused(self) -> list[tuple[str, str]]:
        """Return whose contributions were refused since the last call, and why."""
        return []

    # --- the reduction ----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a round's reduction has begun and is not settled."""

    @property
    def may_close(self) -> bool:
        """Whether a reduction may begin as far as parameters are concerned."""
        return True

    @abstractmethod
    def begin(self, ended: OpenRound, why: str, now: float) -> None:
        """Reduce the contributions to a round that closes for the reason `why`."""

    @abstractmethod
    def begin_again(self, ended: OpenRound, now: float) -> None:
        """Reduce the remaining contributions, after `ReductionOutcome.RETRY`."""

    @abstractmethod
    def settle(self, ended: OpenRound, now: float) -> ReductionOutcome:
        """Return the outcome of the reduction; called after every event and at `next_deadline`."""

    def give_up(self) -> LeaseMark | None:
        """Nothing is left to be reduced: the round is trained again.

        Return where it began, if the run goes back to there while the round after it is trained.
        """
        return None

    def measured(self, round_: int, table: Table) -> None:
        """The gateway has compared the contributions of a round."""

    def made(self, round_: int, needed: tuple[int, ...]) -> None:
        """Take note of `round_`, whose parameters are the newest; `needed` are older ones under evaluation."""

    # --- reports of workers and the gateway ---------------------------------------------------------------------

    def ready(self, worker: Trainer, message: rm.Ready) -> None:
        """A worker connected that may still have parameters from before."""

    def take(self, worker: Trainer, event: Received, now: float) -> bool:
        """Take a message that belongs to the topology; return whether it did."""
        return False

    def stepped(self, done: OuterStepDone) -> None:
        """The gateway has taken the outer step of a round."""

    # --- time -------------------------------------------------------------------------------------------------

    def wait(self, session: int) -> Wait | None:
        """Return until when a worker that takes part in a reduction has to end it; None while it does not."""
        return None

    def next_deadline(self) -> float | None:
        """When `settle` or `supply` have something to do by themselves."""
        return None
