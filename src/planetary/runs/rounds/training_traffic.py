"""How many bytes each round of a training cost.

A message names the round that it counts for, or none: then it counts for the round whose metrics are written next.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from planetary.fleet.protocol.messages import RoleMessage
from planetary.fleet.protocol.traffic import WorkerTraffic
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
