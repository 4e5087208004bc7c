"""How the files of a run in rounds are read."""

from __future__ import annotations

from planetary.fleet.protocol.kind_reader import KindReader
from planetary.runs.rounds.records import RoundsRecord
from planetary.runs.rounds.state import ControllerState

READER = KindReader(name="rounds", records=RoundsRecord, fold=ControllerState)
