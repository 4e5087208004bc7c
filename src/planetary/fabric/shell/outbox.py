"""Sends messages on one connection, in the order in which they were queued but for those that need not wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import numpy as np

from planetary.core.errors import ClosedError, LocalProtocolError, PlanetaryError
from planetary.net.connection import Connection
from planetary.wire.message import Message, Order

log = logging.getLogger(__name__)

TensorSource = Callable[[], Mapping[str, np.ndarray]]
"""Gives the tensors when their turn has come, so that a queue of messages holds no memory."""

Sent = Callable[[Message, int, bool], None]
"""Is told of a message, the bytes of its frames, and whether it had tensors."""

_Queue = asyncio.Queue[tuple[Message, TensorSource | None]]


class Outbox:
    """The queues in front of a connection. A failed connection is noticed by whoever receives on it."""

    def __init__(
        self,
        connection: Connection,
        sent: Sent | None = None,
        unreadable: Callable[[str], None] | None = None,
    ) -> None:
        """Start sending; `sent` is told of each message that had to wait for its turn.

        When the tensors of a message cannot be read `unreadable` is told why, and the connection is dropped: whoever
        waits for the message would wait for ever.
        """
        self.connection = connection
        self._sent = sent
        self._unreadable = unreadable
        self._queues: dict[Order, _Queue] = {Order.IN_TURN: asyncio.Queue(), Order.BESIDE: asyncio.Queue()}
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run(queue)) for queue in self._queues.values()]

    def put(self, message: Message, tensors: TensorSource | None = None) -> None:
        """Queue a message; one that goes ahead of the others has no tensors."""
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
        """Wait until everything queued was sent, or can not be."""
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
            except Exception:  # noqa: BLE001 - otherwise nothing would ever be sent again, and nobody know
                self._give_up()
                return
            finally:
                queue.task_done()

    def _give_up(self) -> None:
        # Whoever queued the message waits for an answer that would never come: make it a loud failure.
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
