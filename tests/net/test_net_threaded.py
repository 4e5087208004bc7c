from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from net_support import listening, open_authority, run, token_for, until

from planetary.core.errors import ClosedError, PeerError
from planetary.fleet.protocol.messages import Hello, Refused, Shutdown, Welcome
from planetary.net import Connection, ThreadedConnection, Trust, answer_hello, receive_hello
from planetary.runs.rounds.messages import ROUNDS, Parameters
from waiting import HANG_S

HELLO = Hello(role="worker", protocol=ROUNDS.version, software="1", token="", worker="a/0", node="a", pid=1)


@asynccontextmanager
async def gateway(
    work: Callable[[ThreadedConnection], object],
    answer: Welcome | Refused,
    folder: Path | None = None,
) -> AsyncIterator[tuple[Connection, asyncio.Task[object]]]:
    """The gateway's end of a connection whose other end is used by `work` in another thread."""
    authority = open_authority(folder) if folder is not None else None
    trust = Trust(token_for(authority)) if authority is not None else Trust.plain_loopback()

    async with listening(authority.server_context() if authority else None) as (server, taken):

        def client() -> object:
            with ThreadedConnection(server.host, server.port, trust, ROUNDS, HELLO, timeout_s=5) as connection:
                return work(connection)

        working = asyncio.create_task(asyncio.to_thread(client))
        end = await taken.get()
        await receive_hello(end, Hello, 5)
        await answer_hello(end, answer, 5)
        yield end, working
    await asyncio.gather(working, return_exceptions=True)


WELCOME = Welcome(run="r", heartbeat_s=0.02, silent_after_s=5.0)


def test_a_thread_sends_and_receives_whole_messages(tmp_path: Path) -> None:
    array = np.arange(1 << 20, dtype="<f4")

    def work(connection: ThreadedConnection) -> None:
        assert isinstance(connection.answer, Welcome)
        assert connection.receive(0) is None
        assert connection.receive(0.01) is None
        connection.send(Parameters(version=1), {"w": array})
        received = connection.receive(5)
        assert received is not None
        assert np.array_equal(received.tensors["w"], 2 * array)
        assert connection.bytes_sent > array.nbytes
        assert connection.bytes_received > array.nbytes
        assert connection.error is None

    async def serve_it() -> None:
        async with gateway(work, WELCOME, tmp_path) as (end, working):
            received = await end.receive(5)
            await end.send(Parameters(version=2), {"w": 2 * received.tensors["w"]})
            await working
            with pytest.raises(ClosedError, match="said goodbye: done"):
                await end.receive(5)

    run(serve_it())


def test_heartbeats_are_sent_while_the_main_thread_is_busy() -> None:
    enough = threading.Event()

    async def serve_it() -> None:
        async with gateway(lambda _: enough.wait(HANG_S), WELCOME) as (end, working):
            await until(lambda: end.heartbeats_received >= 3)
            enough.set()
            assert await working

    run(serve_it())


def test_the_silence_of_the_gateway_surfaces() -> None:
    def work(connection: ThreadedConnection) -> None:
        with pytest.raises(PeerError, match="was silent for"):
            connection.receive(None)
        with pytest.raises(PeerError, match="was silent for"):
            connection.receive(0)
        with pytest.raises(PeerError, match="was silent for"):
            connection.send(Shutdown(reason="x"))

    async def serve_it() -> None:
        async with listening() as (server, taken):
            plain = Trust.plain_loopback()

            def client() -> None:
                with ThreadedConnection(server.host, server.port, plain, ROUNDS, HELLO) as connection:
                    work(connection)

            working = asyncio.create_task(asyncio.to_thread(client))
            end = await taken.get()
            await end.send(Welcome(run="r", heartbeat_s=0.02, silent_after_s=0.06))  # and never a word again
            await working

    run(serve_it())


def test_a_refusal_is_kept_and_the_connection_closed() -> None:
    def work(connection: ThreadedConnection) -> None:
        assert isinstance(connection.answer, Refused)
        assert connection.answer.reason == "no"
        with pytest.raises(ClosedError, match="closed here"):
            connection.send(Shutdown(reason="x"))

    async def serve_it() -> None:
        async with gateway(work, Refused(code="iree", reason="no")) as (_, working):
            await working

    run(serve_it())


def test_nobody_there_surfaces_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(PeerError, match="is the server up"):
        ThreadedConnection("127.0.0.1", 1, Trust.plain_loopback(), ROUNDS, HELLO)
    assert threading.active_count() == before


def test_closing_ends_the_thread_and_a_waiting_receive() -> None:
    failures: list[Exception] = []

    def work(connection: ThreadedConnection) -> None:
        def wait() -> None:
            try:
                connection.receive(None)
            except ClosedError as error:
                failures.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        connection.send(Shutdown(reason="ready"))
        connection.close("enough")
        connection.close("again")
        waiting.join(HANG_S)
        assert not waiting.is_alive()
        with pytest.raises(ClosedError):
            connection.receive(1)

    async def serve_it() -> None:
        async with gateway(work, WELCOME) as (end, working):
            await end.receive(5)
            with pytest.raises(ClosedError, match="said goodbye: enough"):
                await end.receive(5)
            await working

    run(serve_it())
    assert len(failures) == 1
