from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

import pytest
from net_support import listening, open_authority, run, token_for, until

from planetary.core.errors import (
    ClosedError,
    PeerError,
    ResourceError,
    TrustError,
    UserError,
)
from planetary.fleet.protocol.messages import FABRIC, Goodbye, Refused, Shutdown
from planetary.net import Connection, ServerLimits, Trust, connect, serve
from planetary.net.addresses import is_loopback, port_holder
from planetary.net.strangers import StrangerLimits
from planetary.wire import Inbox
from planetary.wire.frames import Kind, encode_prefix

START = b"PLNT" + bytes([FABRIC.version])
HEARTBEAT = encode_prefix(FABRIC.version, Kind.CONTROL, b"", BEAT := b'{"type":"Heartbeat","id":1}') + BEAT


async def nobody(_connection: Connection) -> None:
    raise AssertionError("no peer was expected")


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback_addresses(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_a_port_in_use_names_its_holder_and_a_way_out() -> None:
    async def listen_twice() -> None:
        async with listening() as (server, _):
            with pytest.raises(ResourceError) as caught:
                await serve("127.0.0.1", server.port, nobody, FABRIC)
            text = str(caught.value)
            assert f"cannot listen on 127.0.0.1:{server.port}: the port is in use by" in text
            assert f"choose another port (e.g. {server.port + 1})" in text
            if sys.platform == "linux":
                assert f"process {os.getpid()} (" in text

    run(listen_twice())


def test_a_port_that_nobody_holds_has_no_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if sys.platform == "linux":
            assert str(os.getpid()) in str(port_holder(port))
    assert port_holder(port) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_no_address_but_loopback_is_served_without_tls(host: str) -> None:
    if host == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with pytest.raises(UserError, match=r"refusing to listen on .* without TLS"):
        run(serve(host, 0, nobody, FABRIC))


def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    tls = open_authority(tmp_path).server_context()
    with pytest.raises(UserError, match="not one of this machine's"):
        run(serve("192.0.2.1", 0, nobody, FABRIC, tls=tls))
    with pytest.raises(UserError, match=r"cannot listen on 'nowhere\.invalid'"):
        run(serve("nowhere.invalid", 0, nobody, FABRIC, tls=tls))


def test_a_stranger_who_sends_a_heartbeat_is_dropped_at_once() -> None:
    async def wait_for_the_drop() -> None:
        async with listening(limits=ServerLimits(strangers=StrangerLimits(introduction_s=1e3))) as (server, taken):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(HEARTBEAT)
            (told,) = Inbox(FABRIC).feed(await reader.read())
            assert isinstance(told.message, Goodbye)
            assert told.message.reason == "expected a greeting as the first message, found a heartbeat"
            assert taken.empty()
            writer.close()
            await until(lambda: server.connections == 0)

    run(wait_for_the_drop())


@pytest.mark.parametrize("data", [b"", START], ids=["nothing", "half a frame"])
def test_a_stranger_who_says_nothing_is_dropped(data: bytes) -> None:
    async def wait_for_the_drop() -> None:
        async with listening(limits=ServerLimits(strangers=StrangerLimits(introduction_s=0.05))) as (server, taken):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(data)
            assert await reader.read() == b""
            assert taken.empty()
            await until(lambda: server.connections == 0)
            writer.close()

    run(wait_for_the_drop())


def test_a_full_server_says_so() -> None:
    async def come_too_late() -> None:
        async with listening(limits=ServerLimits(connections=1)) as (server, taken):
            first = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)
            await first.send(Shutdown(reason="here"))
            await taken.get()
            second = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)
            answer = (await second.receive(5)).message
            assert isinstance(answer, Refused)
            assert (answer.code, answer.retry) == ("busy", True)
            with pytest.raises(ClosedError, match="has its 1 connections"):
                await second.receive(5)
            first.abort()

    run(come_too_late())


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PeerError("the worker failed"), "the worker failed"),
        (KeyError("a bug"), "internal error of the server"),
        (None, "done"),
    ],
)
def test_the_end_of_the_callback_is_the_end_of_its_connection(
    error: Exception | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_connection(connection: Connection) -> None:
        await connection.receive()
        if error is not None:
            raise error

    async def watch() -> None:
        async with await serve("127.0.0.1", 0, on_connection, FABRIC) as server:
            client = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)
            await client.send(Shutdown(reason="go"))
            with pytest.raises(ClosedError, match=f"said goodbye: {told}"):
                await client.receive(5)
            await until(lambda: server.connections == 0)

    with caplog.at_level(logging.ERROR):
        run(watch())
    assert ("a bug" in caplog.text) == isinstance(error, KeyError)


def test_closing_a_server_says_goodbye_to_everybody() -> None:
    async def close() -> None:
        async with listening() as (server, taken):
            clients = [await connect(server.host, server.port, Trust.plain_loopback(), FABRIC) for _ in range(3)]
            for client in clients:
                await client.send(Shutdown(reason="here"))
                await taken.get()
            await server.close("maintenance")
            for client in clients:
                with pytest.raises(ClosedError, match="said goodbye: maintenance"):
                    await client.receive(5)
            with pytest.raises(PeerError, match="is the server up"):
                await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)

    run(close())


def test_nobody_there_is_a_peer_error() -> None:
    async def dial() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with pytest.raises(PeerError, match=rf"connecting to 127\.0\.0\.1:{port}: .*is the server up"):
            await connect("127.0.0.1", port, Trust.plain_loopback(), FABRIC)
        with pytest.raises(PeerError, match=r"connecting to nowhere\.invalid:1"):
            await connect("nowhere.invalid", 1, Trust.plain_loopback(), FABRIC)

    run(dial())


def test_silent_tls_handshake_costs_the_timeout(tmp_path: Path) -> None:
    trust = Trust(token_for(open_authority(tmp_path)))

    async def dial() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as deaf,
            pytest.raises(PeerError, match=r"no answer within 0\.1 s"),
        ):
            await connect(*deaf.getsockname(), trust, FABRIC, timeout_s=0.1)

    run(dial())


def test_tls_and_plain_ends_notice_each_other(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)

    async def mismatch() -> None:
        async with listening() as (server, _):
            with pytest.raises(TrustError, match="expected a TLS handshake, but it does not speak TLS"):
                await connect(server.host, server.port, Trust(token_for(authority)), FABRIC)
        async with listening(authority.server_context()) as (server, taken):
            client = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)
            await client.send(Shutdown(reason="hello?"))
            with pytest.raises(PeerError, match="if it is a gateway with TLS, an invite token is needed"):
                await client.receive(5)
            assert taken.empty()

    run(mismatch())
