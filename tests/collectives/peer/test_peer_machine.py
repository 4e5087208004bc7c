"""The peer's machine without a network: what it makes of a refusal."""

from __future__ import annotations

import pytest

from message_fuzz import RandomMessages, bombard
from planetary.collectives import RemovedError
from planetary.collectives.peer import events as e
from planetary.collectives.peer.machine import FIRST_SESSION, PeerMachine
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.options import Spec
from planetary.core.errors import PeerError, RemoteProtocolError, TrustError

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


def test_member_returns_to_a_busy_master_within_the_grace_time() -> None:
    """A member that returns to a busy master tries again within the grace time."""
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


def test_an_operation_of_another_ring_is_not_begun() -> None:
    """Its peers, their order and the key of their links are those of the ring with that number."""
    machine = dialling()
    for message in (REGISTERED, TOPOLOGY):
        machine.handle(e.Received(FIRST_SESSION, message), 0.0)
    spec = Spec(kind="all_reduce", op="sum", dtype="f32", count=4)
    machine.handle(e.CallCollective(7, 5.0, 1, spec, None), 0.1)
    for epoch in (TOPOLOGY.epoch - 1, TOPOLOGY.epoch + 1):
        commence = m.Commence(call=7, seq=5 + epoch, epoch=epoch)
        (answer,) = machine.handle(e.Received(FIRST_SESSION, commence), 0.2)
        assert isinstance(answer, e.Send)
        assert answer.message == m.Done(seq=5 + epoch, ok=False, reason=f"it does not know ring {epoch}")
    commence = m.Commence(call=7, seq=9, epoch=TOPOLOGY.epoch)
    (begin,) = machine.handle(e.Received(FIRST_SESSION, commence), 0.3)
    assert begin == e.BeginTransfer(7, 9, TOPOLOGY.epoch)


FROM_MASTER = (
    *(m.Registered, m.RingChanged, m.Voted, m.Pending, m.Commence, m.Contributions, m.Outcome, m.CallFailed),
    *(m.SyncPlan, m.Probe, m.Optimized, m.Removed, m.Refused),
)


@pytest.mark.parametrize("is_member", [False, True])
def test_no_message_of_a_master_ends_a_peer_without_a_reason(is_member: bool) -> None:
    """It raises nothing; a message that cannot follow is an error of the master."""
    errors = set()
    for seed in range(20):
        machine = dialling(grace_s=10.0)
        for message in (REGISTERED, TOPOLOGY)[: 1 + is_member]:
            machine.handle(e.Received(FIRST_SESSION, message), 0.0)
        machine.handle(e.CallVote(1, 5.0, 1), 0.1)
        machine.handle(e.CallPending(2, 5.0), 0.1)

        def tell(message: m.Message, machine: PeerMachine = machine) -> None:
            machine.handle(e.Received(FIRST_SESSION, message), 1.0)
            machine.validate()

        bombard(tell, FROM_MASTER, RandomMessages(seed), 40)
        errors.add(type(machine.error))
    assert RemoteProtocolError in errors


def test_a_message_of_an_earlier_connection_is_stale() -> None:
    machine, session = away_and_back()
    assert machine.handle(e.Received(FIRST_SESSION, m.Removed(reason="it was silent")), 2.0) == []
    assert machine.error is None
    machine.handle(e.Received(session, m.Removed(reason="it was silent")), 2.0)
    assert isinstance(machine.error, RemovedError)
