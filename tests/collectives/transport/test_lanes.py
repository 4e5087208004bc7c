"""One connection of a link: frames stay whole with several senders."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np

from planetary.collectives.protocol.messages import PeerInfo
from planetary.collectives.protocol.options import Spec
from planetary.collectives.reduction.operation import BufferedOperation, OutgoingPiece
from planetary.collectives.reduction.ring_plan import plan
from planetary.collectives.transport.lanes import Lane, Route
from planetary.collectives.transport.piece_frames import Introduction, pack_header
from planetary.collectives.transport.ports import HERE
from planetary.collectives.transport.sockets import SocketOptions
from waiting import HANG_S


class FullSocket:
    """Takes ten bytes of the first frame, and lets others come meanwhile."""

    def __init__(self, meanwhile: Any, expected: int) -> None:
        self.stream, self.full = bytearray(), threading.Event()
        self._expected = expected
        self._meanwhile = meanwhile
        self._tries = 0

    def try_write(self, *parts: memoryview) -> int:
        self._tries += 1
        if self._tries > 1:
            return 0
        self.stream += b"".join(parts)[:10]
        others = threading.Thread(target=self._meanwhile)
        others.start()
        others.join(HANG_S)
        return 10

    def write(self, timeout_s: float, *parts: memoryview) -> None:
        self.stream += b"".join(parts)
        if len(self.stream) >= self._expected:
            self.full.set()

    def close(self) -> None:
        pass


def test_nothing_goes_between_the_parts_of_a_frame() -> None:
    values = np.arange(50, dtype=np.float32)
    spec = Spec(kind="all_reduce", dtype="f32", count=50, op="sum")
    operation = BufferedOperation(spec, plan("all_reduce", 0, 2, count=50, piece=50), values, values, None)
    to = PeerInfo("id", "name", "127.0.0.1", 1, "machine", "")
    faults: list[str] = []
    way = Route(
        to=to,
        introduction=Introduction("ring", "me", "key"),
        options=SocketOptions(),
        tls=False,
        stall_s=5.0,
        lends=False,
        slot_bytes=0,
        on_fault=lambda peer, reason: faults.append(reason),
        ports=HERE,
    )
    lane = Lane(way, "test lane")

    def put(index: int) -> None:
        lane.given += 1
        lane.put(7, operation, OutgoingPiece(1, index, values[index : index + 10].view(np.uint8).data))

    def meanwhile() -> None:
        for index in (1, 2):
            put(index)

    frames = [pack_header(7, 1, index, 40) + values[index : index + 10].tobytes() for index in range(3)]
    connection = FullSocket(meanwhile, len(b"".join(frames)))
    lane.connection = cast("Any", connection)
    put(0)
    assert connection.full.wait(HANG_S), faults
    lane.close()
    assert bytes(connection.stream) == b"".join(frames)
    assert operation.sent == 3 * 40
