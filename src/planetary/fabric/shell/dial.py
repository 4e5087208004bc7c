"""A client's connection to the gateway, between the transport and a machine: dial, hello, messages, the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from planetary.core.errors import PlanetaryError, TrustError, UserError
from planetary.fabric.shell.outbox import Outbox, Sent
from planetary.machine.events import Closed, Event, Opened
from planetary.net.client import Trust, connect
from planetary.net.connection import Connection
from planetary.net.handshake import say_hello
from planetary.net.identity import Identity
from planetary.net.network import TCP, Network
from planetary.net.session import Greeting, Refused
from planetary.wire.inbox import Allocate, Received, allocate_any
from planetary.wire.message import Message
from planetary.wire.protocol import Protocol


class Address(msgspec.Struct, frozen=True):
    """Where the gateway is and how it is recognised."""

    host: str
    port: int
    token: str  # "": plain TCP, on loopback only
    connect_s: float = 8.0  # for a connection and its handshake
    identity: Identity | None = None  # of this machine; None without a token


class Dialler:
    """Makes one connection at a time and turns what happens on it into events."""

    def __init__(
        self,
        address: Address,
        protocol: Protocol,
        hello: Greeting,
        post: Callable[[Event], None],
        received: Callable[[int, Received], None],
        *,
        allocate: Allocate = allocate_any,
        sent: Sent | None = None,
        network: Network = TCP,
    ) -> None:
        """`received` gets the session and each message; `sent` as in `Outbox`."""
        self._address = address
        self._protocol = protocol
        self._trust = Trust(address.token) if address.token else Trust.plain_loopback()
        self._hello = msgspec.structs.replace(hello, token=address.token)
        if address.identity is not None and self._trust.invite is not None:
            self._hello = address.identity.sign(self._hello, self._trust.invite.authority_fingerprint)
        self._post = post
        self._received = received
        self._allocate = allocate
        self._sent = sent
        self._network = network
        self._task: asyncio.Task[None] | None = None
        self._outbox: Outbox | None = None

    def dial(self, session: int) -> None:
        """Start connecting; `Opened` or `Closed` follows."""
        self._task = asyncio.get_running_loop().create_task(self._attend(session))

    def send(self, message: Message, tensors: Callable[[], Mapping[str, np.ndarray]] | None = None) -> None:
        """Queue a message; dropped when the connection is over."""
        if self._outbox is not None:
            self._outbox.put(message, tensors)

    async def close(self, reason: str) -> None:
        """Send what is queued, say goodbye and close."""
        outbox = self._outbox  # forgotten when the other side closes first
        if outbox is not None:
            await outbox.drain()
            await outbox.connection.close(reason)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

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
                self._post(Closed(session, answer.reason, refused=not answer.retry, kind=answer.kind))
                return
            self._outbox = Outbox(connection, self._sent)
            self._post(Opened(session, answer.run))
            while True:
                self._received(session, await connection.receive())
        except (TrustError, UserError) as error:
            self._post(Closed(session, str(error), refused=True))
        except PlanetaryError as error:
            self._post(Closed(session, str(error)))
        finally:
            if self._outbox is not None:
                self._outbox.abandon()
                self._outbox = None
            if connection is not None:
                connection.abort()
