from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from net_support import connected, listening, open_authority, run, until

from planetary.core.errors import ClosedError, LocalProtocolError, PeerError, RemoteProtocolError
from planetary.core.tensors import TensorSpec
from planetary.fleet.protocol.messages import Goodbye, Heartbeat, Shutdown, WorkerStarted
from planetary.net import Trust, Tuning, connect
from planetary.runs.rounds.messages import ROUNDS, Parameters
from planetary.wire import Inbox, Outbox, expect_tensors

MIB = 1 << 20


START = b"PLNT" + bytes([ROUNDS.version, 2, 0, 0])


def noise(nbytes: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 2**63, nbytes // 8, dtype="<i8")


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_messages_and_tensors_in_both_directions(tls: bool, tmp_path: Path) -> None:
    async def talk() -> None:
        async with connected(open_authority(tmp_path) if tls else None) as (client, server):
            tensors = {
                "w": np.arange(12, dtype="<f4").reshape(3, 4).T,
                "none": np.zeros((0, 2), "<f4"),
                "scalar": np.array(3, "<i8"),
            }
            before = client.bytes_sent
            assert await client.send(Parameters(version=4), tensors) == client.bytes_sent - before > 12 * 4 + 8
            received = await server.receive(5)
            assert received.message == Parameters(version=4, id=2)
            for name, array in tensors.items():
                assert np.array_equal(received.tensors[name], array)
                assert received.tensors[name].shape == array.shape
            await server.send(WorkerStarted(pid=1, attempt=2))
            await server.send(Parameters(version=5), {"b": np.ones(3)})
            assert (await client.receive(5)).message == WorkerStarted(pid=1, attempt=2, id=1)
            assert np.array_equal((await client.receive(5)).tensors["b"], np.ones(3))
            assert client.bytes_sent == server.bytes_received > 0
            assert server.bytes_sent == client.bytes_received > 0
            assert client.peer.startswith("127.0.0.1:")

    run(talk())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_large_tensor_arrives_in_place_and_control_overtakes(tls: bool, tmp_path: Path) -> None:
    """A large tensor arrives in the array that was given while control overtakes it."""
    sent = noise(64 * MIB)
    target = np.zeros_like(sent)

    async def talk() -> None:
        authority = open_authority(tmp_path) if tls else None
        async with connected(authority, allocate=lambda _message, _spec: target) as (client, server):
            large = asyncio.create_task(client.send(Parameters(version=1), {"w": sent}))
            await until(lambda: client.bytes_sent > MIB)
            await client.send(Shutdown(reason="urgent"))
            assert not large.done()
            assert (await server.receive(5)).message == Shutdown(reason="urgent", id=3)
            received = await server.receive(10)
            await large
            assert received.tensors["w"] is target
            assert np.array_equal(target, sent)
            overhead = client.bytes_sent - sent.nbytes
            assert overhead < 0.001 * sent.nbytes

    run(talk())


def test_heartbeats_get_through_during_a_large_transfer() -> None:
    async def talk() -> None:
        tuning = Tuning(unread_bytes=1)
        async with connected(tuning=tuning) as (client, server):
            server.keep_alive(0.005, 10)  # the side that sends nothing else
            array = noise(8 * MIB)
            sends = [asyncio.create_task(client.send(Parameters(version=v), {"w": array})) for v in range(3)]
            for _ in sends:
                seen = client.heartbeats_received
                await server.receive(10)
                await until(lambda seen=seen: client.heartbeats_received > seen)
            await asyncio.gather(*sends)

    run(talk())


def test_two_large_messages_share_the_line() -> None:
    async def talk() -> None:
        async with connected() as (client, server):
            arrays = [noise(16 * MIB), noise(2 * MIB)]
            sends = [
                asyncio.create_task(client.send(Parameters(version=i), {"w": array})) for i, array in enumerate(arrays)
            ]
            first, second = await server.receive(10), await server.receive(10)
            # The small one was begun later and is there first.
            assert first.message == Parameters(version=1, id=3)
            assert second.message == Parameters(version=0, id=2)
            await asyncio.gather(*sends)

    run(talk())


def test_a_slow_reader_holds_the_sender_back() -> None:
    async def talk() -> None:
        async with connected(tuning=Tuning(unread_bytes=2 * MIB)) as (client, server):
            array = noise(MIB)

            async def flood() -> None:
                for version in range(64):
                    await client.send(Parameters(version=version), {"w": array})

            flooding = asyncio.create_task(flood())
            await until(lambda: server.unread == 2)
            progress = -1
            while progress != client.bytes_sent:  # until the buffers of the operating system are full
                progress = client.bytes_sent
                await asyncio.sleep(0.05)
            assert not flooding.done()
            assert server.unread == 2
            assert client.bytes_sent < 40 * MIB
            versions = [(await server.receive(5)).message for _ in range(64)]
            assert [m.version for m in versions if isinstance(m, Parameters)] == list(range(64))
            await flooding

    run(talk())


def test_a_peer_that_stops_reading_is_lost() -> None:
    async def talk() -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf:
            client = await connect(
                *deaf.getsockname(), Trust.plain_loopback(), ROUNDS, tuning=Tuning(write_stall_s=0.05)
            )
            with pytest.raises(PeerError, match=r"took no bytes for 0\.05 s"):
                await client.send(Parameters(version=1), {"w": noise(64 * MIB)})
            with pytest.raises(PeerError, match="took no bytes"):
                await client.receive(5)

    run(talk())


def test_a_peer_that_vanishes_in_the_middle_is_named() -> None:
    async def talk() -> None:
        async with connected() as (client, server):
            large = asyncio.create_task(client.send(Parameters(version=1), {"w": noise(64 * MIB)}))
            await until(lambda: server.bytes_received > 4 * MIB)
            client.abort()
            with pytest.raises(ClosedError, match="dropped here"):
                await large
            with pytest.raises(PeerError, match=r"in the middle of .*: Parameters 2 lacks \d+ bytes"):
                await server.receive(5)
            with pytest.raises(PeerError):
                await server.send(Heartbeat())

    run(talk())


def test_a_goodbye_is_told_apart_from_a_loss() -> None:
    async def talk() -> None:
        async with connected() as (client, server):
            await client.send(Shutdown(reason="last words"))
            await client.close("enough")
            assert (await server.receive(5)).message == Shutdown(reason="last words", id=2)
            with pytest.raises(ClosedError, match="said goodbye: enough"):
                await server.receive(5)
            with pytest.raises(ClosedError, match="closed here: enough"):
                await client.receive(5)
            await client.close("again")
        async with connected() as (client, server):
            client.abort()
            with pytest.raises(PeerError, match="without a goodbye"):
                await server.receive(5)

    run(talk())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_closing_after_the_peer_has_gone_is_harmless(tls: bool, tmp_path: Path) -> None:
    async def talk() -> None:
        async with connected(open_authority(tmp_path) if tls else None) as (client, server):
            client.abort()
            socket_is_closed = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(socket_is_closed.set_result, None)
            await socket_is_closed  # but the server's end has not been told: its goodbye is answered by a reset
            assert server.error is None
            await server.close("too late")
            with pytest.raises(ClosedError, match="closed here: too late"):
                await server.receive(5)

    run(talk())


def test_closing_ends_a_send_under_way_and_never_hangs() -> None:
    async def talk() -> None:
        async with connected(tuning=Tuning(unread_messages=1)) as (client, server):
            await client.send(Shutdown(reason="fills the reader"))
            await until(lambda: server.unread == 1)
            large = asyncio.create_task(client.send(Parameters(version=1), {"w": noise(64 * MIB)}))
            await until(lambda: client.bytes_sent > MIB)
            await client.close("no time")
            with pytest.raises(ClosedError, match="no time"):
                await large

    run(talk())


def test_silence_ends_a_connection_and_heartbeats_keep_it() -> None:
    async def talk() -> None:
        async with connected() as (client, server):
            client.keep_alive(0.01, 5)
            server.keep_alive(5, 5)
            await until(lambda: server.heartbeats_received >= 5)
            with pytest.raises(TimeoutError):
                await server.receive(0)  # heartbeats are not handed out
            assert client.heartbeats_received == 0
        async with connected() as (_, server):
            server.keep_alive(0.02, 0.06)
            with pytest.raises(PeerError, match=r"was silent for 0\.\d s"):
                await server.receive(5)

    run(talk())


def test_a_cancelled_receive_loses_nothing() -> None:
    async def talk() -> None:
        async with connected() as (client, server):
            waiting = asyncio.create_task(server.receive())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            with pytest.raises(TimeoutError):
                await server.receive(0.01)
            await client.send(Shutdown(reason="x"))
            await until(lambda: server.unread)
            assert (await server.receive(0)).message == Shutdown(reason="x", id=2)

    run(talk())


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_cancelled_send_is_withdrawn_and_frees_its_array(tls: bool, tmp_path: Path) -> None:
    async def talk() -> None:
        tuning = Tuning(unread_messages=1)
        async with connected(open_authority(tmp_path) if tls else None, tuning=tuning) as (client, server):
            await client.send(Shutdown(reason="fills the reader"))
            await until(lambda: server.unread == 1)
            array = noise(64 * MIB)
            large = asyncio.create_task(client.send(Parameters(version=1), {"w": array}))
            await until(lambda: client.bytes_sent > 2 * MIB)
            large.cancel()
            await asyncio.gather(large, return_exceptions=True)
            array[:] = 0  # what was half sent must still match its checksum
            assert large.cancelled()
            after = asyncio.create_task(client.send(Shutdown(reason="after")))
            assert (await server.receive(5)).message == Shutdown(reason="fills the reader", id=2)
            assert (await server.receive(5)).message == Shutdown(reason="after", id=4)
            await after
            assert client.bytes_sent < 32 * MIB

    run(talk())


def test_what_cannot_be_sent_costs_nothing() -> None:
    async def talk() -> None:
        async with connected() as (client, server):
            with pytest.raises(LocalProtocolError, match="numpy type"):
                await client.send(Parameters(version=1), {"w": np.zeros(3, ">f4")})
            await client.send(Shutdown(reason="fine"))
            assert (await server.receive(5)).message == Shutdown(reason="fine", id=2)

    run(talk())


def test_refused_tensor_ends_the_connection_with_a_reason() -> None:
    async def talk() -> None:
        allocate = expect_tensors([TensorSpec("w", "f32", (2,))])
        async with connected(allocate=allocate) as (client, server):
            await client.send(Parameters(version=1), {"w": np.zeros(2, "<f4")})
            await server.receive(5)
            await client.send(Parameters(version=2), {"w": np.zeros(3, "<f4")})
            with pytest.raises(RemoteProtocolError, match=r"127\.0\.0\.1:\d+: .* must be f32\[2\]"):
                await server.receive(5)
            with pytest.raises(ClosedError, match=r"goodbye: .* must be f32\[2\], declared was f32\[3\]"):
                await client.receive(5)

    run(talk())


def test_a_hook_that_fails_surfaces_as_it_is() -> None:
    def broken(_message: object, _spec: object) -> np.ndarray:
        raise KeyError("a bug of the caller's")

    async def talk() -> None:
        async with connected(allocate=broken) as (client, server):
            await client.send(Parameters(version=1), {"w": np.zeros(2)})
            with pytest.raises(KeyError, match="a bug of the caller's"):
                await server.receive(5)

    run(talk())


def test_a_stranger_may_not_send_tensors() -> None:
    async def talk() -> None:
        async with connected(accept=False) as (client, server):
            await client.send(Parameters(version=1), {"w": np.zeros(2)})
            with pytest.raises(RemoteProtocolError, match="header may have 0 to 0 bytes"):
                await server.receive(5)

    run(talk())


def frames(*messages: object) -> bytes:
    outbox = Outbox(ROUNDS)
    for message in messages:
        outbox.add(message)  # type: ignore[arg-type]
    data = b""
    while (frame := outbox.next_frame()) is not None:
        data += frame.head
    return data


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (b"GET / HTTP/1.1\r\n", "speaks HTTP"),
        (b"PLNT\x63", "upgrade planetary on this side"),
        (frames(Shutdown(reason="x")).replace(b"Shutdown", b"Shutdowm"), "does not match its checksum"),
        (START + struct.pack("<IIIII", 40, 2**31, 0, 0, 0), "does not match its checksum"),
    ],
    ids=["http", "newer", "damaged", "over the cap"],
)
def test_bad_bytes_cost_their_sender_its_connection_only(bad: bytes, text: str) -> None:
    async def talk() -> None:
        async with listening() as (server, taken):
            good = await connect(server.host, server.port, Trust.plain_loopback(), ROUNDS)
            await good.send(Shutdown(reason="first"))
            good_end = await taken.get()
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(frames(Shutdown(reason="hello")) + bad + bytes(MIB))
            bad_end = await taken.get()
            await bad_end.receive(5)
            with pytest.raises(RemoteProtocolError, match=text):
                await bad_end.receive(5)
            (told,) = Inbox(ROUNDS).feed(await reader.read())  # the farewell arrives although much was left unread
            assert isinstance(told.message, Goodbye)
            assert text in told.message.reason
            writer.close()
            await good.send(Shutdown(reason="still here"))
            await good_end.receive(5)
            assert (await good_end.receive(5)).message == Shutdown(reason="still here", id=2)

    run(talk())


def test_repeated_messages_are_dropped_and_counted() -> None:
    async def talk() -> None:
        async with listening() as (server, taken):
            _, writer = await asyncio.open_connection(server.host, server.port)
            once = frames(Shutdown(reason="a"), Shutdown(reason="b"))
            writer.write(once + once + frames(*[Shutdown(reason=r) for r in "abc"]))
            end = await taken.get()
            reasons = [(await end.receive(5)).message for _ in range(3)]
            assert [m.reason for m in reasons if isinstance(m, Shutdown)] == ["a", "b", "c"]
            assert end.duplicates == 4
            writer.close()

    run(talk())
