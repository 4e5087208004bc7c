"""Where workers and supervisors arrive: a listening port, their greetings judged, their invites watched.

A machine measuring its link (`planetary doctor`) is answered here, before any run: it takes no part in one.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from planetary.compiler.backends.pipeline import compiler_version
from planetary.core.configuration.schema import Timings
from planetary.core.errors import ClosedError, RemoteProtocolError
from planetary.core.tensors import TensorSpec
from planetary.fleet.gateway.invites import Guests, InviteList
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.admission import invite_of
from planetary.fleet.shell.system import SYSTEM, System
from planetary.net.connection import Connection
from planetary.net.handshake import TokenCheck, answer_hello, judge_hello, receive_hello
from planetary.net.server import Server, serve
from planetary.version import __version__
from planetary.wire.limits import MIB, Limits
from planetary.wire.protocol import Protocol

MOST_PROBE_BYTES = 64 * MIB  # size of a probe, and of the answer
_MOST_PROBES, _PROBING_S = 64, 120.0  # number and duration of one machine's probes
_PROBED_AT_ONCE = 4  # machines; their traffic takes from that of the runs

Take = Callable[[Connection, m.Hello], Awaitable[None]]
"""Attends a peer whose token was checked until the connection ends."""


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
        knows: Callable[[str], bool | None] = lambda key: False,
        system: System = SYSTEM,
    ) -> None:
        """Nothing is opened before `listen`.

        Args:
            take: attends a peer.
            protocol: that is spoken.
            timings: of the connections.
            tokens: of the authority; None: there is none.
            invites: as `tokens`.
            knows: see `TokenCheck.known`.
            system: the machine.
        """
        self._take, self._protocol, self._timings = take, protocol, timings
        self._tokens = None if tokens is None else replace(tokens, known=knows)
        self._system = system
        self._guests = Guests(invites) if invites is not None else None
        self._server: Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._probed = 0  # machines that measure their link now

    @property
    def port(self) -> int:
        """The port listened on."""
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
        if hello.probe:
            await self._answer_probes(connection)
            return
        if self._guests is None:
            await self._take(connection, hello)
            return
        self._guests.came(connection, invite_of(hello))
        try:
            await self._take(connection, hello)
        finally:
            self._guests.left(connection)

    # --- machines that measure their link ---------------------------------------------------------------------

    async def _answer_probes(self, connection: Connection) -> None:
        timings = self._timings
        if self._probed >= _PROBED_AT_ONCE:
            busy = m.Refused(code="busy", reason=f"{self._probed} machines measure their links already", retry=True)
            await answer_hello(connection, busy, timings.connect_s)
            return
        self._probed += 1
        try:
            async with asyncio.timeout(_PROBING_S):
                welcome = m.Welcome(run="", heartbeat_s=timings.heartbeat_s, silent_after_s=timings.silent_after_s)
                await answer_hello(connection, welcome, timings.connect_s, _room_for_probe)
                connection.accept_peer(Limits(tensor_bytes=MOST_PROBE_BYTES, tensors=1), _room_for_probe)
                for _ in range(_MOST_PROBES):
                    await self._answer_probe(connection)
                await connection.close(f"{_MOST_PROBES} probes are answered")
        except TimeoutError:
            await connection.close(f"probes are answered for {_PROBING_S:g} s")
        except ClosedError:
            pass  # it has measured enough
        finally:
            self._probed -= 1

    async def _answer_probe(self, connection: Connection) -> None:
        received = await connection.receive()
        probe = received.message
        if not isinstance(probe, m.LinkProbe) or not 0 <= probe.answer_bytes <= MOST_PROBE_BYTES:
            raise RemoteProtocolError(
                f"{connection.peer}: expected a LinkProbe for at most {MOST_PROBE_BYTES} bytes, found {probe}"
            )
        answer = m.LinkProbeAnswer(
            clock=self._system.clock.wall(),
            received_bytes=sum(array.nbytes for array in received.tensors.values()),
            address=connection.peer_host,
            software=__version__,
            iree_version=compiler_version(),
            dial_error=await self._dial_back(connection.peer_host, probe.dial) if probe.dial else "",
        )
        await connection.send(answer, {"payload": noise(probe.answer_bytes)} if probe.answer_bytes else None)

    async def _dial_back(self, host: str, port: int) -> str:
        """Return why a measuring machine's port cannot be reached, "" where it can."""
        try:
            async with asyncio.timeout(self._timings.connect_s):
                transport = await self._system.network.dial(asyncio.Protocol, host, port, None)
        except TimeoutError:
            return f"no answer within {self._timings.connect_s:g} s"
        except OSError as error:
            return os.strerror(error.errno) if error.errno else str(error)
        transport.abort()
        return ""


def noise(nbytes: int) -> np.ndarray:
    """Return bytes no link can compress by much, as an array of u8; they repeat every MiB."""
    return np.resize(np.frombuffer(os.urandom(min(nbytes, MIB)), np.uint8), nbytes)


def _room_for_probe(message: m.Message, spec: TensorSpec) -> np.ndarray:
    if not isinstance(message, m.LinkProbe) or spec.name != "payload" or spec.nbytes > MOST_PROBE_BYTES:
        raise RemoteProtocolError(
            f"reading {type(message).__name__}: expected a LinkProbe, of at most {MOST_PROBE_BYTES} bytes, "
            f"found a tensor {spec.name!r} of {spec.nbytes}"
        )
    return spec.empty()
