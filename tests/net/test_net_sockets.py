"""Sockets of both planes are set up in one place, and a server's certificate is judged in one place."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
from pathlib import Path

import pytest
from net_support import listening, open_authority, run, token_for

from planetary.collectives import Master
from planetary.collectives.transport.sockets import dial, listen
from planetary.core.errors import ResourceError, TrustError, UserError
from planetary.fleet.protocol.messages import FABRIC
from planetary.net import Trust, connect
from planetary.net.addresses import listening_socket
from planetary.net.certificates import self_signed, serving_context
from planetary.net.network import TCP, Listener, MakeProtocol


class Recording:
    """The real network, which keeps the transports that it dialled."""

    def __init__(self) -> None:
        self.dialled: list[asyncio.Transport] = []

    async def dial(self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None) -> asyncio.Transport:
        transport = await TCP.dial(make, host, port, tls)
        self.dialled.append(transport)
        return transport

    async def listen(
        self, make: MakeProtocol, host: str, port: int, tls: ssl.SSLContext | None, handshake_s: float
    ) -> Listener:
        return await TCP.listen(make, host, port, tls, handshake_s)


def is_prepared(sock: socket.socket) -> bool:
    return bool(
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        and sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    )


def test_connections_send_at_once_and_notice_lost_machines() -> None:
    async def look() -> None:
        network = Recording()
        async with listening() as (server, _):
            connection = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC, network=network)
            assert is_prepared(network.dialled[0].get_extra_info("socket"))
            connection.abort()

    run(look())
    with listening_socket("127.0.0.1", 0) as listener, dial("127.0.0.1", listener.getsockname()[1], 5) as sock:
        assert is_prepared(sock)


def test_port_in_use_is_explained_with_each_sides_error() -> None:
    with listening_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        said = []
        for error, begin in (
            (ResourceError, lambda: listening_socket("127.0.0.1", port)),
            (UserError, lambda: listen("127.0.0.1", port)),
            (UserError, Master(f"127.0.0.1:{port}").start),
        ):
            with pytest.raises(error) as caught:
                begin()
            said.append(str(caught.value))
        assert len(set(said)) == 1
        assert f"choose another port (e.g. {port + 1})" in said[0]
        if sys.platform == "linux":
            assert f"process {os.getpid()} (" in said[0]


def test_trust_recognises_a_certificate_and_its_authority(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    trust = Trust(token_for(authority))
    with pytest.raises(TrustError, match="connecting to here: it showed no certificate"):
        trust.recognise(None, "here")
    pair, _ = self_signed("somebody", days=1, now=0.0)
    strange = ssl.PEM_cert_to_DER_cert(pair[pair.index(b"-----BEGIN CERT") :].decode())
    with pytest.raises(TrustError, match="not one of a planetary gateway"):
        trust.recognise(strange, "here")
    assert trust.authority is None
    server = (tmp_path / "server.pem").read_text()
    trust.recognise(ssl.PEM_cert_to_DER_cert(server[server.index("-----BEGIN CERT") :]), "here")
    assert trust.authority == authority.certificate


def test_contexts_speak_the_newest_tls_only(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    trust = Trust(token_for(authority))
    trust.authority = authority.certificate
    for context in (serving_context(tmp_path / "server.pem"), authority.server_context(), trust.context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert trust.context().check_hostname
    assert trust.context().verify_mode is ssl.CERT_REQUIRED
