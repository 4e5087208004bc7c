"""How many bytes each round cost.

A message names the round that it counts for, or none: then it counts for the round whose metrics are written next.
"""

from __future__ import annotations

from msgspec.structs import replace

from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.metrics import RoundMetrics


class WorkerTraffic:
    """Byte counts between gateway and workers. "Up" is towards the gateway.

    Messages of a role count for the round whose metrics are written next. A kind of run whose messages name their round
    derives from this.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.up = 0
        self.down = 0
        self._rounds: dict[int, list[int]] = {}
        self._of_roles = [0, 0]  # bytes up and down of roles since the newest metrics

    def add_up(self, message: m.Message, nbytes: int) -> None:
        """Count the bytes of a worker's message."""
        self.up += nbytes
        self._add(message, 0, nbytes)

    def add_down(self, message: m.Message, nbytes: int) -> None:
        """Count the bytes of a message to a worker."""
        self.down += nbytes
        self._add(message, 1, nbytes)

    def of_round(self, round_: int) -> tuple[int, int]:
        """Return (up, down) of a round so far, in bytes, with those of roles since the metrics before."""
        counts = self._rounds.setdefault(round_, [0, 0])
        for direction in (0, 1):
            counts[direction] += self._of_roles[direction]
            self._of_roles[direction] = 0
        return counts[0], counts[1]

    def counted(self, metrics: RoundMetrics) -> RoundMetrics:
        """Return the metrics of a round with its bytes on top: an earlier gateway may have counted some."""
        up, down = self.of_round(metrics.round)
        return replace(metrics, bytes_up=metrics.bytes_up + up, bytes_down=metrics.bytes_down + down)

    def _round_of(self, message: m.Message, direction: int) -> int | None:
        """Return the round a message counts for, up (0) or down (1); None: none, as of a hello or a heartbeat."""
        return None

    def _add(self, message: m.Message, direction: int, nbytes: int) -> None:
        if isinstance(message, m.RoleMessage):
            self._of_roles[direction] += nbytes
            return
        round_ = self._round_of(message, direction)
        if round_ is not None:
            self._rounds.setdefault(round_, [0, 0])[direction] += nbytes
