"""The halves of a connection as state machines without I/O: `Outbox` makes frames of messages, `Inbox` reads them.

**Sending.** Control frames go first, in the order of their ids. Then the messages with tensors take turns, one chunk
each, so a heartbeat never waits behind a gigabyte and two large messages share the line.

**Receiving.** The reader of the socket asks for `next_buffer()`, receives into it, and reports with `filled(n)`. While
a tensor chunk is arriving that buffer is the tensor's own memory, so the bytes are never copied. A message without
tensors comes out at once; one with tensors when all their bytes are there and every checksum matched. A small message
may therefore overtake a large one the peer is still sending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from planetary.core.errors import LocalProtocolError, RemoteProtocolError, ResourceError
from planetary.core.tensors import TensorSpec, host_dtype
from planetary.wire.frames import (
    MAGIC,
    PREFIX_BYTES,
    START_BYTES,
    Kind,
    Prefix,
    TensorHeader,
    check_chunk_bytes,
    check_start,
    declare,
    decode_declaration,
    decode_prefix,
    decode_tensor_header,
    encode_declaration,
    encode_prefix,
    encode_tensor_header,
    verify,
)
from planetary.wire.limits import MIB, Limits
from planetary.wire.message import Message, stamp
from planetary.wire.protocol import Protocol

DEFAULT_CHUNK_BYTES = MIB


class QueuedMessage:
    """A message under way to the peer. The arrays must not change before the last frame was sent.

    Attributes:
        nbytes: size of the frames taken so far.
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
        self.control_bytes = 0  # of the control frames not taken yet
        self._turns: deque[QueuedMessage] = deque()

    def __bool__(self) -> bool:
        """Whether there is a frame to send."""
        return bool(self._control or self._turns)

    def add(self, message: Message, tensors: Mapping[str, np.ndarray] | None = None) -> QueuedMessage:
        """Queue a message, stamped with the next id. Non-contiguous arrays are copied when their turn comes.

        Raises `LocalProtocolError` when the message or the tensors have no place on the wire; then nothing was queued.
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
        """Forget everything not taken yet. The peer gets no message: the connection is about to end."""
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


# --- receiving

Allocate = Callable[[Message, TensorSpec], np.ndarray]
"""Gives the array a declared tensor is received into, or raises `RemoteProtocolError` to refuse it."""


def allocate_any(_message: Message, spec: TensorSpec) -> np.ndarray:
    """Allocate whatever was declared."""
    return spec.empty()


def refuse_tensors(message: Message, spec: TensorSpec) -> np.ndarray:
    raise RemoteProtocolError(f"reading {type(message).__name__}: it may have no tensors, {spec.name!r} was declared")


def expect_tensors(specs: Iterable[TensorSpec]) -> Allocate:
    """Return a hook that allocates exactly these tensors and refuses other names, shapes and host types."""
    expected = {spec.name: spec for spec in specs}

    def allocate(message: Message, spec: TensorSpec) -> np.ndarray:
        wanted = expected.get(spec.name)
        if wanted is None:
            raise RemoteProtocolError(f"reading {type(message).__name__}: a tensor named {spec.name!r} is not expected")
        if wanted.shape != spec.shape or host_dtype(wanted.dtype) != host_dtype(spec.dtype):
            raise RemoteProtocolError(
                f"reading {type(message).__name__}: tensor {spec.name!r} must be "
                f"{wanted.dtype}{list(wanted.shape)}, declared was {spec.dtype}{list(spec.shape)}"
            )
        return wanted.empty()

    return allocate


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A whole message. `tensors` has one array per declared tensor, in the declared order."""

    message: Message
    tensors: Mapping[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(array.nbytes for array in self.tensors.values())


@dataclass(slots=True)
class _Arrival:
    """A message whose tensors are still arriving. A dropped duplicate has no arrays."""

    message: Message
    specs: tuple[TensorSpec, ...]
    arrays: dict[str, np.ndarray] | None
    views: list[memoryview] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)  # bytes, per tensor
    missing: int = 0  # bytes, of all tensors

    def __post_init__(self) -> None:
        if self.arrays is not None:
            self.views = [array.reshape(-1).view(np.uint8).data for array in self.arrays.values()]
        self.arrived = [0] * len(self.specs)
        self.missing = sum(spec.nbytes for spec in self.specs)


class Inbox:
    """Parses one connection's incoming bytes.

    After any error the inbox is broken: every further call raises the same error, because nothing that
    follows in the stream can be trusted.
    """

    def __init__(self, protocol: Protocol, limits: Limits | None = None, allocate: Allocate = allocate_any) -> None:
        self._protocol = protocol
        self.limits = limits or protocol.limits  # may be replaced between messages, e.g. once the peer is trusted
        self.allocate = allocate  # may be replaced between messages, too
        self.duplicates = 0  # messages dropped because their id had been seen
        self.bytes_received = 0
        self._last_id = 0
        self._arrivals: dict[int, _Arrival] = {}
        self._error: Exception | None = None
        self._scratch = bytearray()
        self._prefix: Prefix | None = None
        self._header: TensorHeader | None = None
        self._payload_crc = 0
        self._filled = 0
        self._view = memoryview(bytearray(PREFIX_BYTES))

    def next_buffer(self) -> memoryview:
        """Return where the next bytes belong: at least one byte long. Valid until the next `filled`."""
        if self._error is not None:
            raise self._error
        return self._view[self._filled :]

    def filled(self, count: int) -> list[ReceivedMessage]:
        """Take `count` bytes put at the start of `next_buffer()`; return the messages they completed.

        Raises `RemoteProtocolError` when the bytes break the protocol, `ResourceError` when there is no
        memory for a declared tensor, and whatever the allocation hook raises.
        """
        if self._error is not None:
            raise self._error
        if not 0 <= count <= len(self._view) - self._filled:
            raise LocalProtocolError(f"filled {count} bytes of a buffer of {len(self._view) - self._filled}")
        start = self._filled
        self._filled += count
        self.bytes_received += count
        try:
            if self._header is not None:  # a chunk's payload: checked while it is still in the processor's cache
                self._payload_crc = crc32(self._view[start : self._filled], self._payload_crc)
            if self._prefix is None and start < START_BYTES and self._filled >= len(MAGIC):
                # Before the rest is waited for: another protocol may never send it.
                check_start(self._view[: self._filled], self._protocol.version)
            if self._filled < len(self._view):
                return []
            return self._advance()
        except Exception as error:
            self._break(error)
            raise

    @property
    def between_frames(self) -> bool:
        """Whether the next byte is a frame's first."""
        return self._prefix is None and not self._filled

    def feed(
        self, data: bytes | bytearray | memoryview, received: list[ReceivedMessage] | None = None
    ) -> list[ReceivedMessage]:
        """Copy `data` in, as one would receive it, and return the messages it completed.

        With `received`, they are added to that list, which has those before an error, too.
        """
        rest = memoryview(data)
        received = received if received is not None else []
        while rest:
            if count := self._take_control(rest, received):
                rest = rest[count:]
                continue
            buffer = self.next_buffer()
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            received += self.filled(count)
            rest = rest[count:]
        return received

    def unfinished(self) -> str | None:
        """Return a description of the loss if the stream ended here; None without one."""
        live = [arrival for arrival in self._arrivals.values() if arrival.arrays is not None]
        if live:
            message, missing = live[0].message, live[0].missing
            return f"{type(message).__name__} {message.id} lacks {missing} bytes of its tensors"
        if self._prefix is not None or self._filled:
            return f"a frame lacks at least {len(self._view) - self._filled} bytes"
        return None

    # --- one region of the stream is complete

    def _advance(self) -> list[ReceivedMessage]:
        prefix = self._prefix
        if prefix is None:
            self._prefix = prefix = decode_prefix(self._view, self._protocol.version, self.limits)
            whole_frame = prefix.kind is not Kind.CHUNK
            self._expect(bytearray(prefix.header_bytes + (prefix.payload_bytes if whole_frame else 0)))
            return []
        if prefix.kind is Kind.CONTROL:
            received = self._on_control(prefix, self._view)
        elif self._header is not None:
            received = self._on_payload(prefix, self._header)
        else:
            header = self._read_header(prefix)
            if prefix.kind is Kind.CHUNK:
                self._expect(self._destination(prefix, header))
                self._header, self._payload_crc = header, 0
                return []
            self._on_withdraw(header)
            received = []
        self._prefix = self._header = None
        self._expect(bytearray(PREFIX_BYTES))
        return received

    def _expect(self, buffer: bytearray | memoryview) -> None:
        self._view, self._filled = memoryview(buffer), 0

    def _take_control(self, data: memoryview, received: list[ReceivedMessage]) -> int:
        """Read a control frame that is whole in `data`, without copying it; return the size, 0 for anything else."""
        if self._error is not None or self._prefix is not None or self._filled or len(data) < PREFIX_BYTES:
            return 0
        try:
            prefix = decode_prefix(data[:PREFIX_BYTES], self._protocol.version, self.limits)
            end = PREFIX_BYTES + prefix.header_bytes + prefix.payload_bytes
            if prefix.kind is not Kind.CONTROL or len(data) < end:
                return 0
            received += self._on_control(prefix, data[PREFIX_BYTES:end])
        except Exception as error:
            self._break(error)
            raise
        self.bytes_received += end
        return end

    def _break(self, error: Exception) -> None:
        self._error = error
        self._arrivals.clear()

    def _on_control(self, prefix: Prefix, data: memoryview) -> list[ReceivedMessage]:
        declaration, payload = data[: prefix.header_bytes], data[prefix.header_bytes :]
        if prefix.header_bytes or prefix.header_crc:
            verify("header", declaration, prefix.header_crc)
        verify("payload", payload, prefix.payload_crc)
        message = self._protocol.decode(payload)
        specs = decode_declaration(declaration, self.limits) if prefix.header_bytes else ()
        duplicate = message.id <= self._last_id
        if duplicate:
            self.duplicates += 1
            if message.id in self._arrivals:
                raise RemoteProtocolError(
                    f"reading {type(message).__name__}: message {message.id} came again while its tensors were arriving"
                )
        else:
            self._last_id = message.id
        if not specs:
            return [] if duplicate else [ReceivedMessage(message, {})]
        self._check_room(specs)
        arrays = None if duplicate else self._allocate(message, specs)
        arrival = _Arrival(message, specs, arrays)
        if arrival.missing:
            self._arrivals[message.id] = arrival
            return []
        return [] if arrays is None else [ReceivedMessage(message, arrays)]

    def _check_room(self, specs: tuple[TensorSpec, ...]) -> None:
        if len(self._arrivals) >= self.limits.messages_under_way:
            raise RemoteProtocolError(
                f"reading a message: expected at most {self.limits.messages_under_way} messages with tensors "
                "under way, found one more"
            )
        total = sum(spec.nbytes for spec in specs)
        total += sum(spec.nbytes for arrival in self._arrivals.values() for spec in arrival.specs)
        if total > self.limits.tensor_bytes:
            raise RemoteProtocolError(
                f"reading a message: the tensors under way may have {self.limits.tensor_bytes} bytes "
                f"together, they would have {total}"
            )

    def _allocate(self, message: Message, specs: tuple[TensorSpec, ...]) -> dict[str, np.ndarray]:
        arrays = {}
        for spec in specs:
            try:
                array = self.allocate(message, spec)
            except MemoryError:
                raise ResourceError(
                    f"receiving {type(message).__name__}: no memory for the {spec.nbytes} bytes of {spec.name!r}"
                ) from None
            wrong = array.shape != spec.shape or array.dtype != host_dtype(spec.dtype)
            if wrong or not array.flags.c_contiguous or not array.flags.writeable:
                raise LocalProtocolError(
                    f"receiving {spec.name!r}: expected a writable contiguous {spec.dtype}{list(spec.shape)} "
                    f"to receive into, the allocation hook gave {array.dtype}{list(array.shape)}"
                )
            arrays[spec.name] = array
        return arrays

    def _read_header(self, prefix: Prefix) -> TensorHeader:
        data = bytes(self._view[: prefix.header_bytes])
        verify("header", data, prefix.header_crc)
        return decode_tensor_header(data)

    def _arrival(self, header: TensorHeader) -> _Arrival:
        arrival = self._arrivals.get(header.message)
        if arrival is None:
            raise RemoteProtocolError(f"reading a tensor frame: message {header.message} has no tensors under way")
        return arrival

    def _destination(self, prefix: Prefix, header: TensorHeader) -> memoryview:
        arrival = self._arrival(header)
        if header.tensor >= len(arrival.specs):
            raise RemoteProtocolError(
                f"reading a tensor frame: message {header.message} has {len(arrival.specs)} tensors, "
                f"found a run of number {header.tensor}"
            )
        spec, arrived = arrival.specs[header.tensor], arrival.arrived[header.tensor]
        end = arrived + prefix.payload_bytes
        if header.offset != arrived or end > spec.nbytes:
            raise RemoteProtocolError(
                f"reading tensor {spec.name!r}: expected a run that starts at byte {arrived} and ends by "
                f"{spec.nbytes}, found one of {prefix.payload_bytes} bytes at {header.offset}"
            )
        if arrival.arrays is not None:
            return arrival.views[header.tensor][arrived:end]
        if len(self._scratch) < prefix.payload_bytes:
            self._scratch = bytearray(prefix.payload_bytes)
        return memoryview(self._scratch)[: prefix.payload_bytes]

    def _on_payload(self, prefix: Prefix, header: TensorHeader) -> list[ReceivedMessage]:
        if self._payload_crc != prefix.payload_crc:
            raise RemoteProtocolError(
                f"reading a run of tensor {header.tensor} of message {header.message}: its bytes do not "
                "match their checksum"
            )
        arrival = self._arrivals[header.message]
        arrival.arrived[header.tensor] += prefix.payload_bytes
        arrival.missing -= prefix.payload_bytes
        if arrival.missing:
            return []
        del self._arrivals[header.message]
        return [] if arrival.arrays is None else [ReceivedMessage(arrival.message, arrival.arrays)]

    def _on_withdraw(self, header: TensorHeader) -> None:
        self._arrival(header)
        del self._arrivals[header.message]
