"""Drive a machine on an event loop: events in from anywhere, instructions out, ticks on time, messages in order.

A `Shell` drives a machine. `SendQueues` lie in front of each connection. The shell of a participant with one
connection, to the gateway, is a `ClientShell`: it dials, sends and ends for the machine. That of a gateway is a
`ServerShell`: it has a session for each peer, and answers instructions in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from planetary.core.clock import Clock
from planetary.core.errors import ClosedError, LocalProtocolError, PlanetaryError, TrustError, UserError
from planetary.core.tensors import TensorSpec
from planetary.fleet.protocol.events import PayloadArrives, PayloadSent, SendFailed
from planetary.fleet.protocol.messages import Shutdown
from planetary.fleet.protocol.traffic import WorkerTraffic
from planetary.machine.events import (
    Close,
    Closed,
    Dial,
    Event,
    Exit,
    Instruction,
    Opened,
    Payload,
    Received,
    Send,
    Tick,
)
from planetary.machine.machine import Machine
from planetary.net.client import Trust, connect
from planetary.net.connection import Connection
from planetary.net.handshake import say_hello
from planetary.net.identity import Identity
from planetary.net.network import TCP, Network
from planetary.net.session import Greeting, Refused
from planetary.wire.limits import Limits
from planetary.wire.message import Message, Order
from planetary.wire.protocol import Protocol
from planetary.wire.streams import Allocate, ReceivedMessage, allocate_any

log = logging.getLogger(__name__)

Result = TypeVar("Result")
AnyGreeting = TypeVar("AnyGreeting", bound=Greeting)

TensorSource = Callable[[], Mapping[str, np.ndarray]]
"""Gives the tensors when their turn has come, so a queue of messages holds no memory."""

Sent = Callable[[Message, int, bool], None]
"""Called with a message, the size of the frames, and whether there were tensors."""

Read = Callable[[int, ReceivedMessage], Awaitable[Event]]
"""Makes the event of a session's message: tensors are checked, and held until an instruction names them."""

Answer = Callable[[Any], Event]
"""Carries out an instruction, blocking, and returns the event that answers it."""

_Queue = asyncio.Queue[tuple[Message, TensorSource | None]]


class Shell(Generic[Result]):
    """Feeds a machine, one event at a time, until the instructions are answered with a result."""

    def __init__(
        self,
        machine: Machine[Event, Instruction],
        carry_out: Callable[[Instruction], Result | None],
        clock: Clock,
        observe: Callable[[Machine[Event, Instruction]], None] | None = None,
    ) -> None:
        """`carry_out` must not block; it returns something else than None to end `run` with that.

        `observe` is called with the machine after each event it handled.
        """
        self._machine = machine
        self._carry_out = carry_out
        self._clock = clock
        self._observe = observe
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def post(self, event: Event) -> None:
        """Queue an event. May be called from any thread once `run` has begun, and from the loop's before."""
        if self._loop is None or self._is_own_loop():
            self._events.put_nowait(event)
        else:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def _is_own_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:  # no loop runs in this thread
            return False

    async def run(self) -> Result:
        """Go on until `carry_out` returns a result; events queued by then are not handled."""
        self._loop = asyncio.get_running_loop()
        result = self._handle(Tick())
        while result is None:
            result = self._handle(await self._next_event())
        return result

    def _handle(self, event: Event) -> Result | None:
        instructions: Sequence[Instruction] = self._machine.handle(event, self._clock.monotonic())
        if self._observe is not None:
            self._observe(self._machine)
        result = None
        for instruction in instructions:
            answer = self._carry_out(instruction)
            result = answer if result is None else result
        return result

    async def _next_event(self) -> Event:
        deadline = self._machine.next_deadline()
        if deadline is None:
            return await self._events.get()
        timeout = deadline - self._clock.monotonic()
        if timeout <= 0 and self._events.empty():
            return Tick()
        try:
            async with asyncio.timeout(max(timeout, 0.0)):
                return await self._events.get()
        except TimeoutError:
            return Tick()


class SendQueues:
    """The queues in front of a connection, by sending order. A failed connection is noticed where it is received on."""

    def __init__(
        self,
        connection: Connection,
        sent: Sent | None = None,
        unreadable: Callable[[str], None] | None = None,
    ) -> None:
        """Start sending; `sent` is called for each message that had to wait.

        When the tensors of a message cannot be read, `unreadable` is called with the reason and the connection is
        dropped: the receiver would wait for the message for ever.
        """
        self.connection = connection
        self._sent = sent
        self._unreadable = unreadable
        self._queues: dict[Order, _Queue] = {Order.IN_TURN: asyncio.Queue(), Order.BESIDE: asyncio.Queue()}
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run(queue)) for queue in self._queues.values()]

    def put(self, message: Message, tensors: TensorSource | None = None) -> None:
        """Queue a message. One that goes ahead of the others has no tensors."""
        order = message.sending_order()
        if order is not Order.AHEAD:
            self._queues[order].put_nowait((message, tensors))
            return
        try:
            self.connection.post(message)
        except LocalProtocolError:
            self._give_up()
        except PlanetaryError:
            return  # the connection is over

    async def drain(self) -> None:
        """Wait until all queued messages are sent, or cannot be."""
        loop = asyncio.get_running_loop()
        for queue, task in zip(self._queues.values(), self._tasks, strict=True):
            waiting = loop.create_task(queue.join())
            try:
                await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()

    def abandon(self) -> None:
        """Stop sending."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, queue: _Queue) -> None:
        while True:
            message, source = await queue.get()
            try:
                tensors = await self._read(source) if source is not None else None
                nbytes = await self.connection.send(message, tensors)
                if self._sent is not None:
                    self._sent(message, nbytes, tensors is not None)
            except LocalProtocolError:
                self._give_up()
                return
            except PlanetaryError:
                return
            except Exception:  # noqa: BLE001 - otherwise nothing would be sent again, silently
                self._give_up()
                return
            finally:
                queue.task_done()

    def _give_up(self) -> None:
        # The sender waits for an answer that would never come: make it a loud failure.
        log.exception("a message to %s could not be sent", self.connection.peer)
        self.connection.abort()

    async def _read(self, source: TensorSource) -> Mapping[str, np.ndarray]:
        try:
            return await asyncio.to_thread(source)
        except Exception as error:
            known = isinstance(error, PlanetaryError)
            why = str(error) if known else f"{type(error).__name__}: {error}"
            said = "the tensors of a message to %s could not be read: %s"
            log.error(said, self.connection.peer, why, exc_info=None if known else error)
            if self._unreadable is not None:
                self._unreadable(why)
            self.connection.abort()
            raise ClosedError("the tensors of a message could not be read") from error


class Address(msgspec.Struct, frozen=True):
    """Where the gateway is and how it is recognised."""

    host: str
    port: int
    token: str  # "": plain TCP, on loopback only
    connect_s: float = 8.0  # time limit for a connection and its handshake
    identity: Identity | None = None  # identity of this machine; None without a token


def signed(hello: AnyGreeting, address: Address, trust: Trust) -> AnyGreeting:
    """Return the first message to a gateway with the token and this machine's signature."""
    hello = msgspec.structs.replace(hello, token=address.token)
    if address.identity is None or trust.invite is None:
        return hello
    return address.identity.sign(hello, trust.invite.authority_fingerprint)


class ClientShell(Shell[Exit]):
    """The shell of a participant with one connection, at the machine's request: `Dial`, `Send`, `Close` and `Exit`.

    Attributes:
        tensors: returns those of a payload the machine sends; None: it sends none.
    """

    def __init__(
        self,
        machine: Machine[Event, Instruction],
        carry_out: Callable[[Instruction], None],
        clock: Clock,
        observe: Callable[[Machine[Event, Instruction]], None] | None = None,
        *,
        address: Address,
        protocol: Protocol,
        hello: Greeting,
        received: Callable[[int, ReceivedMessage], None],
        allocate: Allocate = allocate_any,
        sent: Sent | None = None,
        network: Network = TCP,
    ) -> None:
        """Prepare; `run` begins.

        Args:
            machine: that is driven.
            carry_out: the instructions that are not about the connection; must not block.
            clock: of the machine.
            observe: as of `Shell`.
            address: of the gateway.
            protocol: that is spoken.
            hello: the first message, without token and signature.
            received: called with the session and each message.
            allocate: as of `net.connect`.
            sent: as of `SendQueues`.
            network: that connections are made on.
        """
        super().__init__(machine, self._carry_out_own, clock, observe)
        self._carry_out_other = carry_out
        self._address = address
        self._protocol = protocol
        self._trust = Trust(address.token) if address.token else Trust.plain_loopback()
        self._hello = signed(hello, address, self._trust)
        self._received = received
        self.tensors: Callable[[Payload], Mapping[str, np.ndarray]] | None = None
        self._allocate = allocate
        self._sent = sent
        self._network = network
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._queues: SendQueues | None = None

    def send(self, message: Message, tensors: TensorSource | None = None) -> None:
        """Queue a message; dropped when there is no connection."""
        if self._queues is not None:
            self._queues.put(message, tensors)

    async def close(self, reason: str) -> None:
        """Send the queued messages, say goodbye and close."""
        queues = self._queues  # forgotten when the other side closes first
        if queues is not None:
            await queues.drain()
            await queues.connection.close(reason)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _carry_out_own(self, instruction: Instruction) -> Exit | None:
        match instruction:
            case Dial():
                self._task = asyncio.get_running_loop().create_task(self._attend(instruction.session))
            case Send():
                self.send(instruction.message, self._source(instruction.payload))
            case Close():
                if self._queues is not None:
                    closing = self._queues.connection.close(instruction.reason)
                    self._closing = asyncio.get_running_loop().create_task(closing)
            case Exit():
                return instruction
            case _:
                self._carry_out_other(instruction)
        return None

    def _source(self, payload: Payload | None) -> TensorSource | None:
        if payload is None or self.tensors is None:
            return None
        tensors = self.tensors(payload)  # now: the machine may drop them before their turn has come
        return lambda: tensors

    async def _attend(self, session: int) -> None:
        address = self._address
        connection: Connection | None = None
        try:
            connection = await connect(
                address.host,
                address.port,
                self._trust,
                self._protocol,
                timeout_s=address.connect_s,
                allocate=self._allocate,
                network=self._network,
            )
            answer = await say_hello(connection, self._hello, address.connect_s)
            if isinstance(answer, Refused):
                self.post(Closed(session, answer.reason, refused=not answer.retry, kind=answer.kind))
                return
            self._queues = SendQueues(connection, self._sent)
            self.post(Opened(session, answer.run))
            while True:
                self._received(session, await connection.receive())
        except (TrustError, UserError) as error:
            self.post(Closed(session, str(error), refused=True))
        except PlanetaryError as error:
            self.post(Closed(session, str(error)))
        finally:
            if self._queues is not None:
                self._queues.abandon()
                self._queues = None
            if connection is not None:
                connection.abort()


class Background:
    """Tasks beside a machine, for whose end an orderly end waits. Methods are called on the event loop."""

    def __init__(self) -> None:
        """Start with no task."""
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, work: Coroutine[Any, Any, None], *, cancels: bool = False) -> None:
        """Begin a task; with `cancels`, `finish` cancels it instead of waiting for the result."""
        task = asyncio.get_running_loop().create_task(work, name="cancels" if cancels else None)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for the tasks under way, and for the end of those that are cancelled."""
        for task in list(self._tasks):
            if task.get_name() == "cancels":
                task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


@dataclass(frozen=True, kw_only=True)
class SessionTerms:
    """The terms on which a peer is attended.

    Attributes:
        limits: message limits; None: those of the protocol.
        allocate: as of `net.connect`.
        heartbeat_s: as of `Connection.keep_alive`.
        silent_after_s: as of `Connection.keep_alive`.
        traffic: counts the peer's bytes; None: they are not counted.
        on_loan: whether the peer goes on with other runs, so a `Shutdown` only ends the connection.
    """

    limits: Limits | None = None
    allocate: Allocate
    heartbeat_s: float
    silent_after_s: float
    traffic: WorkerTraffic | None = None
    on_loan: bool = False


class ServerShell(Shell[Result]):
    """The shell of a participant with a session for each peer: `Send`, `Close`, and answers from threads."""

    def __init__(
        self,
        machine: Machine[Event, Instruction],
        carry_out: Callable[[Instruction], Result | None],
        clock: Clock,
        observe: Callable[[Machine[Event, Instruction]], None] | None = None,
        *,
        read: Read,
        answers: Mapping[type[Instruction], Answer],
        source: Callable[[Payload | None], TensorSource | None],
        background: Background,
        shutdown_s: float,
    ) -> None:
        """Prepare; `run` begins.

        Args:
            machine: that is driven.
            carry_out: the other instructions; must not block.
            clock: of the machine.
            observe: as of `Shell`.
            read: makes the event of a peer's message.
            answers: by class of instruction, exactly.
            source: returns the tensors of a message the machine sends.
            background: gets answers and closing connections.
            shutdown_s: limit for a closing peer to take its last messages, in seconds.
        """
        super().__init__(machine, self._carry_out_own, clock, observe)
        self._carry_out_other = carry_out
        self._read, self._answers, self._source = read, answers, source
        self._background, self._shutdown_s = background, shutdown_s
        self._on_loan: set[int] = set()  # sessions
        self._sessions = 0
        self._queues: dict[int, SendQueues] = {}

    async def attend(self, connection: Connection, hello: Message, terms: SessionTerms) -> None:
        """Attend a peer, whose first message is `hello`, until the connection ends. Raises as `Connection.receive`."""
        self._sessions += 1
        session = self._sessions
        traffic = terms.traffic

        def sent(message: Message, nbytes: int, has_tensors: bool) -> None:
            if traffic is not None:
                traffic.add_down(message, nbytes)
            if has_tensors:
                self.post(PayloadSent(session, message))

        queues = SendQueues(connection, sent, lambda reason: self.post(SendFailed(session, reason)))
        self._queues[session] = queues
        if terms.on_loan:
            self._on_loan.add(session)
        reason = "the connection ended"
        try:
            connection.accept_peer(terms.limits, self._announcing(session, terms.allocate))
            connection.keep_alive(terms.heartbeat_s, terms.silent_after_s)
            self.post(Received(session, hello, host=connection.peer_host))
            counted = connection.bytes_received
            while True:
                received = await connection.receive()
                if traffic is not None:  # with messages that arrived while the one before was read
                    traffic.add_up(received.message, connection.bytes_received - counted)
                counted = connection.bytes_received
                self.post(await self._read(session, received))
        except PlanetaryError as error:
            reason = str(error)
            raise
        finally:
            queues.abandon()
            self._queues.pop(session, None)
            self._on_loan.discard(session)
            silent_s = asyncio.get_running_loop().time() - connection.last_received
            self.post(Closed(session, reason, silent_s=silent_s))

    def answer(self, work: Callable[[], Event]) -> None:
        """Begin blocking work in a thread, whose result is the next event."""
        self._background.add(self._answer(work))

    async def drain(self) -> None:
        """Wait until the peers have taken the queued messages, or their time is over."""
        for queues in list(self._queues.values()):
            await self._drain(queues)

    async def close(self, reason: str) -> None:
        """Close the connections."""
        for queues in list(self._queues.values()):
            await queues.connection.close(reason)

    def _announcing(self, session: int, allocate: Allocate) -> Allocate:
        """Return an allocator that posts the beginning of each message's tensors."""
        last = 0  # id of the message that arrives

        def announce(message: Message, spec: TensorSpec) -> np.ndarray:
            nonlocal last
            array = allocate(message, spec)
            if message.id != last:
                last = message.id
                self.post(PayloadArrives(session, message))
            return array

        return announce

    def _carry_out_own(self, instruction: Instruction) -> Result | None:
        answer = self._answers.get(type(instruction))
        if answer is not None:
            self.answer(partial(answer, instruction))
            return None
        match instruction:
            case Send(message=Shutdown(reason=reason)) if instruction.session in self._on_loan:
                self._end_session(instruction.session, reason)
            case Send():
                queues = self._queues.get(instruction.session)
                if queues is not None:
                    queues.put(instruction.message, self._source(instruction.payload))
            case Close():
                self._end_session(instruction.session, instruction.reason)
            case _:
                return self._carry_out_other(instruction)
        return None

    async def _answer(self, work: Callable[[], Event]) -> None:
        self.post(await asyncio.to_thread(work))

    def _end_session(self, session: int, reason: str) -> None:
        queues = self._queues.get(session)
        if queues is not None:
            self._background.add(self._close_session(queues, reason))

    async def _close_session(self, queues: SendQueues, reason: str) -> None:
        await self._drain(queues)
        await queues.connection.close(reason)

    async def _drain(self, queues: SendQueues) -> None:
        try:
            async with asyncio.timeout(self._shutdown_s):
                await queues.drain()
        except TimeoutError:
            log.info("%s did not take the last messages in time", queues.connection.peer)
