"""How many bytes each round cost.

A message names the round that it counts for, or none: then it counts for the round whose metrics are written next.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from planetary.fleet.protocol.messages import RoleMessage
from planetary.fleet.protocol.traffic import WorkerTraffic
from planetary.runs.rounds import messages as m
from planetary.runs.rounds.metrics import RoundMetrics
from planetary.wire.message import Message


class TrainingTraffic(WorkerTraffic):
    """Byte counts of a training. Messages of a role count for the round whose metrics are written next."""

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self._rounds: dict[int, list[int]] = {}
        self._of_roles = [0, 0]  # bytes up and down of roles since the newest metrics

    def add_up(self, message: Message, nbytes: int) -> None:
        super().add_up(message, nbytes)
        self._add(message, 0, nbytes)

    def add_down(self, message: Message, nbytes: int) -> None:
        super().add_down(message, nbytes)
        self._add(message, 1, nbytes)

    def of_round(self, round_: int) -> tuple[int, int]:
        """Return (up, down) of a round so far, in bytes, with those of roles since the metrics before."""
        counts = self._rounds.setdefault(round_, [0, 0])
        for direction in (0, 1):
            counts[direction] += self._of_roles[direction]
            self._of_roles[direction] = 0
        return counts[0], counts[1]

    def counted(self, line: Any) -> Any:
        """Return the metrics of a round with its bytes on top: an earlier gateway may have counted some."""
        assert isinstance(line, RoundMetrics)
        up, down = self.of_round(line.round)
        return replace(line, bytes_up=line.bytes_up + up, bytes_down=line.bytes_down + down)

    def _round_of(self, message: Message, direction: int) -> int | None:
        """Return the round a message counts for, up (0) or down (1); None: none, as of a hello or a heartbeat."""
        return None

    def _add(self, message: Message, direction: int, nbytes: int) -> None:
        if isinstance(message, RoleMessage):
            self._of_roles[direction] += nbytes
            return
        round_ = self._round_of(message, direction)
        if round_ is not None:
            self._rounds.setdefault(round_, [0, 0])[direction] += nbytes


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
