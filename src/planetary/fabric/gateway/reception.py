"""Where workers and supervisors arrive: a listening port, their greetings judged, their invites watched."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from planetary.core.configuration.schema import Timings
from planetary.fabric.gateway.invite_list import Guests, InviteList
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.admission import invite_of
from planetary.fabric.shell.system import SYSTEM, System
from planetary.net.connection import Connection
from planetary.net.handshake import TokenCheck, answer_hello, judge_hello, receive_hello
from planetary.net.server import Server, serve
from planetary.version import __version__
from planetary.wire.protocol import Protocol

Take = Callable[[Connection, m.Hello], Awaitable[None]]
"""Attends a peer whose token was checked until its connection ends."""


class Reception:
    """One per listening port; a gateway of one run has one, and several runs share one."""

    def __init__(
        self,
        take: Take,
        protocol: Protocol,
        timings: Timings,
        *,
        tokens: TokenCheck | None = None,
        invites: InviteList | None = None,
        system: System = SYSTEM,
    ) -> None:
        """Nothing is opened before `listen`. `tokens` and `invites` are of the authority; None: there is none."""
        self._take, self._protocol, self._timings = take, protocol, timings
        self._tokens, self._system = tokens, system
        self._guests = Guests(invites) if invites is not None else None
        self._server: Server | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._server is not None
        return self._server.port

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Let peers connect. Raises as `net.server.serve`."""
        self._server = await serve(host, port, self._attend, self._protocol, tls=tls, network=self._system.network)
        if self._guests is not None:
            self._watch = asyncio.get_running_loop().create_task(self._guests.watch())

    async def close(self, reason: str) -> None:
        """Say goodbye to every peer."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            await self._server.close(reason)

    async def _attend(self, connection: Connection) -> None:
        hello = await receive_hello(connection, m.Hello, self._timings.connect_s)
        verdict = judge_hello(
            hello,
            self._protocol.version,
            welcome=None,
            software=__version__,
            tokens=self._tokens,
            now=self._system.clock.wall(),
        )
        if verdict is not None:
            await answer_hello(connection, verdict, self._timings.connect_s)
            return
        if self._guests is None:
            await self._take(connection, hello)
            return
        self._guests.came(connection, invite_of(hello))
        try:
            await self._take(connection, hello)
        finally:
            self._guests.left(connection)
