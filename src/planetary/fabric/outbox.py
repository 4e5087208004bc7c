"""Sends messages on one connection strictly in the order in which they were queued."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import numpy as np

from planetary.core.errors import ClosedError, LocalProtocolError, PlanetaryError
from planetary.net.connection import Connection
from planetary.wire.messages import Message

log = logging.getLogger(__name__)

TensorSource = Callable[[], Mapping[str, np.ndarray]]
"""Gives the tensors when their turn has come, so that a queue of messages holds no memory."""


class Outbox:
    """The queue in front of a connection. A failed connection is noticed by whoever receives on it."""

    def __init__(
        self,
        connection: Connection,
        sent: Callable[[Message, int], None] | None = None,
        unreadable: Callable[[str], None] | None = None,
    ) -> None:
        """Start sending; `sent` is told of each message and its bytes.

        When the tensors of a message cannot be read `unreadable` is told why, and the connection is dropped: whoever
        waits for the message would wait for ever.
        """
        self.connection = connection
        self._sent = sent
        self._unreadable = unreadable
        self._queue: asyncio.Queue[tuple[Message, TensorSource | None]] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def put(self, message: Message, tensors: TensorSource | None = None) -> None:
        """Queue a message."""
        self._queue.put_nowait((message, tensors))

    async def drain(self) -> None:
        """Wait until everything queued was sent, or can not be."""
        waiting = asyncio.get_running_loop().create_task(self._queue.join())
        await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    def abandon(self) -> None:
        """Stop sending."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            message, source = await self._queue.get()
            try:
                tensors = await self._read(source) if source is not None else None
                before = self.connection.bytes_sent
                await self.connection.send(message, tensors)
                if self._sent is not None:
                    self._sent(message, self.connection.bytes_sent - before)
            except LocalProtocolError:
                # Whoever queued this waits for an answer that would never come: make it a loud failure.
                log.exception("a message to %s could not be sent", self.connection.peer)
                self.connection.abort()
                return
            except PlanetaryError:
                return
            finally:
                self._queue.task_done()

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
