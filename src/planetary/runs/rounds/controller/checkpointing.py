"""When a checkpoint is written, and how a run goes on when writing fails. Every kind of run that trains has one."""

from __future__ import annotations

from collections.abc import Callable

from planetary.machine.journal import Record
from planetary.runs.rounds.records import CheckpointFailed, RunPaused


class Checkpointing:
    """One checkpoint at a time.

    The first that cannot be written is given up: the next one will do as well. When that cannot be written either the
    run waits until the newest can: more rounds would only be more to lose. The last one is the run's result, so it is
    tried several times.

    Attributes:
        pending: whether one is to be written.
        round: of which it is, or the newest one was; 0 before the first.
        again_at: monotonic time at which it is tried again; None while it is written, or none is pending.
        unkept: why the newest one is not on the disk, "" when it is.
    """

    def __init__(
        self,
        append: Callable[[Record], None],
        write: Callable[[], int],
        is_last: Callable[[int], bool],
        *,
        tries: int,
        pause_s: float,
    ) -> None:
        """Start with nothing pending.

        Args:
            append: takes records of the run's journal.
            write: has the newest round written, and returns the number.
            is_last: whether no round follows one.
            tries: of the last round's checkpoint.
            pause_s: between two tries.
        """
        self._append, self._write_newest, self._is_last = append, write, is_last
        self._tries, self._pause_s = tries, pause_s
        self.pending = False
        self.round = 0
        self.again_at: float | None = None
        self.unkept = ""
        self._failures = 0  # failures of the pending checkpoint
        self._last_failures = 0  # failures of the last round's checkpoint
        self._missing = False  # the previous due checkpoint could not be written

    @property
    def under_way(self) -> bool:
        """Whether a checkpoint is being written now."""
        return self.pending and self.again_at is None

    @property
    def pauses(self) -> bool:
        """Whether the run waits for the disk."""
        return self.pending and self._missing and self._failures > 0

    @property
    def given_up(self) -> bool:
        """Whether the newest round's checkpoint is not tried again: the next one's is, unless there is none."""
        tried = self._last_failures >= self._tries if self._is_last(self.round) else True
        return bool(self.unkept) and not self.pending and tried

    @property
    def stall(self) -> str:
        """Why the run waits for the disk, "" while it does not."""
        return "" if self.again_at is None else f"the run waits until its checkpoint can be written: {self.unkept}"

    def begin(self) -> None:
        """Write the checkpoint of the newest round."""
        before, self.pending = self.round, True
        self.round = self._write_newest()
        if self.round != before:
            self._last_failures = 0

    def go_on(self, now: float) -> None:
        """Try again when it is time."""
        if self.again_at is not None and now >= self.again_at:
            self.again_at = None
            self.round = self._write_newest()

    def done(self) -> None:
        """The checkpoint is written."""
        self.pending, self._failures, self.unkept, self._missing = False, 0, "", False

    def lost(self, reason: str, now: float) -> bool:
        """The checkpoint could not be written; return whether it is tried again."""
        is_last = self._is_last(self.round)
        self.unkept = reason
        self._failures += 1
        self._last_failures += is_last
        if self._failures == 1 or is_last:
            self._append(CheckpointFailed(round=self.round, reason=reason))
        if self._failures == 1 and self._missing and not is_last:
            self._append(RunPaused(round=self.round, reason=reason))
        if self._last_failures < self._tries if is_last else self._missing:
            self.again_at = now + self._pause_s
            return True
        self.pending, self._failures, self._missing = False, 0, True
        return False
