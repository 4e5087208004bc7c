from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from net_support import listening, open_authority, run, token_for

from planetary.core.errors import ClosedError, PeerError, RemoteProtocolError, TrustError
from planetary.fleet.protocol.messages import FABRIC, Hello, Refused, Shutdown, Welcome
from planetary.net import (
    ThreadedConnection,
    TokenCheck,
    Trust,
    answer_hello,
    connect,
    judge_hello,
    receive_hello,
    refusal_error,
    say_hello,
)
from planetary.net.identity import Identity
from planetary.net.invite import mint, read

WELCOME = Welcome(run="r", heartbeat_s=5.0, silent_after_s=20.0)
SECRET, PRINT = bytes(range(32)), bytes(range(32, 64))
HELLO = Hello(
    role="worker",
    protocol=FABRIC.version,
    software="1.2",
    token="",
    worker="node-a/0",
    node="node-a",
    pid=3,
)


def judge(hello: Hello, tokens: TokenCheck | None = None, now: float = 1000.0) -> Welcome | Refused:
    return judge_hello(hello, FABRIC.version, welcome=WELCOME, software="1.3", tokens=tokens, now=now)


def test_without_tokens_a_client_of_our_protocol_is_welcome() -> None:
    assert judge(HELLO) is WELCOME


@pytest.mark.parametrize(
    ("theirs", "side"), [(FABRIC.version - 1, "worker 'node-a/0'"), (FABRIC.version + 1, "gateway")]
)
def test_protocol_skew_says_which_side_to_upgrade(theirs: int, side: str) -> None:
    refused = judge(msgspec.structs.replace(HELLO, protocol=theirs))
    assert isinstance(refused, Refused)
    assert refused.code == "protocol"
    assert refused.reason.endswith(f"upgrade planetary on the side of the {side}")
    assert "planetary 1.2" in refused.reason
    assert "planetary 1.3" in refused.reason


def test_tokens_are_judged() -> None:
    token = mint(SECRET, PRINT, expires=2000, roles=["worker"])
    tokens = TokenCheck(secret=SECRET, authority_fingerprint=PRINT)
    hello = msgspec.structs.replace(HELLO, token=token)
    assert judge(hello, tokens) is WELCOME
    revoking = TokenCheck(secret=SECRET, authority_fingerprint=PRINT, revoked=[read(token).id])
    for refused, text in (
        (judge(HELLO, tokens), "no invite token was given"),
        (judge(hello, tokens, now=2000.0), "expired"),
        (judge(hello, revoking), "revoked"),
        (judge(msgspec.structs.replace(hello, role="supervisor"), tokens), "not for 'supervisor'"),
        (judge(hello, TokenCheck(secret=PRINT, authority_fingerprint=PRINT)), "not made by this gateway"),
    ):
        assert isinstance(refused, Refused)
        assert refused.code == "token"
        assert text in refused.reason


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (Refused(code="protocol", reason="why"), TrustError),
        (Refused(code="token", reason="why"), TrustError),
        (Refused(code="busy", reason="why", retry=True), PeerError),
        (Refused(code="finished", reason="why"), ClosedError),
    ],
)
def test_refusals_are_raised_by_what_they_mean(refused: Refused, error: type[Exception]) -> None:
    with pytest.raises(error, match="the gateway refused this client: why"):
        raise refusal_error(refused)


def test_a_client_is_taken_and_both_sides_stay_alive(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    token = token_for(authority)
    tokens = TokenCheck(secret=authority.invite_secret, authority_fingerprint=authority.fingerprint)
    welcome = Welcome(run="r", heartbeat_s=0.02, silent_after_s=5.0)

    async def meet() -> None:
        async with listening(authority.server_context()) as (server, taken):

            async def gateway() -> None:
                end = await taken.get()
                hello = await receive_hello(end, Hello, 5)
                answer = judge_hello(hello, FABRIC.version, welcome=welcome, software="1", tokens=tokens, now=1.0)
                assert await answer_hello(end, answer, 5)
                while not end.heartbeats_received:
                    await asyncio.sleep(0.002)

            serving = asyncio.create_task(gateway())
            client = await connect(server.host, server.port, Trust(token), FABRIC)
            answer = await say_hello(client, msgspec.structs.replace(HELLO, token=token), 5)
            assert answer == msgspec.structs.replace(welcome, id=1)
            await serving
            while not client.heartbeats_received:
                await asyncio.sleep(0.002)
            client.abort()

    run(meet())


def test_a_refused_client_learns_why_and_is_closed() -> None:
    async def meet() -> None:
        async with listening() as (server, taken):
            client = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)
            asking = asyncio.create_task(say_hello(client, HELLO, 5))
            end = await taken.get()
            assert await receive_hello(end, Hello, 5) == msgspec.structs.replace(HELLO, id=1)
            assert not await answer_hello(end, Refused(code="target", reason="no such target"), 5)
            assert await asking == Refused(code="target", reason="no such target", id=1)
            with pytest.raises(ClosedError, match="said goodbye: no such target"):
                await client.receive(5)

    run(meet())


def test_another_first_message_breaks_the_protocol() -> None:
    async def meet() -> None:
        async with listening() as (server, taken):
            client = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)
            asking = asyncio.create_task(say_hello(client, HELLO, 5))
            end = await taken.get()
            await end.send(Shutdown(reason="not an answer"))
            with pytest.raises(RemoteProtocolError, match="expected Welcome or Refused, found Shutdown"):
                await asking
            other = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)
            await other.send(Shutdown(reason="not a hello"))
            with pytest.raises(RemoteProtocolError, match="expected Hello as the first message, found Shutdown"):
                await receive_hello(await taken.get(), Hello, 5)
            other.abort()

    run(meet())


def test_a_gateway_that_does_not_answer_is_a_peer_error() -> None:
    async def meet() -> None:
        async with listening() as (server, _):
            client = await connect(server.host, server.port, Trust.plain_loopback(), FABRIC)
            with pytest.raises(PeerError, match=r"did not answer the hello within 0\.3 s"):
                await say_hello(client, HELLO, 0.3)
            with pytest.raises(PeerError, match="did not answer the hello"):
                await asyncio.to_thread(
                    ThreadedConnection,
                    server.host,
                    server.port,
                    Trust.plain_loopback(),
                    FABRIC,
                    HELLO,
                    timeout_s=0.3,
                )

    run(meet())


DAY = 86400.0
MINE, OTHER = Identity(bytes(range(32))), Identity(bytes(range(1, 33)))


def greeting(identity: Identity, token: str) -> Hello:
    return identity.sign(msgspec.structs.replace(HELLO, token=token), PRINT)


@pytest.mark.parametrize("day", [6, 8, 400])
def test_a_known_machine_comes_back_with_an_expired_invite(day: int) -> None:
    token = mint(SECRET, PRINT, expires=7 * DAY)
    tokens = TokenCheck(
        secret=SECRET, authority_fingerprint=PRINT, identified=True, known=lambda key: key == MINE.public
    )
    assert judge(greeting(MINE, token), tokens, now=day * DAY) is WELCOME
    stranger = judge(greeting(OTHER, token), tokens, now=day * DAY)
    assert (stranger is WELCOME) == (day < 7)
    claimed = judge(msgspec.structs.replace(greeting(OTHER, token), identity=MINE.public), tokens, now=day * DAY)
    assert isinstance(claimed, Refused)
    assert claimed.code == "identity"
    revoked = judge(greeting(MINE, token), replace(tokens, revoked={read(token).id}), now=day * DAY)
    assert isinstance(revoked, Refused)
    assert "was revoked" in revoked.reason


def test_an_expired_invite_waits_for_a_server_that_starts() -> None:
    token = mint(SECRET, PRINT, expires=7 * DAY)
    tokens = TokenCheck(secret=SECRET, authority_fingerprint=PRINT, identified=True, known=lambda key: None)
    refused = judge(greeting(MINE, token), tokens, now=8 * DAY)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry) == ("busy", True)
    assert judge(greeting(MINE, token), tokens, now=6 * DAY) is WELCOME


def test_invites_do_not_lapse_after_entry_elsewhere() -> None:
    token = mint(SECRET, PRINT, expires=7 * DAY)
    tokens = TokenCheck(secret=SECRET, authority_fingerprint=PRINT, lapses=False)
    assert judge(msgspec.structs.replace(HELLO, token=token), tokens, now=8 * DAY) is WELCOME
