"""Rounds: when one opens, closes and is finished. Whether it closes is `diloco.rounds`' decision.

A round that is closed has *ended* until it is finished: its parameters are made, and kept where a checkpoint is due.
In lock-step nothing is trained meanwhile. With overlap the next round opens as soon as one closes.
"""

from __future__ import annotations

import math

from planetary.diloco.rounds import Action, decide_round
from planetary.fabric.controller.checkpointing import Checkpointing
from planetary.fabric.controller.desk import RoundsDesk
from planetary.fabric.controller.guard import Guard
from planetary.fabric.controller.leases import Leases
from planetary.fabric.controller.round_end import finished_record, metrics_of
from planetary.fabric.controller.stalls import Wait
from planetary.fabric.controller.topology import Outcome, Topology
from planetary.fabric.protocol.records import Mark, RoundStarted
from planetary.fabric.protocol.sessions import WorkerSession
from planetary.fabric.protocol.state import OpenRound
from planetary.fabric.protocol.status import RoundMetrics


class Training:
    """The round that is trained, and the one that has ended."""

    def __init__(self, desk: RoundsDesk, topology: Topology, guard: Guard, now: float) -> None:
        """Start at monotonic time `now`, with no round open."""
        self._desk, self._topology, self._guard = desk, topology, guard
        self.leases = Leases(desk, topology, guard, now)
        self._began: dict[int, float] = {}  # round under way -> when it was opened
        self._finished_at = -math.inf  # when the last round was finished
        self.checkpoint = Checkpointing(desk, guard)
        self.first_round_open = False  # whether this incarnation has opened a round
        self.ask_again_at: float | None = None
        self.stall = ""  # why the round cannot go on, "" while it can

    # --- a round's life ---------------------------------------------------------------------------------------

    @property
    def may_open(self) -> bool:
        """Whether the next round could begin, as far as the rounds before it are concerned."""
        state = self._desk.state
        return state.open is None and self._desk.goes_on_after(state.round)

    @property
    def ended(self) -> OpenRound | None:
        """The round that is closed and not finished."""
        state = self._desk.state
        if state.closing is not None:
            return state.closing
        ends = self.checkpoint.pending or self._topology.busy
        return state.open if ends else None

    @property
    def trained(self) -> OpenRound | None:
        """The round that is trained."""
        opened = self._desk.state.open
        return None if opened is self.ended else opened

    def open(self, now: float) -> None:
        """Begin the next round with every ready worker."""
        state = self._desk.state
        self.first_round_open = True
        number = (state.round if state.open is None else state.open.round) + 1
        self._began[number] = now
        self._desk.append(
            RoundStarted(round=number, version=state.version, workers=len(self._topology.able_workers())),
        )
        self.leases.begin(now)

    def advance(self, now: float) -> int | Mark | None:
        """Hand out what can be handed out, and close the round when it is time.

        Returns the round when its parameters have come to exist (`outer_step_done` is to follow), or where to go back
        to when everything that was trained since is lost.
        """
        self.ask_again_at, self.stall = None, self.checkpoint.stall
        self.checkpoint.go_on(now)
        ended = self.ended
        if ended is not None and self._topology.busy:
            outcome = self._reduce(ended, now)
            if outcome is not None:
                return outcome
        trained = self.trained
        if trained is not None:
            self._train(trained, now)
        return None

    def _train(self, opened: OpenRound, now: float) -> None:
        limits = self._desk.policy.round
        self.leases.hand_out(opened, now)
        if self._desk.state.closing is not None or not self._topology.may_close:
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
        self.leases.end(opened, why, now)
        if self._topology.overlaps and self._desk.goes_on_after(opened.round):
            self.open(now)
        self._topology.begin(opened, why, now)

    def _reduce(self, ended: OpenRound, now: float) -> int | Mark | None:
        """Go on with the reduction; see `advance`."""
        match self._topology.settle(ended, now):
            case Outcome.WAIT:
                self.stall = self._topology.stall
            case Outcome.DONE:
                return ended.round
            case Outcome.RETRY:
                self.leases.withdraw_lost(ended, now)
                if ended.contributions:
                    self.leases.orphans_to_pool(ended, "what was trained of it does not count")
                    self._topology.begin_again(ended, now)
                else:
                    began = self._topology.give_up()
                    return None if self._desk.state.closing is None else began
        return None

    def outer_step_done(self, round_: int, now: float, needed: tuple[int, ...]) -> RoundMetrics | None:
        """New parameters exist; `needed` are the older versions that are still evaluated.

        Returns the round's metrics when no checkpoint is due; otherwise `checkpoint_done` will.
        """
        self._topology.made(round_, needed)
        for worker in self._desk.ready_workers():  # they travel while the checkpoint is being written
            self._topology.send_parameters(worker, round_)
        if self._desk.checkpoint_due(round_):
            self.checkpoint.begin()
            return None
        return self._finish(durable=False, now=now)

    def checkpoint_done(self, now: float) -> RoundMetrics:
        """The checkpoint is written."""
        self.checkpoint.done()
        return self._finish(durable=True, now=now)

    def checkpoint_lost(self, reason: str, now: float) -> RoundMetrics | None:
        """The checkpoint could not be written; while it is tried again this returns None."""
        return None if self.checkpoint.lost(reason, now) else self._finish(durable=False, now=now)

    def _finish(self, *, durable: bool, now: float) -> RoundMetrics:
        state = self._desk.state
        ended = state.under_way(state.round + 1)
        # Where rounds overlap, the time until the end of the one before it is that one's.
        began = max(self._began.pop(ended.round), self._finished_at)
        self._finished_at = now
        finished = finished_record(
            ended, state.tokens_total, now - began, durable=durable, delta_norm=self._topology.delta_norm
        )
        self._desk.append(finished)
        return metrics_of(finished, self._desk.policy.inner_steps)

    # --- losses -----------------------------------------------------------------------------------------------

    def withdraw_lost(self, now: float) -> None:
        """A worker is gone, and with it what it held; a reduction under way says itself what that means."""
        if self.trained is not None:
            self.leases.withdraw_lost(self.trained, now)

    def rolled_back(self, mark: Mark, reason: str, now: float) -> None:
        """The run went back to an earlier round; nothing is under way."""
        self._began.clear()
        self.leases.void(reason, now)
        self._topology.went_back(mark.round)

    def wait(self, worker: WorkerSession) -> Wait | None:
        """Return until when a worker has to show progress; None while it has nothing to do."""
        waits = (self.leases.wait(worker), self._topology.wait(worker.session))
        return min((wait for wait in waits if wait is not None), key=lambda wait: wait.until, default=None)
