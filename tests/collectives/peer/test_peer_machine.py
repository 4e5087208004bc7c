"""The peer's machine without a network: what it makes of a refusal."""

from __future__ import annotations

import pytest

from planetary.collectives import RemovedError
from planetary.collectives.peer import peer_events as e
from planetary.collectives.peer.peer_machine import FIRST_SESSION, PeerMachine
from planetary.collectives.protocol import collective_messages as m
from planetary.core.errors import PeerError, TrustError

HELLO = m.Register(protocol=m.PROTOCOL, group=0, name="a", host="", port=1, machine="here")
REGISTERED = m.Registered(run="group 0", heartbeat_s=1.0, silent_after_s=10.0, peer="p1", secret="s")
TOPOLOGY = m.RingChanged(epoch=1, ring=(), key="k", digest="blake2b", world=1, groups=1, largest=1)


def dialling(grace_s: float = 0.0) -> PeerMachine:
    machine = PeerMachine(lambda: HELLO, grace_s=grace_s)
    machine.handle(e.Opened(FIRST_SESSION), 0.0)
    return machine


def away_and_back() -> tuple[PeerMachine, int]:
    """Return a member whose master was lost and is connected again, and the session."""
    machine = dialling(grace_s=10.0)
    for message in (REGISTERED, TOPOLOGY):
        machine.handle(e.Received(FIRST_SESSION, message), 0.0)
    machine.handle(e.Closed(FIRST_SESSION, "reset"), 1.0)
    (dial,) = machine.handle(e.Tick(), 2.0)
    assert isinstance(dial, e.Dial)
    (hello,) = machine.handle(e.Opened(dial.session), 2.0)
    assert isinstance(hello, e.Send)
    assert isinstance(hello.message, m.Register)
    assert hello.message.peer == "p1"
    return machine, dial.session


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (m.Refused(code="registration", reason="why"), TrustError),
        (m.Refused(code="token", reason="why"), TrustError),
        (m.Refused(code="busy", reason="why", retry=True), PeerError),
        (m.Refused(code="unknown", reason="why"), RemovedError),
    ],
)
def test_the_code_of_a_refusal_decides_the_error(refused: m.Refused, error: type[Exception]) -> None:
    machine = dialling()
    finish, hangup = machine.handle(e.Received(FIRST_SESSION, refused), 0.0)
    assert isinstance(finish, e.FinishCall)
    assert isinstance(hangup, e.Hangup)
    assert type(hangup.error) is error
    assert "the master refused this client: why" in str(finish.error)


def test_a_member_that_returns_to_a_busy_master_tries_again_within_the_grace_time() -> None:
    machine, session = away_and_back()
    assert not machine.handle(e.Received(session, m.Refused(code="busy", reason="full", retry=True)), 2.0)
    machine.handle(e.Closed(session, "refused"), 2.0)
    assert [type(instruction) for instruction in machine.handle(e.Tick(), 4.0)] == [e.Dial]
    hangup = machine.handle(e.Tick(), 11.0)[-1]
    assert isinstance(hangup, e.Hangup)
    assert "did not come back within 10 s" in str(hangup.error)


def test_a_member_that_the_master_has_forgotten_is_removed() -> None:
    machine, session = away_and_back()
    hangup = machine.handle(e.Received(session, m.Refused(code="unknown", reason="why")), 2.0)[-1]
    assert isinstance(hangup, e.Hangup)
    assert isinstance(hangup.error, RemovedError)
