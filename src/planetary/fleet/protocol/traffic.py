"""How many bytes went between gateway and workers."""

from __future__ import annotations

from typing import TypeVar

from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import MetricsLine

LineT = TypeVar("LineT", bound=MetricsLine)


class WorkerTraffic:
    """Byte counts between gateway and workers. "Up" is towards the gateway. A kind with metrics derives from this."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.up = 0
        self.down = 0

    def add_up(self, message: m.Message, nbytes: int) -> None:
        """Count the bytes of a worker's message."""
        self.up += nbytes

    def add_down(self, message: m.Message, nbytes: int) -> None:
        """Count the bytes of a message to a worker."""
        self.down += nbytes

    def counted(self, line: LineT) -> LineT:
        """Return a line of metrics with the bytes that it is to have."""
        return line
