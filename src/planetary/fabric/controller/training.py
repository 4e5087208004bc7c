"""Rounds: when one opens, closes and is finished. Whether it closes is `diloco.rounds`' decision.

A round that is closed has *ended* until it is finished: its parameters are made, and kept where a checkpoint is due.
In lock-step nothing is trained meanwhile. With overlap the next round opens as soon as one closes.
"""

from __future__ import annotations

import math

from planetary.diloco.rounds import Action, decide_round
from planetary.fabric.controller.desk import RoundsDesk
from planetary.fabric.controller.leases import Leases
from planetary.fabric.controller.ring import Outcome, Ring
from planetary.fabric.controller.round_end import finished_record, metrics_of
from planetary.fabric.protocol.events import KeepParameters, TakeOuterStep, WriteCheckpoint
from planetary.fabric.protocol.records import Mark, RoundClosed, RoundStarted
from planetary.fabric.protocol.sessions import WorkerSession
from planetary.fabric.protocol.state import OpenRound
from planetary.fabric.protocol.status import RoundMetrics


class Training:
    """The round that is trained, and the one that has ended."""

    def __init__(self, desk: RoundsDesk, now: float) -> None:
        """Start at monotonic time `now`, with no round open."""
        self._desk = desk
        self.leases = Leases(desk, now)
        self.ring = None if desk.policy.ring is None else Ring(desk, desk.policy.ring)
        self._began: dict[int, float] = {}  # round under way -> when it was opened
        self._finished_at = -math.inf  # when the last round was finished
        self._why = ""  # ring: why the round that has ended was closed
        self._outer_pending = False
        self._checkpoint_pending = False  # the round is not finished before
        self._checkpoint_failures = 0  # of the round that has ended
        self.checkpoint_again_at: float | None = None
        self.unkept = ""  # why the last round's parameters are not on the disk, "" when they are
        self.first_round_open = False  # whether this incarnation has opened a round
        self.ask_again_at: float | None = None
        self.stall = ""  # why the round cannot go on, "" while it can

    # --- a round's life ---------------------------------------------------------------------------------------

    @property
    def may_open(self) -> bool:
        """Whether the next round could begin, as far as the rounds before it are concerned."""
        state = self._desk.state
        return state.open is None and state.round < self._desk.policy.rounds

    @property
    def ended(self) -> OpenRound | None:
        """The round that is closed and not finished."""
        state = self._desk.state
        if state.closing is not None:
            return state.closing
        ends = self._outer_pending or self._checkpoint_pending or (self.ring is not None and self.ring.busy)
        return state.open if ends else None

    @property
    def trained(self) -> OpenRound | None:
        """The round that is trained."""
        opened = self._desk.state.open
        return None if opened is self.ended else opened

    @property
    def checkpoint_under_way(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self._checkpoint_pending and self.checkpoint_again_at is None

    def open(self, now: float) -> None:
        """Begin the next round with every ready worker."""
        state = self._desk.state
        self.first_round_open = True
        number = (state.round if state.open is None else state.open.round) + 1
        self._began[number] = now
        self._desk.append(
            RoundStarted(round=number, version=state.version, workers=len(self._desk.able_workers())),
        )
        self.leases.begin(now)

    def advance(self, now: float) -> int | Mark | None:
        """Hand out what can be handed out, and close the round when it is time.

        Ring: returns the round when its parameters have come to exist (`outer_step_done` is to follow), or where to
        go back to when everything that was trained since is lost.
        """
        self.ask_again_at, self.stall = None, ""
        if self.checkpoint_again_at is not None:
            self.stall = f"the last checkpoint is tried again: {self.unkept}"
            if now >= self.checkpoint_again_at:
                self.checkpoint_again_at = None
                self._desk.out.append(WriteCheckpoint(self._desk.state.mark()))
        ended = self.ended
        if ended is not None and self.ring is not None and self.ring.busy:
            outcome = self._reduce(self.ring, ended, now)
            if outcome is not None:
                return outcome
        trained = self.trained
        if trained is not None:
            self._train(trained, now)
        return None

    def _train(self, opened: OpenRound, now: float) -> None:
        limits = self._desk.policy.round
        self.leases.hand_out(opened, now)
        if self._desk.state.closing is not None or not self._all_have_parameters:
            return
        verdict = decide_round(self.leases.view(opened), limits, now)
        if verdict.action is Action.REASSIGN:
            self.leases.reassign(opened, now)
            verdict = decide_round(self.leases.view(opened), limits, now)
        if verdict.action is Action.CLOSE:
            self._close(opened, verdict.why, now)
            return
        self.ask_again_at = verdict.ask_again_at
        if verdict.stalled:
            self.stall = f"round {opened.round}: {verdict.why}"

    def _close(self, opened: OpenRound, why: str, now: float) -> None:
        self.leases.end(opened, why)
        if self.ring is not None:
            self._why = why
            if self._desk.policy.overlap and opened.round < self._desk.policy.rounds:
                self.open(now)
            self.ring.begin(opened, now)
            return
        self._desk.append(RoundClosed(round=opened.round, contributions=len(opened.contributions), why=why))
        self._outer_pending = True
        self._desk.out.append(TakeOuterStep(opened.round, self.leases.take_attachments(opened)))

    def _reduce(self, ring: Ring, ended: OpenRound, now: float) -> int | Mark | None:
        """Ring: go on with the reduction; see `advance`."""
        match ring.settle(now):
            case Outcome.WAIT:
                self.stall = ring.stall
            case Outcome.DONE:
                self._desk.append(RoundClosed(round=ended.round, contributions=len(ended.contributions), why=self._why))
                self.leases.reduced(ended)
                self._outer_pending = True
                return ended.round
            case Outcome.RETRY:
                self.leases.withdraw_lost(ended, now)
                if ended.contributions:
                    self.leases.orphans_to_pool(ended, "its worker was lost in the reduction")
                    ring.begin(ended, now)
                else:
                    began = ring.give_up()
                    return None if self._desk.state.closing is None else began
        return None

    def outer_step_done(self, round_: int, now: float, needed: tuple[int, ...]) -> RoundMetrics | None:
        """New parameters exist; `needed` are the older versions that are still evaluated.

        Returns the round's metrics when no checkpoint is due; otherwise `checkpoint_done` will.
        """
        self._outer_pending = False
        if self.ring is None:
            self._desk.out.append(KeepParameters((*needed, round_)))
        for worker in self._desk.ready_workers():  # they travel while the checkpoint is being written
            self._desk.send_parameters(worker, round_)
        if self._desk.policy.checkpoint_due(round_):
            self._checkpoint_pending = True
            self._desk.out.append(WriteCheckpoint(self._desk.state.mark()))
            return None
        return self._finish(durable=False, now=now)

    def checkpoint_done(self, now: float) -> RoundMetrics:
        """The checkpoint is written."""
        self._checkpoint_pending, self._checkpoint_failures, self.unkept = False, 0, ""
        return self._finish(durable=True, now=now)

    def checkpoint_lost(self, reason: str, now: float) -> RoundMetrics | None:
        """The checkpoint could not be written.

        The next round's will do as well; but the last one is what the run was for, so it is tried again for a while:
        then this returns None.
        """
        policy, state = self._desk.policy, self._desk.state
        self.unkept = reason
        self._checkpoint_failures += 1
        if state.round + 1 == policy.rounds and self._checkpoint_failures < policy.last_checkpoint_tries:
            self.checkpoint_again_at = now + policy.round.grace_s
            return None
        self._checkpoint_pending, self._checkpoint_failures = False, 0
        return self._finish(durable=False, now=now)

    def _finish(self, *, durable: bool, now: float) -> RoundMetrics:
        state = self._desk.state
        ended = state.under_way(state.round + 1)
        # Where rounds overlap, the time until the end of the one before it is that one's.
        began = max(self._began.pop(ended.round), self._finished_at)
        self._finished_at = now
        finished = finished_record(ended, state.tokens_total, now - began, durable=durable)
        self._desk.append(finished)
        return metrics_of(finished, self._desk.policy.inner_steps)

    # --- losses -----------------------------------------------------------------------------------------------

    def withdraw_lost(self, now: float) -> None:
        """Ring: a worker is gone, and with it what it held; a reduction under way says itself what that means."""
        if self.ring is not None and self.trained is not None:
            self.leases.withdraw_lost(self.trained, now)

    def rolled_back(self, mark: Mark, reason: str, now: float) -> None:
        """Ring: the run went back to an earlier round; nothing is under way."""
        assert self.ring is not None
        self._began.clear()
        self.leases.void(reason, now)
        self.ring.went_back(mark.round)

    def stuck_at(self, worker: WorkerSession) -> float | None:
        """When a worker counts as stuck if nothing is heard of it until then; None while it has nothing to do."""
        times = [self.leases.stuck_at(worker)]
        if self.ring is not None:
            times.append(self.ring.stuck_at(worker.session))
        return min((t for t in times if t is not None), default=None)

    @property
    def _all_have_parameters(self) -> bool:
        """Overlap: whether a reduction may begin. In lock-step it waits for nobody."""
        return self.ring is None or not self._desk.policy.overlap or self.ring.may_close
