"""The first two messages of a connection: who the client is, and whether the gateway takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TypeVar

from planetary.core.errors import PeerError, RemoteProtocolError, TrustError
from planetary.net import invite
from planetary.net.connection import Connection
from planetary.net.identity import check_proof
from planetary.net.session import Greeting, Refused, Welcome
from planetary.wire.streams import Allocate

G = TypeVar("G", bound=Greeting)
W = TypeVar("W", bound=Welcome | None)


@dataclass(frozen=True, kw_only=True)
class TokenCheck:
    """How a gateway recognises tokens.

    An invite lets a machine in for the first time. Who is in stays: the key of a machine that is `known` needs no valid
    invite, only one not revoked.

    Attributes:
        known: (public key) -> whether the machine has joined before; None: the server will know that in a moment.
        lapses: whether invites end at all; not where another server has let the client in.
    """

    secret: bytes
    authority_fingerprint: bytes
    revoked: Container[str] = ()  # ids of invites
    identified: bool = False  # a client has to prove the machine's identity
    known: Callable[[str], bool | None] = lambda key: False
    lapses: bool = True


def judge_hello(
    hello: Greeting,
    version: int,
    *,
    welcome: W,
    software: str,
    tokens: TokenCheck | None,
    now: float,
    server: str = "gateway",
) -> W | Refused:
    """Decide whether to take a client: `welcome`, or a refusal that names the remedy.

    `version`: of the server's protocol, `software`: of the package, `server` the name for people. `tokens` is None for
    a server without TLS, which takes clients without a token. `now` is Unix time in seconds. The server's other
    requirements, e.g. the client's version of IREE, are checked elsewhere, after this.
    """
    if hello.protocol != version:
        client_is_old = hello.protocol < version
        side = hello.sender() if client_is_old else server
        reason = (
            f"protocol versions differ: the {server} speaks {version} (planetary {software}), "
            f"{hello.sender()} speaks {hello.protocol} (planetary {hello.software}); "
            f"upgrade planetary on the side of the {side}"
        )
        return Refused(code="protocol", reason=reason)
    if tokens is not None:
        try:
            shown = invite.verify(
                hello.token,
                tokens.secret,
                tokens.authority_fingerprint,
                role=hello.role,
                now=None,
                revoked=tokens.revoked,
            )
        except TrustError as error:
            return Refused(code="token", reason=str(error))
        try:
            if tokens.identified or hello.identity:
                check_proof(hello, tokens.authority_fingerprint)
        except TrustError as error:
            return Refused(code="identity", reason=str(error))
        lapsed = invite.lapsed(shown, now) if tokens.lapses else ""
        known = bool(lapsed) and bool(hello.identity) and tokens.known(hello.identity)
        if lapsed and known is None:
            why = f"{lapsed}; the {server} is starting, and will know in a moment whether this machine took part before"
            return Refused(code="busy", reason=why, retry=True)
        if lapsed and not known:
            return Refused(code="token", reason=lapsed)
    return welcome


async def receive_hello(connection: Connection, kind: type[G], timeout_s: float) -> G:
    """Return the client's first message, the greeting of the protocol: the gateway's side.

    Raises `RemoteProtocolError` when it is another message, `PeerError` when it does not come in time.
    """
    try:
        received = await connection.receive(timeout_s)
    except TimeoutError:
        raise PeerError(f"{connection.peer} did not say hello within {timeout_s:g} s") from None
    if not isinstance(received.message, kind):
        raise RemoteProtocolError(
            f"{connection.peer}: expected {kind.__name__} as the first message, found {type(received.message).__name__}"
        )
    return received.message


async def answer_hello(
    connection: Connection, answer: Welcome | Refused, timeout_s: float, allocate: Allocate | None = None
) -> bool:
    """Send the gateway's decision within `timeout_s` seconds; return whether the client was taken.

    An accepted client is kept alive from then on and may send messages of every size (tensors go where `allocate` puts
    them, by default the server's own allocator); a refused client's connection is closed.
    """
    if isinstance(answer, Welcome):
        connection.accept_peer(allocate=allocate)  # before the client can know
    try:
        async with asyncio.timeout(timeout_s):
            await connection.send(answer)
    except TimeoutError:
        connection.abort()
        raise PeerError(f"{connection.peer} did not take the answer to its hello in {timeout_s:g} s") from None
    if isinstance(answer, Refused):
        await connection.close(answer.reason)
        return False
    connection.keep_alive(answer.heartbeat_s, answer.silent_after_s)
    return True


async def say_hello(connection: Connection, hello: Greeting, timeout_s: float) -> Welcome | Refused:
    """Introduce this client and return the gateway's answer within `timeout_s` seconds.

    After a `Welcome` the connection is kept alive as the gateway asked. Raises `PeerError` when there is no
    answer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await connection.send(hello)
            received = await connection.receive()
    except TimeoutError:
        connection.abort()
        raise PeerError(f"{connection.peer} did not answer the hello within {timeout_s:g} s") from None
    answer = received.message
    if not isinstance(answer, Welcome | Refused):
        connection.abort()
        raise RemoteProtocolError(f"{connection.peer}: expected Welcome or Refused, found {type(answer).__name__}")
    if isinstance(answer, Welcome):
        connection.keep_alive(answer.heartbeat_s, answer.silent_after_s)
    return answer
