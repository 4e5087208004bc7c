"""A peer's line to the master: an event loop in a thread, the connection, deadlines, and dialling after a restart."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard, get_args

from planetary.collectives.peer import peer_events as e
from planetary.collectives.peer.peer_machine import FIRST_SESSION, PeerMachine
from planetary.collectives.peer.peer_settings import PeerSettings
from planetary.collectives.protocol import collective_messages as m
from planetary.core.errors import ClosedError, LocalProtocolError, PlanetaryError, RemoteProtocolError
from planetary.net.client import connect
from planetary.net.connection import Connection
from planetary.wire.inbox import refuse_tensors
from planetary.wire.message import Message

if TYPE_CHECKING:
    from planetary.collectives.peer.peer_shell import PeerShell

log = logging.getLogger(__name__)

_HEARD = frozenset(get_args(m.FromMaster))  # asked of each message: a union takes ten times as long
_WATCH_S = 0.2
_DIAL_MOST_S = 1.0
_CLOSE_S = 2.0


class MasterLine:
    """Serves one machine until the master is lost for good, or the peer was closed or connected anew.

    Attributes:
        loop: where the connection lives.
        connection: to the master; the last one that was made.
    """

    def __init__(self, shell: PeerShell, settings: PeerSettings, timeout_s: float) -> None:
        """Connect. Raises `PeerError`, `TrustError`, or `UserError` for a plain connection off this machine, unless
        the settings allow it.
        """
        self._shell, self._settings = shell, settings
        self._machine: PeerMachine | None = None
        self._task: asyncio.Task[None] | None = None
        self.loop = settings.ports.start_loop("planetary ring control")
        try:
            self.connection = self.loop.call(self._dial(timeout_s))
        except BaseException:
            self.loop.stop(_CLOSE_S)
            raise

    def serve(self, machine: PeerMachine) -> None:
        """Give what comes to the machine, from now on; it is told of the connection when that is done."""
        self._machine = machine
        self.loop.post(self._start, FIRST_SESSION)

    def dial(self, session: int) -> None:
        """Connect anew; the machine is told what came of it."""
        self.loop.post(lambda: self._keep(self._dial_again(session)))

    def send(self, message: Message) -> None:
        """Send, from any thread. A connection that is over says so to the machine, not here."""
        try:
            self.connection.post_from_any_thread(message)
        except LocalProtocolError:
            raise
        except PlanetaryError as error:
            log.debug("%s was not sent: %s", type(message).__name__, error)

    def hang_up(self) -> None:
        """Drop the connection and end. In the thread of the loop."""
        self.connection.abort()
        self.loop.stop(_CLOSE_S)

    def close(self) -> None:
        """End, once what was sent is with the master, or soon. Not in the thread of the loop."""
        with contextlib.suppress(PlanetaryError, concurrent.futures.TimeoutError):
            self.loop.call(self.connection.close("the communicator was closed"), _CLOSE_S)
        self.loop.stop(_CLOSE_S)

    def abandon(self) -> None:
        """End, and say nothing."""
        self.loop.post(self.connection.abort)
        self.loop.stop(_CLOSE_S)

    # --- in the thread of the loop

    async def _dial(self, timeout_s: float) -> Connection:
        settings = self._settings
        connection = await connect(
            *settings.master,
            settings.trust,
            m.COLLECTIVES,
            timeout_s=timeout_s,
            allocate=refuse_tensors,
            network=settings.ports.network,
            allow_unencrypted=settings.allow_unencrypted,
        )
        connection.open_to_threads()
        connection.expect_message(max(timeout_s, _DIAL_MOST_S))
        return connection

    def _start(self, session: int) -> None:
        self._keep(self._converse(session))
        self._look()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(work)

    async def _dial_again(self, session: int) -> None:
        try:
            self.connection = await self._dial(_DIAL_MOST_S)
        except PlanetaryError as error:
            log.debug("reconnecting to the master: %s", error)
            self._shell.handle(e.Closed(session, str(error)))
        else:
            self._shell.handle(e.Opened(session))
            await self._converse(session)

    async def _converse(self, session: int) -> None:
        try:
            await self.connection.hand_over(partial(self._received, session))
        except PlanetaryError as error:
            self._shell.handle(e.Closed(session, str(error)))
        except Exception as error:
            self._fail(error)
            raise

    def _received(self, session: int, message: Message) -> None:
        if not _is_heard(message):
            raise RemoteProtocolError(f"expected what a master says, found {type(message).__name__}")
        if isinstance(message, m.Registered):
            self.connection.keep_alive(message.heartbeat_s, message.silent_after_s)
        self._shell.handle(e.Received(session, message))

    def _look(self) -> None:
        """Look after transfers and deadlines, from now on.

        Deadlines of calls are seconds: to have a timer for each would cost every call more than it is worth.
        """
        if self._machine is None or not self._shell.runs(self._machine):
            return
        try:
            self._shell.watch()
            self._shell.handle(e.Tick())
        except Exception as error:
            self._fail(error)
            raise
        asyncio.get_running_loop().call_later(_WATCH_S, self._look)

    def _fail(self, error: Exception) -> None:
        log.error("the line to the master failed", exc_info=error)
        self._shell.fail_all(ClosedError(f"internal error of the communicator: {type(error).__name__}: {error}"))


def _is_heard(message: Message) -> TypeGuard[m.FromMaster]:
    return type(message) in _HEARD
