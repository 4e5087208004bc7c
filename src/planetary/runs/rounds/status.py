"""How the files and the status of a run in rounds are read."""

from __future__ import annotations

from planetary.runs.rounds.records import RoundsRecord
from planetary.runs.rounds.state import ControllerState
from planetary.runs.rounds.training_status import TrainingReader, TrainingStatus, status_of_files

READER = TrainingReader(
    name="rounds",
    records=RoundsRecord,
    fold=ControllerState,
    status=TrainingStatus,
    status_of_files=status_of_files,
)
