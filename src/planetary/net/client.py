"""Dial a server, and authenticate it before anything is sent."""

from __future__ import annotations

import asyncio
import os
import ssl

from planetary.core.errors import PeerError, TrustError, UserError
from planetary.net import invite
from planetary.net.addresses import address_text, is_loopback
from planetary.net.authority import SERVER_NAME, authority_in
from planetary.net.certificates import client_context, looking_context
from planetary.net.connection import Connection, ConnectionProtocol, Tuning
from planetary.net.network import TCP, Network
from planetary.wire.limits import Limits
from planetary.wire.protocol import Protocol
from planetary.wire.streams import Allocate, allocate_any


class Trust:
    """A client's means to authenticate a gateway: an invite token, or nothing on this machine's loopback.

    It remembers the gateway's authority once it was found, so a reconnection needs one handshake only.
    """

    def __init__(self, token: str) -> None:
        """Trust the gateway whose authority the token names. Raises `TrustError` for a malformed one."""
        self.token = token.strip()
        self.invite = invite.read(token) if token else None
        self.authority: str | None = None  # PEM, once found

    def recognise(self, shown: bytes | None, where: str) -> None:
        """Remember the authority of a certificate (DER) that the server at `where` shows.

        Raises `TrustError` when there is none, or when it is not the one the token names.
        """
        assert self.invite is not None
        if not shown:
            raise TrustError(f"connecting to {where}: it showed no certificate")
        self.authority = authority_in(shown, self.invite.authority_fingerprint, where)

    def context(self) -> ssl.SSLContext:
        """Return the context for connections to the server that was recognised."""
        assert self.authority is not None
        return client_context(self.authority)

    @classmethod
    def plain_loopback(cls) -> Trust:
        """Trust any listener on this machine, without TLS: for a user who asked for that explicitly."""
        return cls("")

    def __repr__(self) -> str:
        """Name the trust without showing the token."""
        return f"Trust({self.invite.id if self.invite else 'plain loopback'})"


async def connect(
    host: str,
    port: int,
    trust: Trust,
    protocol: Protocol,
    *,
    timeout_s: float = 10.0,
    limits: Limits | None = None,
    allocate: Allocate = allocate_any,
    tuning: Tuning | None = None,
    network: Network = TCP,
    allow_unencrypted: bool = False,
) -> Connection:
    """Connect to a server within `timeout_s` seconds in all.

    With a token: the first time, an unverified TLS connection is opened only to look at the certificate and closed
    again; the authority must have the fingerprint in the token. Then, and for every later connection, TLS with full
    verification. The token is never sent here; it goes into the `Hello`.

    `allow_unencrypted`: connect without TLS to other machines, too; the caller has warned the user.

    Raises `PeerError` without an answer, `TrustError` when the server is not the one the token names
    (with the expected and the actual value), `UserError` for a plain connection to anything but loopback.
    """
    where = address_text(host, port)
    connection = Connection(protocol, limits=limits, allocate=allocate, tuning=tuning)
    try:
        async with asyncio.timeout(timeout_s):
            if trust.invite is None:
                return await _open(network, connection, host, port, None, allow_unencrypted=allow_unencrypted)
            if trust.authority is None:
                trust.recognise(await _shown_certificate(network, host, port), where)
            return await _open(network, connection, host, port, trust.context())
    except TimeoutError:
        raise PeerError(
            f"connecting to {where}: no answer within {timeout_s:g} s; is the server up? Is a firewall between?"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise TrustError(
            f"connecting to {where}: expected a certificate for {SERVER_NAME!r} by the authority of the "
            f"invite token, found one that fails: {error.verify_message}"
        ) from None
    except ssl.SSLError as error:
        raise no_handshake(where, error) from None
    except OSError as error:
        # asyncio has a separate text in `strerror`: "Connect call failed ('127.0.0.1', 8080)".
        reason = os.strerror(error.errno) if error.errno else error.strerror or str(error)
        if not reason:  # a server at the limit of strangers closes without an answer
            raise PeerError(f"connecting to {where}: it closed the connection at once; it may be busy") from None
        raise PeerError(f"connecting to {where}: {reason}; is the server up, and is this its address?") from None


def no_handshake(where: str, error: OSError) -> TrustError:
    """Return the `TrustError` for a TLS handshake that failed. An `ssl.SSLError` is an `OSError`."""
    reason = error.reason if isinstance(error, ssl.SSLError) else ""
    plain = reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE")
    hint = "it does not speak TLS; was it started without?" if plain else str(error)
    return TrustError(f"connecting to {where}: expected a TLS handshake, but {hint}")


async def _open(
    network: Network,
    connection: Connection,
    host: str,
    port: int,
    context: ssl.SSLContext | None,
    *,
    allow_unencrypted: bool = False,
) -> Connection:
    transport = await network.dial(lambda: ConnectionProtocol(connection), host, port, context)
    address = transport.get_extra_info("peername")[0]
    if context is None and not allow_unencrypted and not is_loopback(address):
        connection.abort()
        raise UserError(
            f"refusing to talk to {address_text(host, port)} ({address}) without TLS: it is not this machine. "
            "Give the invite token of the server"
        )
    return connection


async def _shown_certificate(network: Network, host: str, port: int) -> bytes | None:
    transport = await network.dial(asyncio.Protocol, host, port, looking_context())
    try:
        return transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        transport.abort()
