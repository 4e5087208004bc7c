"""How many bytes each round of leases cost: every message is counted for the round it belongs to."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from planetary.runs.rounds import messages as m
from planetary.runs.rounds.training_traffic import TrainingTraffic
from planetary.wire.message import Message


class RoundTraffic(TrainingTraffic):
    """Byte counts of a run in rounds, with the payload that workers of a ring sent each other."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self._ring: dict[int, int] = {}

    def add_up(self, message: Message, nbytes: int) -> None:
        super().add_up(message, nbytes)
        if isinstance(message, m.ReduceDone):
            self._ring[message.round] = self._ring.get(message.round, 0) + message.sent_bytes

    def counted(self, line: Any) -> Any:
        return replace(super().counted(line), bytes_ring=line.bytes_ring + self._ring.get(line.round, 0))

    def _round_of(self, message: Message, direction: int) -> int | None:
        """Round v + 1 starts from the parameters after round v, and that round's workers evaluate them."""
        match message:
            case m.Reduce() | m.ReduceDone() | m.ReduceFailed() | m.TrainTask() | m.TrainResult() | m.Progress():
                return message.round
            case m.Parameters() | m.EvalTask() | m.EvalResult():
                return message.version + 1
            case m.RingState():  # up: the result of the round; down: the start of the next one
                return message.version + direction
        return None
