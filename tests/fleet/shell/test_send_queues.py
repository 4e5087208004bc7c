"""What waits for what on a connection: a payload that takes its time holds up only what has to come after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

import numpy as np

from planetary.fleet.shell.shell import SendQueues
from planetary.net import Connection, Trust, connect, serve
from planetary.runs.mixture import messages as mm
from planetary.runs.rounds import messages as rm
from planetary.wire.message import Order

OF = {"shard": 1, "epoch": 1, "step": 5}
STEP = mm.StepTaken(**OF, loss=1.0, seconds=1.0)
WANT = mm.RequestTokens(**{k: OF[k] for k in ("shard", "epoch")}, first=0, count=1)
FRAGMENT = mm.PublishFragment(
    shard=1, epoch=1, tier="router", fragment=0, base=0, tokens=1, steps=1, payload="fragment/0"
)
SURROGATES = mm.PublishSurrogates(**OF, of=1, progress=5, error=None, payload="surrogate/0")
VIEW = mm.ViewModel(**OF, progress=5, mixed_loss=1.0, surrogate_loss=1.0, payload="view/0")
STATE = mm.SaveShard(**OF, progress=5, payload="shard/0")


def payload() -> Mapping[str, np.ndarray]:
    return {"payload": np.zeros(300_000, np.uint8)}


async def exchange(held: threading.Event, sent: list[tuple[str, int, bool]]) -> list[str]:
    """Queue all messages; the fragment's payload cannot be read before `held` is set. Return them as they came."""
    taken: asyncio.Queue[Connection] = asyncio.Queue()
    over = asyncio.Event()

    async def attend(connection: Connection) -> None:
        connection.accept_peer()
        taken.put_nowait(connection)
        await over.wait()

    def fragment() -> Mapping[str, np.ndarray]:
        assert held.wait(20)
        return payload()

    server = await serve("127.0.0.1", 0, attend, mm.MIXTURES)
    client = await connect(server.host, server.port, Trust.plain_loopback(), mm.MIXTURES)
    queues = SendQueues(client, lambda message, nbytes, tensors: sent.append((type(message).__name__, nbytes, tensors)))
    found: list[str] = []
    try:
        queues.put(FRAGMENT, fragment)
        queues.put(SURROGATES, payload)
        queues.put(VIEW, payload)
        queues.put(STATE, payload)
        queues.put(STEP)
        queues.put(WANT)
        other = await taken.get()
        while len(found) < 6:
            received = await other.receive(20)
            found.append(type(received.message).__name__)
            if isinstance(received.message, mm.SaveShard):
                held.set()
        await queues.drain()
        return found
    finally:
        held.set()
        queues.abandon()
        over.set()
        client.abort()
        await server.close()


def test_small_messages_overtake_a_slow_payload() -> None:
    """Small messages and states do not wait for a payload that takes its time."""
    sent: list[tuple[str, int, bool]] = []
    found = asyncio.run(exchange(threading.Event(), sent))
    assert set(found[:2]) == {"StepTaken", "RequestTokens"}
    assert found[2:] == ["ViewModel", "SaveShard", "PublishFragment", "PublishSurrogates"]
    assert [name for name, _, _ in sent] == found[2:]
    assert all(300_000 < nbytes < 301_000 and tensors for _, nbytes, tensors in sent)


def test_draining_ends_with_the_connection() -> None:
    async def talk() -> None:
        over = asyncio.Event()

        async def attend(_: Connection) -> None:
            await over.wait()

        server = await serve("127.0.0.1", 0, attend, mm.MIXTURES)
        client = await connect(server.host, server.port, Trust.plain_loopback(), mm.MIXTURES)
        queues = SendQueues(client)
        for message in (FRAGMENT, SURROGATES, STATE, VIEW):
            queues.put(message, payload)
        client.abort()
        async with asyncio.timeout(20):
            await queues.drain()
        over.set()
        await server.close()

    asyncio.run(talk(), debug=True)


def test_what_a_composer_is_told_keeps_its_order() -> None:
    message = mm.GrantShard(shard=0, epoch=1, step=0, payload="", speaks=(0,), steps=(0, 0))
    later = (FRAGMENT, mm.AssignSpeaker(shards=(0,)), mm.TokensReady(shard=-1, first=0, count=1))
    assert {one.sending_order() for one in (message, *later)} == {Order.IN_TURN}
    assert rm.Progress(task=1, round=1, step=1, loss=None).sending_order() is Order.AHEAD
    assert mm.RunProgress(steps=(1, 1)).sending_order() is Order.AHEAD  # the answer to one who has his shard
    assert mm.TokensReady(shard=0, first=0, count=1).sending_order() is Order.BESIDE
