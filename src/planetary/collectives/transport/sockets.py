"""Sockets for bulk data: options, deadlines, and reads and writes that give up the memory between two calls."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planetary.core.clock import Clock, SystemClock
from planetary.core.errors import PeerError, RemoteProtocolError, ResourceError, UserError
from planetary.net.addresses import address_text, listening_socket, prepare_socket

_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")
_NEAR_BYTES = 1 << 20
_CLOCK = SystemClock()


@dataclass(frozen=True)
class SocketOptions:
    """How bulk sockets are set up. 0 or "" leaves the system's default."""

    buffer_bytes: int = 0  # buffer size of both directions; setting it turns the kernel's auto-tuning off
    congestion: str = ""  # e.g. "cubic" or "bbr", where the system has it
    source: str = ""  # the own address that connections leave from, on a machine with several


def near_options(given: SocketOptions) -> SocketOptions:
    """Return the options within a machine: no pacing, and bytes in flight that fit into the processor's cache."""
    return replace(given, congestion=given.congestion or "cubic", buffer_bytes=given.buffer_bytes or _NEAR_BYTES)


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `"host:port"` or `"[ipv6]:port"`. Raises `UserError`."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError(f"expected an address such as '127.0.0.1:48148' or '[::1]:48148', found {address!r}")
    return host, int(port)


def parse_advertised(address: str) -> tuple[str, int]:
    """Return host and port of `"host"`, `"host:port"`, `"::1"`, `"[::1]"` or `"[::1]:port"`; port 0 for none.

    Raises `UserError`.
    """
    bare = address[1:-1] if address.startswith("[") and address.endswith("]") else address
    if bare != address or ":" not in bare or (bare.count(":") > 1 and not bare.startswith("[")):
        return bare, 0
    return parse_address(address)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `UserError`: the address is an option of the master or communicator."""
    try:
        return listening_socket(host, port)
    except ResourceError as error:
        raise UserError(str(error)) from None


def dial(host: str, port: int, timeout_s: float, source: str = "") -> socket.socket:
    """Connect within `timeout_s` seconds. Raises `PeerError`. The socket has no timeout and TCP_NODELAY.

    `source`: the own address the connection leaves from; empty for the system's choice.
    """
    try:
        sock = socket.create_connection((host, port), timeout_s, (source, 0) if source else None)
    except OSError as error:
        leaving = f" from {source}" if source else ""
        raise PeerError(f"connecting to {address_text(host, port)}{leaving}: {error.strerror or error}") from None
    prepare_socket(sock)
    sock.settimeout(None)
    return sock


def prepare(sock: socket.socket, options: SocketOptions | None = None) -> None:
    """Set up a connection as all of them are, and for bulk data as the options say."""
    prepare_socket(sock)
    if options is not None and options.buffer_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.buffer_bytes)
    if options is not None and options.congestion and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # not loaded in this kernel: the kernel's default does too
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion.encode())


class DataConnection(ABC):
    """A connection for bulk data whose waits have limits. One thread reads at a time, and one writes.

    `try_read` and `try_write` never wait.
    """

    def __init__(self, clock: Clock) -> None:
        """`clock`: for deadlines."""
        self._clock = clock

    @abstractmethod
    def try_read(self, into: memoryview) -> int:
        """Read the available bytes and return their number, 0 for none. Raises `PeerError` at the end of the stream."""

    @abstractmethod
    def try_write(self, *parts: memoryview) -> int:
        """Write as many bytes as there is room for and return their number, 0 for none. Raises `PeerError`."""

    @abstractmethod
    def wait_readable(self, timeout_s: float | None) -> bool:
        """Wait for something to read; false after `timeout_s` seconds."""

    @abstractmethod
    def wait_writable(self, timeout_s: float | None) -> bool:
        """Wait for room; false after `timeout_s` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Close; a thread that waits in `wait_readable` wakes."""

    def read(self, into: memoryview, timeout_s: float | None) -> None:
        """Fill a view. Raises `PeerError` after `timeout_s` seconds without a byte; None waits for ever."""
        done = 0
        while done < len(into):
            count = self.try_read(into[done:])
            if not count and not self.wait_readable(timeout_s):
                raise _nothing_came(timeout_s)
            done += count

    def write(self, timeout_s: float, *parts: memoryview) -> None:
        """Write all. Raises `PeerError` when there is no room for `timeout_s` seconds."""
        left = list(parts)
        while left:
            count = self.try_write(*left)
            if not count and not self.wait_writable(timeout_s):
                raise _nothing_taken(timeout_s)
            _drop_written(left, count)

    def read_block(self, most: int, timeout_s: float | None) -> bytes:
        """Read a run of bytes behind a length prefix."""
        head = bytearray(_LENGTH.size)
        self.read(memoryview(head), timeout_s)
        data = _block(head, most)
        self.read(memoryview(data), 10.0 if timeout_s is None else timeout_s)
        return bytes(data)

    def read_block_by(self, most: int, deadline: float) -> bytes:
        """Read a run of bytes behind a length prefix, complete by monotonic time `deadline`.

        However slowly they come: a peer that sends a byte now and then is late all the same. Raises `PeerError`.
        """
        head = bytearray(_LENGTH.size)
        self._read_by(memoryview(head), deadline)
        data = _block(head, most)
        self._read_by(memoryview(data), deadline)
        return bytes(data)

    def _read_by(self, into: memoryview, deadline: float) -> None:
        done = 0
        while done < len(into):
            count = self.try_read(into[done:])
            if not count and not self.wait_readable(deadline - self._clock.monotonic()):
                raise PeerError(f"{done} of {len(into)} bytes came in time")
            done += count

    def write_block(self, data: bytes, timeout_s: float) -> None:
        """Write a run of bytes behind a length prefix."""
        self.write(timeout_s, memoryview(_LENGTH.pack(len(data)) + data))


class DataSocket(DataConnection):
    """A connected socket. Reads and writes wait in the kernel, one call for a whole piece; with TLS in `poll`, since a
    TLS socket that waits cannot be used from two threads.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected socket, plain or TLS."""
        super().__init__(_CLOCK)
        self._tls = isinstance(sock, ssl.SSLSocket)
        sock.setblocking(not self._tls)
        self.sock = sock
        self._no_wait = 0 if self._tls else socket.MSG_DONTWAIT
        self._limits = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}  # limits in the kernel, seconds; 0: none
        self._reads, self._writes = select.poll(), select.poll()
        self._reads.register(sock, select.POLLIN)
        self._writes.register(sock, select.POLLOUT)

    def try_read(self, into: memoryview) -> int:
        return self._receive(into, self._no_wait)

    def try_write(self, *parts: memoryview) -> int:
        return self._send(parts, self._no_wait)

    def wait_readable(self, timeout_s: float | None) -> bool:
        return bool(self._reads.poll(None if timeout_s is None else max(timeout_s, 0) * 1000))

    def wait_writable(self, timeout_s: float | None) -> bool:
        return bool(self._writes.poll(None if timeout_s is None else max(timeout_s, 0) * 1000))

    def read(self, into: memoryview, timeout_s: float | None) -> None:
        if self._tls or timeout_s is None:
            super().read(into, timeout_s)
            return
        done = 0
        while done < len(into):
            self._limit(socket.SO_RCVTIMEO, timeout_s)
            count = self._receive(into[done:], socket.MSG_WAITALL)
            if not count:
                raise _nothing_came(timeout_s)
            done += count

    def write(self, timeout_s: float, *parts: memoryview) -> None:
        if self._tls:
            super().write(timeout_s, *parts)
            return
        left = list(parts)
        while left:
            self._limit(socket.SO_SNDTIMEO, timeout_s)
            count = self._send(left, 0)
            if not count and any(len(part) for part in left):
                raise _nothing_taken(timeout_s)
            _drop_written(left, count)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.sock.close()

    def _receive(self, into: memoryview, flags: int) -> int:
        try:
            count = self.sock.recv_into(into, 0, flags)
        except (BlockingIOError, ssl.SSLWantReadError, InterruptedError):
            return 0
        except (OSError, ValueError) as error:
            raise PeerError(f"reading: {error}") from None
        if count == 0 and len(into):
            raise PeerError("the connection was closed")
        return count

    def _send(self, parts: Sequence[memoryview], flags: int) -> int:
        try:
            if not self._tls:
                return self.sock.sendmsg(parts, (), flags)
            for part in parts:
                if len(part):
                    return self.sock.send(part)
            return 0
        except (BlockingIOError, ssl.SSLWantWriteError, InterruptedError):
            return 0
        except (OSError, ValueError) as error:
            raise PeerError(f"writing: {error}") from None

    def _limit(self, option: int, timeout_s: float) -> None:
        if self._limits[option] != timeout_s:
            seconds, rest = divmod(max(timeout_s, 0.001), 1)
            try:
                self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(rest * 1e6)))
            except OSError as error:
                raise PeerError(f"the connection was closed: {error}") from None
            self._limits[option] = timeout_s


def _block(head: bytearray, most: int) -> bytearray:
    """Return memory for the bytes a length announces. Raises `RemoteProtocolError` for more than `most`."""
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise RemoteProtocolError(f"a block may have {most} bytes, one of {length} was announced")
    return bytearray(length)


def _drop_written(left: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes from the unwritten parts `left`, and empty parts before the next ones."""
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]


def _nothing_came(timeout_s: float | None) -> PeerError:
    return PeerError(f"nothing came for {timeout_s:g} s")


def _nothing_taken(timeout_s: float) -> PeerError:
    return PeerError(f"nothing was taken for {timeout_s:g} s")
