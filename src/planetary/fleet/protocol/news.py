"""Notes on a run that outlast the next round, made of the journal's records."""

from __future__ import annotations

from planetary.fleet.protocol import records as r
from planetary.machine.journal import Record


class LastingNews:
    """News that stay important when the next round makes others old: notes of the run, each once."""

    def __init__(self) -> None:
        """Start with checkpoints that are written, as far as is known."""
        self._kept = 0  # the newest round with a checkpoint
        self._failing = False

    def of(self, record: Record) -> str:
        """Return the lasting note of a record, or ""."""
        match record:
            case r.RunResumed():
                self._kept = record.mark.round
            case r.CheckpointWritten():
                again, self._failing, self._kept = self._failing, False, record.round
                return f"checkpoints are written again, beginning with that of round {record.round}" if again else ""
            case r.CheckpointFailed() if not self._failing:
                self._failing = True
                return (
                    f"the checkpoint of round {record.round} could not be written: {record.reason}. The run goes on "
                    f"and tries it again with the next ones; {self._newest()}"
                )
            case r.RunPaused():
                return (
                    f"the checkpoint of round {record.round} could not be written either: {record.reason}. The run "
                    f"pauses until there is room; {self._newest()}"
                )
            case r.RunFinished() if self._failing:
                return f"the last checkpoints could not be written: {self._newest()}"
            case _:
                pass
        return record.lasting_news

    def _newest(self) -> str:
        return f"the newest is of round {self._kept}" if self._kept else "there is none yet"
