"""What the tests of the net share: a running server with its connections, and waits with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from planetary.fleet.protocol.messages import Shutdown
from planetary.net import Authority, Connection, Server, ServerLimits, Trust, Tuning, connect, serve
from planetary.net.invite import mint
from planetary.runs.rounds.messages import ROUNDS
from planetary.wire import Allocate, allocate_any
from waiting import HANG_S

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(HANG_S):
            return await coroutine

    return asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; the deadline is the test's."""
    while not condition():
        await asyncio.sleep(0.002)


def token_for(authority: Authority, **more: Any) -> str:
    return mint(authority.invite_secret, authority.fingerprint, **more)


def open_authority(folder: Path) -> Authority:
    return Authority.open(folder, time.time())


@contextlib.asynccontextmanager
async def listening(
    tls: ssl.SSLContext | None = None,
    limits: ServerLimits | None = None,
    tuning: Tuning | None = None,
    allocate: Allocate = allocate_any,
) -> AsyncIterator[tuple[Server, asyncio.Queue[Connection]]]:
    """A server that puts its connections into a queue, where they stay up until the end."""
    taken: asyncio.Queue[Connection] = asyncio.Queue()
    over = asyncio.Event()

    async def on_connection(connection: Connection) -> None:
        taken.put_nowait(connection)
        await over.wait()

    server = await serve(
        "127.0.0.1", 0, on_connection, ROUNDS, tls=tls, limits=limits, tuning=tuning, allocate=allocate
    )
    try:
        yield server, taken
    finally:
        over.set()
        await server.close()


@contextlib.asynccontextmanager
async def connected(
    authority: Authority | None = None,
    tuning: Tuning | None = None,
    allocate: Allocate = allocate_any,
    accept: bool = True,
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Both ends of a connection, the client's first. `tuning` and `allocate` are the server's."""
    tls = authority.server_context() if authority is not None else None
    trust = Trust(token_for(authority)) if authority is not None else Trust.plain_loopback()
    async with listening(tls, tuning=tuning, allocate=allocate) as (server, taken):
        client = await connect(server.host, server.port, trust, ROUNDS)
        try:
            await client.send(Shutdown(reason="first"))
            other = await taken.get()
            await other.receive()
            if accept:
                other.accept_peer()
            yield client, other
        finally:
            client.abort()
