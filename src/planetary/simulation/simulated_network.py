"""A simulated network with TCP's promises, under the transports that asyncio's protocols use.

On one connection bytes arrive in order and once, or the connection breaks; between connections there is no order. A
direction between two machines can be cut: then nothing arrives that way until it heals, and neither end gets an
error. The shells detect such silence as in production, with heartbeats and time limits.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Iterable
from contextvars import copy_context
from typing import Any

import msgspec

from planetary.core.errors import ResourceError, UserError
from planetary.net.network import Listener, MakeGuest, MakeProtocol
from planetary.net.strangers import Door, Place
from planetary.simulation.event_loop import CURRENT, SimulatedLoop
from planetary.simulation.process import Process

HOST = "127.0.0.1"  # host of every simulated machine: `planetary.net` allows plain connections on loopback only
WINDOW = 256 * 1024  # bytes under way on a connection in one direction; more waits with the sender
SEGMENT_S = 0.2  # interval of arrivals on a slow line
FIRST_PORT = 20_000  # first port for listeners that ask for any free one


class SimulatedLink(msgspec.Struct, frozen=True):
    """Link of a simulated machine to all others; the machine's connections share it, each direction by itself.

    Attributes:
        bandwidth: bytes per second, each way.
        rtt_s: delay of a round trip, in seconds.
    """

    bandwidth: float
    rtt_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise `UserError` for a link that cannot be."""
        if not (self.bandwidth > 0 and self.rtt_s >= 0):
            raise UserError(f"a link needs a bandwidth above 0 and a round trip of 0 or more, found {self}")


class SimulatedNetwork:
    """All connections of a simulated world.

    Attributes:
        trace: arrivals: time, from, to, and the bytes, or "end" or "reset"; None: not kept.
        bytes_per_s: of a connection in one direction.
    """

    def __init__(self, loop: SimulatedLoop, delay_s: tuple[float, float] = (0.001, 0.05)) -> None:
        """`delay_s`: the range that one-way delays are drawn from."""
        self.loop = loop
        self.trace: list[tuple[float, str, str, str]] | None = None
        self.bytes_per_s = 1e9
        self.delay_s = delay_s
        self._cut: dict[tuple[str, str], int] = {}  # direction -> how many faults cut it now
        self._rates: dict[tuple[str, str], float] = {}  # rates of slow directions
        self._links: dict[str, SimulatedLink] = {}  # node -> link
        self._busy: dict[tuple[str, str], float] = {}  # (node, "out" or "in") -> end of the link's present transfer
        self._listeners: dict[int, SimulatedListener] = {}
        self._transports: dict[SimulatedTransport, None] = {}
        self._healed: list[asyncio.Future[None]] = []
        self._ports = FIRST_PORT
        self._slow: dict[str, float] = {}  # node -> slowdown of the node's packets
        self.context = copy_context()  # context of arrivals: belongs to no process
        self.context.run(CURRENT.set, None)

    def of(self, process: Process) -> NetworkOf:
        """Return the network as a process uses it: a `planetary.net.network.Network`."""
        process.on_exit.append(self._exited)
        return NetworkOf(self, process)

    def delay(self, *nodes: str) -> float:
        """Return the seconds a packet between nodes takes: half the sum of the links' `rtt_s`, or a draw."""
        links = self._links_of(*nodes)
        seconds = sum(link.rtt_s for link in links) / 2 if links else self.loop.random.uniform(*self.delay_s)
        return seconds * max((self._slow.get(node, 1.0) for node in nodes), default=1.0) if self._slow else seconds

    # --- faults -----------------------------------------------------------------------------------------------

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing arrives from one node at another."""
        cut = self._cut
        if not cut or source == target:
            return False
        return not cut.keys().isdisjoint(((source, target), (source, "*"), ("*", target)))

    def cut(self, source: str, target: str, seconds: float | None) -> None:
        """Cut the direction from `source` to `target` for some time; None: until `heal`. "*" is every other node."""
        direction = (source, target)
        self._cut[direction] = self._cut.get(direction, 0) + 1
        if seconds is not None:
            self.loop.call_later(seconds, self.heal, source, target, context=self.context)

    def heal(self, source: str, target: str) -> None:
        """End one cut of a direction."""
        direction = (source, target)
        self._cut[direction] -= 1
        if not self._cut[direction]:
            del self._cut[direction]
        for transport in list(self._transports):
            transport.go_on()
        healed, self._healed = self._healed, []
        for future in healed:
            if not future.done():
                future.set_result(None)

    def slow(self, node: str, factor: float, seconds: float) -> None:
        """Let packets from and to a node take so many times as long, for some time."""
        self._slow[node] = factor
        self.loop.call_later(seconds, self._slow.pop, node, None, context=self.context)

    def partition(self, node: str, seconds: float | None) -> None:
        """Cut a node off, in both directions; None: until `rejoin`."""
        self.cut(node, "*", seconds)
        self.cut("*", node, seconds)

    def rejoin(self, node: str) -> None:
        """End a partition of a node."""
        self.heal(node, "*")
        self.heal("*", node)

    def throttle(self, source: str, target: str, bytes_per_s: float | None) -> None:
        """Let bytes trickle from one node to another, one after the other; None: as fast as they do elsewhere."""
        if bytes_per_s is None:
            self._rates.pop((source, target), None)
        else:
            self._rates[source, target] = bytes_per_s

    def connect(self, node: str, link: SimulatedLink) -> None:
        """Give a node a link, the only limit and delay of the node's bytes."""
        self._links[node] = link

    def has_link(self, node: str) -> bool:
        """Return whether a node was given a link."""
        return node in self._links

    def _links_of(self, *nodes: str) -> list[SimulatedLink]:
        return [self._links[node] for node in nodes if node in self._links] if self._links else []

    def rate(self, source: str, target: str) -> float | None:
        """Return the bytes per second of a slow direction; None where it is not slow."""
        rates = [link.bandwidth for link in self._links_of(source, target)]
        if (source, target) in self._rates:
            rates.append(self._rates[source, target])
        return min(rates, default=None)

    def window(self, source: str, target: str) -> float:
        """Return how many bytes may be under way on a connection in one direction."""
        rate, links = self.rate(source, target), self._links_of(source, target)
        if links and rate is not None:  # as much as keeps a link busy, however long
            return rate * (2 * SEGMENT_S + sum(link.rtt_s for link in links))
        return WINDOW if rate is None else min(WINDOW, rate)

    def carry(self, source: str, target: str, nbytes: int, rate: float, after: float) -> float:
        """Return when bytes that follow others of their connection, which arrive at `after`, have arrived at `rate`."""
        ways = [way for way in ((source, "out"), (target, "in")) if way[0] in self._links]
        if not ways:
            return after + nbytes / rate
        end = max(self.loop.time(), *(self._busy.get(way, 0.0) for way in ways)) + nbytes / rate
        self._busy.update(dict.fromkeys(ways, end))
        return max(after, end + self.delay(source, target))

    def drop(self, node: str) -> int:
        """Break all connections of a node, as a router does that forgot them; return how many ends saw it."""
        ends = [t for t in self._transports if node in {t.process.node, t.peer.process.node}]
        for transport in ends:
            transport.break_off(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        return len(ends)

    # --- connections ------------------------------------------------------------------------------------------

    async def dial(self, process: Process, make: MakeProtocol, port: int) -> asyncio.Transport:
        """Connect; refused at once when no process listens, silent as long as a direction is cut."""
        await asyncio.sleep(self.delay())
        listener = self._listeners.get(port)
        while listener is not None and self._is_parted(process, listener.process):
            healed = self.loop.create_future()
            self._healed.append(healed)
            await healed
            await asyncio.sleep(self.delay())
            listener = self._listeners.get(port)
        if listener is None:
            await asyncio.sleep(self.delay())
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        here = SimulatedTransport(self, process, (HOST, port))
        self._ports += 1
        there = SimulatedTransport(self, listener.process, (HOST, self._ports))
        here.peer, there.peer = there, here
        self._transports[here] = self._transports[there] = None
        self.loop.call_soon(there.start, listener.make, context=listener.process.context)
        try:
            await asyncio.sleep(self.delay())
        except BaseException:
            here.abort()
            raise
        here.start(make)
        return here

    async def listen(self, process: Process, make: MakeProtocol, port: int) -> Listener:
        """Listen on a port, which is the same on all nodes."""
        if port == 0:
            self._ports += 1
            port = self._ports
        if port in self._listeners:
            holder = self._listeners[port].process.name
            raise ResourceError(f"cannot listen on {HOST}:{port}: the port is in use by {holder}")
        listener = self._listeners[port] = SimulatedListener(self, process, make, (HOST, port))
        return listener

    def forget(self, of: SimulatedTransport | SimulatedListener) -> None:
        """Remove a closed connection or listener."""
        if isinstance(of, SimulatedTransport):
            self._transports.pop(of, None)
        elif self._listeners.get(of.address[1]) is of:
            del self._listeners[of.address[1]]

    def note(self, source: Process, target: Process, what: str) -> None:
        """Keep an arrival in the trace."""
        if self.trace is not None:
            self.trace.append((self.loop.time(), source.name, target.name, what))

    def _is_parted(self, one: Process, other: Process) -> bool:
        return self.is_cut(one.node, other.node) or self.is_cut(other.node, one.node)

    def _exited(self, process: Process) -> None:
        """A process ended: the system resets the connections."""
        for listener in [of for of in self._listeners.values() if of.process is process]:
            listener.close()
        for transport in [of for of in self._transports if of.process is process]:
            transport.abandon()


class NetworkOf:
    """The network as one process uses it; see `planetary.net.network.Network`."""

    def __init__(self, network: SimulatedNetwork, process: Process) -> None:
        self._network, self._process = network, process

    async def dial(self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Transport:
        self._refuse(host, tls)
        return await self._network.dial(self._process, make, port)

    async def listen(self, make: MakeGuest, host: str, port: int, tls: ssl.SSLContext | None, door: Door) -> Listener:
        """There are no strangers in a simulated world."""
        self._refuse(host, tls)
        return await self._network.listen(self._process, lambda: make(Place()), port)

    @staticmethod
    def _refuse(host: str, tls: ssl.SSLContext | None) -> None:
        if tls is not None or host != HOST:
            raise UserError(f"the simulated network has plain connections on {HOST} only, asked for was {host}")


class SimulatedListener:
    """A listener on the simulated network."""

    def __init__(
        self, network: SimulatedNetwork, process: Process, make: MakeProtocol, address: tuple[str, int]
    ) -> None:
        self.process, self.make, self.address = process, make, address
        self._network = network

    def close(self) -> None:
        self._network.forget(self)

    async def wait_closed(self) -> None: ...


class _End(Exception):
    """The sender sends nothing more."""


class SimulatedTransport(asyncio.Transport):
    """One end of a connection: it holds the bytes in flight to the other end."""

    peer: SimulatedTransport

    def __init__(self, network: SimulatedNetwork, process: Process, peername: tuple[str, int]) -> None:
        super().__init__({"peername": peername})
        self.process = process
        self._network, self._loop = network, network.loop
        self._protocol: Any = None
        self._under_way: deque[tuple[float, bytes | Exception]] = deque()  # bytes under way and their time of arrival
        self._arrival: asyncio.TimerHandle | None = None
        self._in_flight = 0  # bytes the other end's protocol has not taken
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._high, self._low = 64 * 1024, 16 * 1024
        self._writing_paused = False
        self._eof = False  # nothing more is written
        self._end_due = False  # the end of the stream is still to be sent
        self._unread: deque[bytes | Exception] = deque()  # arrived, and not taken by the protocol
        self._reading_paused = False
        self._closing = False
        self._lost = False

    # --- calls of the network ---------------------------------------------------------------------------------

    def start(self, make: MakeProtocol) -> None:
        """The connection is made: in the process's context."""
        if self._lost:
            return
        protocol = make()
        protocol.connection_made(self)
        self._protocol = protocol
        self._feed()

    def go_on(self) -> None:
        """Deliver the due arrivals, unless the direction is cut."""
        if self._arrival is not None or not self._under_way:
            return
        if self._network.is_cut(self.process.node, self.peer.process.node):
            return
        due = max(self._under_way[0][0], self._loop.time())
        self._arrival = self._loop.call_at(due, self._arrive, context=self._network.context)

    def abandon(self) -> None:
        """End without callbacks, as the process is gone; the other end gets a reset."""
        self._lost = self._closing = True
        self._unsent.clear()
        self._put(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def break_off(self, error: Exception) -> None:
        """The connection broke, without a word to the other end."""
        self._under_way.clear()
        self._loop.call_soon(self._lose, error, context=self.process.context)

    def _put(self, item: bytes | Exception) -> None:
        rate = self._network.rate(self.process.node, self.peer.process.node)
        if rate is not None and isinstance(item, bytes):
            self._trickle(item, rate)
            return
        nbytes = len(item) if isinstance(item, bytes) else 0
        self._in_flight += nbytes
        arrival = (
            self._loop.time()
            + self._network.delay(self.process.node, self.peer.process.node)
            + nbytes / self._network.bytes_per_s
        )
        if self._under_way:
            arrival = max(arrival, self._under_way[-1][0])
        self._under_way.append((arrival, item))
        self.go_on()

    def _trickle(self, data: bytes, rate: float) -> None:
        """Put bytes on a slow line, in segments."""
        size, ends = max(1, int(rate * SEGMENT_S)), (self.process.node, self.peer.process.node)
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            before = self._under_way[-1][0] if self._under_way else self._loop.time()
            self._in_flight += len(piece)
            self._under_way.append((self._network.carry(*ends, len(piece), rate, before), piece))
        self.go_on()

    def _arrive(self) -> None:
        self._arrival = None
        if not self._under_way or self._network.is_cut(self.process.node, self.peer.process.node):
            return
        _, item = self._under_way.popleft()
        what = f"{len(item)} bytes" if isinstance(item, bytes) else "end" if isinstance(item, _End) else "reset"
        self._network.note(self.process, self.peer.process, what)
        self.peer.receive(item)
        if self._lost and not self._under_way:
            self._network.forget(self)
        self.go_on()

    def receive(self, item: bytes | Exception) -> None:
        """Take an arrival from the other end; the protocol gets it when the process runs."""
        if not self.process.alive or self._lost:
            return
        self._unread.append(item)
        if self.process.is_stopped:
            self._loop.call_soon(self._feed, context=self.process.context)
        else:
            self.process.in_context(self._feed)

    def acknowledge(self, nbytes: int) -> None:
        """Count bytes the other end's protocol has taken; there is room for as many again."""
        self._in_flight -= nbytes
        if self._unsent and self.process.alive:
            self._loop.call_soon(self._flush, context=self.process.context)

    # --- receiving: in the context of the process ---------------------------------------------------------------

    def _feed(self) -> None:
        while self._unread and self._protocol is not None and not self._lost:
            item = self._unread[0]
            if isinstance(item, _End):
                self._unread.popleft()
                if not self._closing and not self._protocol.eof_received():
                    self.close()
            elif isinstance(item, Exception):
                self._unread.popleft()
                self._lose(item)
            elif self._closing:
                self._unread.popleft()
                self.peer.acknowledge(len(item))
            elif self._reading_paused:
                return
            else:
                self._unread.popleft()
                self._give(item)
                self.peer.acknowledge(len(item))

    def _give(self, data: bytes) -> None:
        protocol = self._protocol
        if not isinstance(protocol, asyncio.BufferedProtocol):
            protocol.data_received(data)
            return
        view = memoryview(data)
        while view and not self._lost:
            buffer = memoryview(protocol.get_buffer(len(view))).cast("B")
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            protocol.buffer_updated(count)
            view = view[count:]

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._loop.call_soon(self._feed)

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    # --- sending ----------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._lost or self._eof:
            return
        self._unsent.append(bytes(data))
        self._unsent_bytes += len(data)
        self._flush()
        if self._unsent_bytes > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _flush(self) -> None:
        if self._lost:
            return
        window = self._network.window(self.process.node, self.peer.process.node)
        while self._unsent and self._in_flight < window:
            data = self._unsent.popleft()
            self._unsent_bytes -= len(data)
            self._put(data)
        if self._writing_paused and self._unsent_bytes <= self._low:
            self._writing_paused = False
            self._protocol.resume_writing()
        if not self._unsent:
            self._finish()

    def _finish(self) -> None:
        """Send the end of the stream if it is due, once all bytes are sent."""
        if self._end_due:
            self._end_due = False
            self._put(_End())
        if self._closing:
            self._loop.call_soon(self._lose, None)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self._eof or self._closing or self._lost:
            return
        self._eof = self._end_due = True
        self._flush()

    # --- the end ----------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing or self._lost:
            return
        self._closing = True
        self._end_due = self._end_due or not self._eof
        self._flush()

    def abort(self) -> None:
        if self._lost:
            return
        self._closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._put(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
        self._loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        if not self._under_way:
            self._network.forget(self)
        if self._protocol is not None:
            self._protocol.connection_lost(error)
