"""The sending half of a connection as a state machine: messages in, frames out, no I/O.

Control frames go first, in the order of their ids. Then the messages with tensors take turns, one chunk each,
so that a heartbeat never waits behind a gigabyte and two large messages share the line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from planetary.core.errors import LocalProtocolError
from planetary.wire.declarations import declare, encode_declaration
from planetary.wire.frames import Kind, check_chunk_bytes, encode_prefix
from planetary.wire.limits import MIB, Limits
from planetary.wire.message import Message, stamp
from planetary.wire.protocol import Protocol
from planetary.wire.tensor_header import TensorHeader, encode_tensor_header

DEFAULT_CHUNK_BYTES = MIB


class QueuedMessage:
    """A message on its way out. Its arrays must not change before its last frame was sent.

    Attributes:
        nbytes: of its frames that were taken so far.
    """

    def __init__(self, message: Message, tensors: Mapping[str, np.ndarray], chunk_bytes: int) -> None:
        self.message = message  # with its id
        self.declared = False  # the control frame left the outbox
        self.nbytes = 0
        self._runs = _runs(tensors, chunk_bytes)
        self._next = next(self._runs, None)

    @property
    def has_more(self) -> bool:
        """Whether runs of tensor bytes are left to send."""
        return self._next is not None

    def take_run(self) -> tuple[TensorHeader, memoryview] | None:
        """Return the next run of tensor bytes and where it belongs."""
        if self._next is None:
            return None
        tensor, offset, data = self._next
        self._next = next(self._runs, None)
        return TensorHeader(self.message.id, tensor, offset), data


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame to send: `head`, then `payload`. `last` is set when it completes `outgoing`."""

    head: bytes
    payload: memoryview | None
    outgoing: QueuedMessage | None
    last: bool


class Outbox:
    """Orders the frames that one connection sends."""

    def __init__(
        self, protocol: Protocol, limits: Limits | None = None, chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> None:
        self._protocol = protocol
        self._limits = limits or protocol.limits
        check_chunk_bytes(chunk_bytes, self._limits)
        self._chunk_bytes = chunk_bytes
        self._last_id = 0
        self._control: deque[Frame] = deque()
        self.control_bytes = 0  # of the control frames that were not taken yet
        self._turns: deque[QueuedMessage] = deque()

    def __bool__(self) -> bool:
        """Whether there is a frame to send."""
        return bool(self._control or self._turns)

    def add(self, message: Message, tensors: Mapping[str, np.ndarray] | None = None) -> QueuedMessage:
        """Queue a message, stamped with the next id. Non-contiguous arrays are copied when their turn comes.

        Raises `LocalProtocolError` when the message or its tensors have no place on the wire; then
        nothing was queued.
        """
        tensors = tensors or {}
        stamped = stamp(message, self._last_id + 1)
        payload = self._protocol.encode(stamped, self._limits)
        header = encode_declaration(declare(tensors), self._limits) if tensors else b""
        self._last_id += 1
        outgoing = QueuedMessage(stamped, tensors, self._chunk_bytes)
        head = encode_prefix(self._protocol.version, Kind.CONTROL, header, payload) + header + payload
        self._queue_control(Frame(head, None, outgoing, last=not outgoing.has_more))
        return outgoing

    def post(self, message: Message) -> None:
        """Queue a message without tensors that is not tracked. Raises as `add` does."""
        self._queue_control(Frame(self._frame_of(message), None, None, last=True))

    def withdraw(self, outgoing: QueuedMessage) -> None:
        """Send nothing more of a message; tell the peer if it knows of it. Harmless when all was sent."""
        if not outgoing.declared:
            self._control = deque(frame for frame in self._control if frame.outgoing is not outgoing)
            self.control_bytes = sum(len(frame.head) for frame in self._control)
        elif outgoing in self._turns:
            self._turns.remove(outgoing)
            header = encode_tensor_header(TensorHeader(outgoing.message.id, 0, 0))
            prefix = encode_prefix(self._protocol.version, Kind.WITHDRAW, header, b"")
            self._queue_control(Frame(prefix + header, None, None, last=False))

    def clear(self) -> None:
        """Forget everything that was not taken yet. The peer is not told: the connection is about to end."""
        self._control.clear()
        self._turns.clear()
        self.control_bytes = 0

    def next_frame(self) -> Frame | None:
        """Take the frame to send next, or None when there is none."""
        if self._control:
            frame = self._control.popleft()
            self.control_bytes -= len(frame.head)
            if frame.outgoing is not None:
                frame.outgoing.declared = True
                frame.outgoing.nbytes += len(frame.head)
                if not frame.last:
                    self._turns.append(frame.outgoing)
            return frame
        if not self._turns:
            return None
        outgoing = self._turns.popleft()
        run = outgoing.take_run()
        if run is None:
            raise AssertionError("a message without runs left was given a turn")
        header, data = run
        if outgoing.has_more:
            self._turns.append(outgoing)
        encoded = encode_tensor_header(header)
        head = encode_prefix(self._protocol.version, Kind.CHUNK, encoded, data) + encoded
        outgoing.nbytes += len(head) + len(data)
        return Frame(head, data, outgoing, last=not outgoing.has_more)

    def _queue_control(self, frame: Frame) -> None:
        self._control.append(frame)
        self.control_bytes += len(frame.head)

    def frame_of(self, message: Message) -> bytes:
        """Return the frame of a message without tensors, to be sent now: where no other one waits.

        Raises as `add` does.
        """
        if self._control:
            raise LocalProtocolError(f"sending {type(message).__name__}: others were queued before it and wait")
        return self._frame_of(message)

    def _frame_of(self, message: Message) -> bytes:
        payload = self._protocol.encode(stamp(message, self._last_id + 1), self._limits)
        self._last_id += 1
        return encode_prefix(self._protocol.version, Kind.CONTROL, b"", payload) + payload


def _runs(tensors: Mapping[str, np.ndarray], chunk_bytes: int) -> Iterator[tuple[int, int, memoryview]]:
    for index, array in enumerate(tensors.values()):
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        for offset in range(0, len(data), chunk_bytes):
            yield index, offset, data[offset : offset + chunk_bytes]
