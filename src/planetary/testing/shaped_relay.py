"""TCP connections through a slow network, in user space and without privileges: a relay that delays and limits them.

Listeners announce the relay's address instead of their own. The source address of a connection selects the way, so one
machine can stand for several places: each has a loopback address as the source of connections. Bytes in flight lie in
pipes of the kernel, so one thread carries some gigabytes a second. Linux only.

Limitation: the sender's kernel sees the relay's acknowledgements, not the receiver's, so a congestion window is not
limited by the round trip. `Way.flow_bytes_per_s` stands for that limit.

Delays and limits are computed apart from sockets and clocks: how much may enter a link now, and when it comes out.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from planetary.core.errors import UserError

QUANTUM = 32 << 10
"""Least bytes for a wake-up: a flow with room for fewer waits until there is room for as many. Fast flows wait for the
bytes that pass in `_QUANTUM_S`.
"""

_QUANTUM_S = 0.003
_BURST_S = 0.005  # a rested link's burst, as seconds of the rate; several ticks of the relay's timer
_LATE_S = 0.2  # greatest lateness of service without loss of rate; busy machines serve late
_ROUNDING_S = 1e-9  # guarantees room at the moment that `when` returns, despite rounding
_HELD_MOST = 64 << 20  # bytes in flight of one flow; more wait at the sender


class TokenBucket:
    """A limit of bytes per second, with some that may pass at once after a rest. Shared by several flows or not.

    A sender that always has data gets the whole rate even if it is served late; `rested` marks idle time.
    """

    def __init__(self, bytes_per_s: float, *, burst: int | None = None) -> None:
        """Start full. `bytes_per_s` may be infinite; `burst` is 5 ms of the rate by default.

        Raises `UserError` for a rate or burst of nothing.
        """
        if not bytes_per_s > 0 or (burst is not None and burst < 1):
            raise UserError(f"a link must let something pass: {bytes_per_s} bytes/s with bursts of {burst} bytes")
        self.bytes_per_s = bytes_per_s
        default = _HELD_MOST if math.isinf(bytes_per_s) else max(bytes_per_s * _BURST_S, 2 * QUANTUM)
        self.burst = float(default if burst is None else burst)
        self._tokens = self.burst
        self._at = -math.inf  # when `_tokens` was right; before the first use it is full whatever the time

    def rested(self, now: float) -> None:
        """The way was idle until now: no more than a burst has come together."""
        self._tokens, self._at = min(self._refilled(now), self.burst), max(now, self._at)

    def room(self, now: float) -> int:
        """Whole bytes that may pass now."""
        return int(self._refilled(now))

    def take(self, count: int, now: float) -> None:
        """`count` bytes pass; more than `room` make those that follow wait longer."""
        self._tokens = self._refilled(now) - count
        self._at = max(now, self._at)

    def when(self, count: int) -> float:
        """The moment at which `count` bytes, or a whole burst if that is less, have room; may lie in the past."""
        missing = min(count, self.burst) - self._tokens
        if missing <= 0 or math.isinf(self.bytes_per_s):
            return self._at
        return self._at + missing / self.bytes_per_s + _ROUNDING_S

    def _refilled(self, now: float) -> float:
        if math.isinf(self.bytes_per_s) or math.isinf(self._at):
            return self.burst
        most = self.burst + _LATE_S * self.bytes_per_s
        return min(self._tokens + max(now - self._at, 0.0) * self.bytes_per_s, most)


@dataclass(frozen=True)
class Way:
    """One direction between two places.

    Attributes:
        delay_s: seconds a byte travels.
        flow_bytes_per_s: limit of each connection by itself.
        shared: limits that all connections on this way share, e.g. a trunk between two regions.
    """

    delay_s: float = 0.0
    flow_bytes_per_s: float = math.inf
    shared: tuple[TokenBucket, ...] = ()


class Flow:
    """One direction of one connection: bytes enter as the limits allow and come out `delay_s` later, in order.

    It counts bytes; the user holds them.
    """

    def __init__(self, way: Way, opens_at: float) -> None:
        """Nothing enters before `opens_at`, when the connection is established."""
        self._delay_s, self._opens_at = way.delay_s, opens_at
        self._buckets: Sequence[TokenBucket] = (TokenBucket(way.flow_bytes_per_s), *way.shared)
        slowest = min(bucket.bytes_per_s for bucket in self._buckets)
        worth = QUANTUM if math.isinf(slowest) else max(QUANTUM, int(slowest * _QUANTUM_S))
        self._quantum = min(worth, *(int(bucket.burst) for bucket in self._buckets))
        self._line: deque[tuple[float, int]] = deque()
        self._held = 0
        self._resting = True
        self._ends_at = math.inf
        self.ended = False  # the end has entered

    @property
    def held(self) -> int:
        """Bytes that have entered and not come out."""
        return self._held

    def room(self, now: float) -> int:
        """Bytes that may enter now; 0 until there is room for some at once."""
        if self.ended or now < self._opens_at or self._held >= _HELD_MOST:
            return 0
        if self._resting:
            self._buckets[0].rested(now)
        room = min(bucket.room(now) for bucket in self._buckets)
        return room if room >= self._quantum else 0

    def enter(self, count: int, now: float) -> None:
        """Take `count` bytes in, at most as many as `room` returned."""
        self._resting = False
        for bucket in self._buckets:
            bucket.take(count, now)
        self._held += count
        self._line.append((now + self._delay_s, count))

    def end(self, now: float) -> None:
        """The sender has ended the stream."""
        self.ended, self._ends_at = True, now + self._delay_s

    def rest(self) -> None:
        """The sender has nothing to send now."""
        self._resting = True

    def come_out(self, now: float) -> int:
        """Return how many bytes have arrived by now, since the last time."""
        out = 0
        while self._line and self._line[0][0] <= now:
            out += self._line.popleft()[1]
        self._held -= out
        return out

    def over(self, now: float) -> bool:
        """Whether the end has arrived, after all bytes."""
        return self._ends_at <= now and not self._line

    def next_arrival(self) -> float:
        """When something comes out next, the end too; infinite when nothing is on the way."""
        return self._line[0][0] if self._line else self._ends_at

    def next_room(self, now: float) -> float:
        """When something may enter again, if nothing may now; infinite when only an arrival can change that."""
        if self.ended or self._held >= _HELD_MOST:
            return math.inf
        return max(self._opens_at, now, *(bucket.when(self._quantum) for bucket in self._buckets))


_PIPE_BYTES = 1 << 20  # largest pipe of an unprivileged user of Linux; a page per write, however short


@dataclass(slots=True)
class _Pipe:
    reads: int
    writes: int
    held: int = 0


class PipePool:
    """Pipes to use and to give back, for one thread. Linux only.

    Bytes wait in pipes of the kernel: `splice` moves the pages of one socket to another without a copy.
    """

    def __init__(self) -> None:
        """Start without pipes; they are made on demand."""
        self._free: list[_Pipe] = []

    def take(self) -> _Pipe:
        """Return an empty pipe."""
        if self._free:
            return self._free.pop()
        pipe = _Pipe(*os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
        with contextlib.suppress(OSError):  # over the user's limit: smaller ones, and more of them
            fcntl.fcntl(pipe.writes, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return pipe

    def give(self, pipe: _Pipe) -> None:
        """Take a pipe back; one that is not empty is closed."""
        if pipe.held == 0:
            self._free.append(pipe)
        else:
            os.close(pipe.reads)
            os.close(pipe.writes)

    def close(self) -> None:
        """Close the pipes that are not in use."""
        for pipe in self._free:
            os.close(pipe.reads)
            os.close(pipe.writes)
        self._free.clear()


class PipeLine:
    """Bytes of one stream, in order, in as many pipes as they need."""

    def __init__(self, pool: PipePool) -> None:
        """Start empty."""
        self._pool = pool
        self._pipes: deque[_Pipe] = deque()

    def fill(self, source: socket.socket, most: int) -> int:
        """Take up to `most` bytes from a socket that does not block; 0: it has ended.

        Raises `BlockingIOError` when nothing is there, `OSError` when the connection broke.
        """
        if self._pipes:
            last = self._pipes[-1]
            try:
                count = os.splice(source.fileno(), last.writes, most)
            except BlockingIOError:
                pass  # nothing is there, or the pipe is full: an empty one tells
            else:
                last.held += count
                return count
        pipe = self._pool.take()
        try:
            pipe.held = os.splice(source.fileno(), pipe.writes, most)
            return pipe.held
        finally:
            if pipe.held:
                self._pipes.append(pipe)
            else:
                self._pool.give(pipe)

    def drain(self, sink: socket.socket, most: int) -> int:
        """Give up to `most` bytes, as many as the line has, to a socket that does not block; return how many it took.

        Raises `OSError` when the connection broke.
        """
        given = 0
        while given < most:
            first = self._pipes[0]
            try:
                count = os.splice(first.reads, sink.fileno(), min(most - given, first.held))
            except BlockingIOError:
                break
            given += count
            first.held -= count
            if not first.held:
                self._pool.give(self._pipes.popleft())
        return given

    def close(self) -> None:
        """Discard the bytes."""
        while self._pipes:
            self._pool.give(self._pipes.popleft())


_READ_MOST = 512 << 10  # bytes of one flow in a turn
_IDLE_S = 0.2  # how long `close` may be noticed late if the wake-up is lost
_CONNECT_S = 5.0
_ANYWHERE = ""
_UNHINDERED = Way()


@dataclass(frozen=True)
class RelayRoute:
    """Where connections from one place go: the listener's address, and the way there and back."""

    target: tuple[str, int]
    there: Way = _UNHINDERED
    back: Way = _UNHINDERED


@dataclass(eq=False)
class _Half:
    """One direction of one relayed connection."""

    source: socket.socket
    sink: socket.socket
    flow: Flow
    line: PipeLine
    out: int = 0  # bytes that have arrived and were not taken by the sink yet
    blocked: bool = False  # the sink takes nothing
    ended: bool = False  # the sink's writing side was shut down: all has arrived


class ShapedRelay:
    """Any number of listeners, served by one thread. Also a context manager.

    Attributes:
        carried: bytes that came out so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the thread; `listen` adds listeners."""
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._halves: dict[socket.socket, tuple[_Half, _Half]] = {}  # socket -> (reads from it, writes to it)
        self._interest: dict[socket.socket, int] = {}
        self._busy: dict[_Half, None] = {}  # halves with a deadline or a blocked sink, in the order of service
        self._new: list[tuple[socket.socket, Mapping[str, RelayRoute]]] = []
        self._lock = threading.Lock()
        self._closing = False
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self.carried = 0
        self._pool = PipePool()
        self._thread = threading.Thread(target=self._run, name="shaped relay", daemon=True)
        self._thread.start()

    def listen(self, routes: Mapping[str, RelayRoute], host: str = "127.0.0.1", port: int = 0) -> int:
        """Relay connections to a new listener; return the port.

        `routes` is by the address a connection comes from; "" stands for all others. Connections from elsewhere are
        closed.
        """
        listener = socket.create_server((host, port), backlog=256)
        listener.setblocking(False)
        with self._lock:
            self._new.append((listener, dict(routes)))
        self._waker.send(b"x")
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Close every listener and connection."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join()
        self._waker.close()
        for listener, _ in self._new:
            listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for key in list(self._selector.get_map().values()):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                sock.close()
            for sock, (reading, _) in self._halves.items():
                sock.close()
                reading.line.close()
            self._pool.close()
            self._selector.close()

    def _turn(self) -> None:
        for key, events in self._selector.select(self._until_next()):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._woken:
                self._take_up()
            elif key.data is not None:
                self._accept(sock, key.data)
            elif sock in self._halves:
                reading, writing = self._halves[sock]
                # Reading waits for the turn of the half below, so flows take from a shared limit in turns.
                self._busy.setdefault(reading)
                if events & selectors.EVENT_WRITE:
                    writing.blocked = False
                    self._busy.setdefault(writing)
        now = self._clock()
        turn, self._busy = list(self._busy), {}
        for half in turn:
            if half.source in self._halves:  # the connection may have ended in this turn
                self._serve(half, now)
        if len(self._busy) > 1:  # the first one is last next time
            first = next(iter(self._busy))
            del self._busy[first]
            self._busy[first] = None

    def _until_next(self) -> float:
        now, soonest = self._clock(), _IDLE_S
        for half in self._busy:
            if not half.blocked:
                soonest = min(soonest, half.flow.next_arrival() - now)
            if not half.flow.room(now):
                soonest = min(soonest, half.flow.next_room(now) - now)
        return max(soonest, 0.0)

    def _take_up(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(64):
                pass
        with self._lock:
            new, self._new = self._new, []
        for listener, routes in new:
            self._selector.register(listener, selectors.EVENT_READ, routes)

    def _accept(self, listener: socket.socket, routes: Mapping[str, RelayRoute]) -> None:
        try:
            near, address = listener.accept()
        except OSError:
            return  # the client has gone again
        route = routes.get(str(address[0]), routes.get(_ANYWHERE))
        if route is None:
            near.close()
            return
        try:
            far = socket.create_connection(route.target, _CONNECT_S)
        except OSError:
            near.close()
            return
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The first byte follows the handshake, which takes a round trip.
        opens_at = self._clock() + route.there.delay_s + route.back.delay_s
        there = _Half(near, far, Flow(route.there, opens_at), PipeLine(self._pool))
        back = _Half(far, near, Flow(route.back, opens_at), PipeLine(self._pool))
        self._halves[near], self._halves[far] = (there, back), (back, there)
        self._busy[there] = self._busy[back] = None

    def _serve(self, half: _Half, now: float) -> None:
        try:
            self._read(half, now)
            self._write(half, now)
        except OSError:
            self._drop(half)
            return
        if half.ended and self._halves[half.sink][0].ended:
            self._drop(half)
            return
        self._attend(half.source)
        self._attend(half.sink)
        waits = not half.flow.ended and not half.flow.room(now)
        if half.blocked or half.out or waits or half.flow.held or (half.flow.ended and not half.ended):
            self._busy[half] = None

    def _read(self, half: _Half, now: float) -> None:
        room = half.flow.room(now)
        if not room or half.blocked:
            return
        most = min(room, _READ_MOST)
        try:
            count = half.line.fill(half.source, most)
        except BlockingIOError:
            half.flow.rest()
            return
        if count:
            half.flow.enter(count, now)
        else:
            half.flow.end(now)
        if count < most:
            half.flow.rest()

    def _write(self, half: _Half, now: float) -> None:
        half.out += half.flow.come_out(now)
        if half.blocked:
            return
        if half.out:
            count = half.line.drain(half.sink, half.out)
            self.carried += count
            half.out -= count
            half.blocked = half.out > 0
        if not half.out and not half.ended and half.flow.over(now):
            half.ended = True
            half.sink.shutdown(socket.SHUT_WR)

    def _attend(self, sock: socket.socket) -> None:
        """Select only the useful events of a socket: bytes without room in the flow would only wake the thread."""
        reading, writing = self._halves[sock]
        wanted = selectors.EVENT_WRITE if writing.blocked else 0
        if reading.flow.room(self._clock()) and not reading.blocked:
            wanted |= selectors.EVENT_READ
        known = self._interest.get(sock, 0)
        if wanted == known:
            return
        if not known:
            self._selector.register(sock, wanted, None)
        elif not wanted:
            self._selector.unregister(sock)
        else:
            self._selector.modify(sock, wanted, None)
        self._interest[sock] = wanted

    def _drop(self, half: _Half) -> None:
        """End both directions: one broke, or both have ended."""
        for sock in (half.source, half.sink):
            if self._interest.pop(sock, 0):
                self._selector.unregister(sock)
            for gone in self._halves.pop(sock):
                self._busy.pop(gone, None)
                gone.line.close()
            sock.close()
