"""When the checkpoint of an ended round is written, and how the run goes on when writing fails."""

from __future__ import annotations

from planetary.fabric.controller.desk import RoundsDesk
from planetary.fabric.controller.guard import Guard
from planetary.fabric.protocol.fabric_events import WriteCheckpoint
from planetary.fabric.protocol.records import CheckpointFailed, RunPaused


class Checkpointing:
    """One checkpoint at a time. The round that it is of is not finished before it is written, or given up.

    The first that cannot be written is given up: the next one will do as well. When that cannot be written either the
    run waits until it can: more rounds would only be more to lose. The last one is the run's result, so it is tried
    several times.

    Attributes:
        pending: whether a round waits for its checkpoint.
        again_at: monotonic time at which it is tried again; None while it is written, or none is pending.
        unkept: why the last round's parameters are not on the disk, "" when they are.
    """

    def __init__(self, desk: RoundsDesk, guard: Guard) -> None:
        """Start with nothing pending."""
        self._desk, self._guard = desk, guard
        self.pending = False
        self.again_at: float | None = None
        self.unkept = ""
        self._failures = 0  # of the one that is pending
        self._missing = False  # whether the one before, which was due, could not be written

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self.pending and self.again_at is None

    @property
    def stall(self) -> str:
        """Why the run waits for its disk, "" while it does not."""
        return "" if self.again_at is None else f"the run waits until its checkpoint can be written: {self.unkept}"

    def begin(self) -> None:
        """Write the checkpoint of the round that has ended."""
        self.pending = True
        self._write()

    def go_on(self, now: float) -> None:
        """Try again when it is time."""
        if self.again_at is not None and now >= self.again_at:
            self.again_at = None
            self._write()

    def done(self) -> None:
        """The checkpoint is written."""
        self.pending, self._failures, self.unkept, self._missing = False, 0, "", False

    def lost(self, reason: str, now: float) -> bool:
        """The checkpoint could not be written; return whether it is tried again."""
        policy, round_ = self._desk.policy, self._desk.state.round + 1
        is_last = self._desk.is_last(round_)
        self.unkept = reason
        self._failures += 1
        if self._failures == 1 or is_last:
            self._desk.append(CheckpointFailed(round=round_, reason=reason))
        if self._failures == 1 and self._missing and not is_last:
            self._desk.append(RunPaused(round=round_, reason=reason))
        if self._failures < policy.last_checkpoint_tries if is_last else self._missing:
            self.again_at = now + policy.round.grace_s
            return True
        self.pending, self._failures, self._missing = False, 0, True
        return False

    def _write(self) -> None:
        self._desk.out.append(WriteCheckpoint(self._desk.state.mark(), self._guard.protected()))
