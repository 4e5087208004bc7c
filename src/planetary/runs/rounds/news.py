"""Notes on the checkpoints of a training, which outlast the next round."""

from __future__ import annotations

from planetary.fleet.protocol.news import LastingNews
from planetary.fleet.protocol.records import RunFinished
from planetary.machine.journal import Record
from planetary.runs.rounds.records import CheckpointFailed, CheckpointWritten, RunPaused, TrainingResumed


class TrainingNews(LastingNews):
    """News that stay important when the next round makes others old: notes of the run, each once."""

    def __init__(self) -> None:
        """Start with checkpoints that are written, as far as is known."""
        self._kept = 0  # the newest round with a checkpoint
        self._failing = False

    def of(self, record: Record) -> str:
        match record:
            case TrainingResumed():
                self._kept = record.mark.round
            case CheckpointWritten():
                again, self._failing, self._kept = self._failing, False, record.round
                return f"checkpoints are written again, beginning with that of round {record.round}" if again else ""
            case CheckpointFailed() if not self._failing:
                self._failing = True
                return (
                    f"the checkpoint of round {record.round} could not be written: {record.reason}. The run goes on "
                    f"and tries it again with the next ones; {self._newest()}"
                )
            case RunPaused():
                return (
                    f"the checkpoint of round {record.round} could not be written either: {record.reason}. The run "
                    f"pauses until there is room; {self._newest()}"
                )
            case RunFinished() if self._failing:
                return f"the last checkpoints could not be written: {self._newest()}"
            case _:
                pass
        return super().of(record)

    def _newest(self) -> str:
        return f"the newest is of round {self._kept}" if self._kept else "there is none yet"
