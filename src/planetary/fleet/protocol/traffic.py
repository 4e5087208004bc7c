"""How many bytes each round cost: every message is counted for the round it belongs to.

Messages of a role name no round: they count for the round whose metrics are written next.
"""

from __future__ import annotations

from planetary.fleet.protocol import messages as m


def round_of(message: m.Message) -> int | None:
    """The round a message belongs to; None for messages of no round (hello, artifact, heartbeat).

    Round v + 1 starts from the parameters after round v, and that round's workers evaluate them.
    """
    match message:
        case m.Reduce() | m.ReduceDone() | m.ReduceFailed():
            return message.round
        case m.TrainTask() | m.TrainResult() | m.Progress():
            return message.round
        case m.Parameters() | m.EvalTask() | m.EvalResult():
            return message.version + 1
    return None


class WorkerTraffic:
    """Byte counts between gateway and workers. "Up" is towards the gateway."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.up = 0
        self.down = 0
        self._rounds: dict[int, list[int]] = {}
        self._of_roles = [0, 0]  # bytes up and down of roles since the newest metrics
        self._ring: dict[int, int] = {}

    def add_up(self, message: m.Message, nbytes: int) -> None:
        """Count the bytes of a worker's message."""
        self.up += nbytes
        self._add(message, 0, nbytes)
        match message:
            case m.ReduceDone():
                self._ring[message.round] = self._ring.get(message.round, 0) + message.sent_bytes
            case m.RingState():  # the result of the round
                self._rounds.setdefault(message.version, [0, 0])[0] += nbytes

    def add_down(self, message: m.Message, nbytes: int) -> None:
        """Count the bytes of a message to a worker."""
        self.down += nbytes
        self._add(message, 1, nbytes)
        if isinstance(message, m.RingState):  # the start of the next round
            self._rounds.setdefault(message.version + 1, [0, 0])[1] += nbytes

    def of_round(self, round_: int) -> tuple[int, int]:
        """Return (up, down) of a round so far, in bytes, with those of roles since the metrics before."""
        counts = self._rounds.setdefault(round_, [0, 0])
        for direction in (0, 1):
            counts[direction] += self._of_roles[direction]
            self._of_roles[direction] = 0
        return counts[0], counts[1]

    def of_ring(self, round_: int) -> int:
        """Payload the workers sent each other in a round."""
        return self._ring.get(round_, 0)

    def _add(self, message: m.Message, direction: int, nbytes: int) -> None:
        if isinstance(message, m.RoleMessage):
            self._of_roles[direction] += nbytes
            return
        round_ = round_of(message)
        if round_ is not None:
            self._rounds.setdefault(round_, [0, 0])[direction] += nbytes
