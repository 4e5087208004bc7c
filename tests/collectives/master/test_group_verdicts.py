"""A fault that names another peer: is the peer gone, or only the link to it?"""

from __future__ import annotations

import math

from planetary.collectives.master.group_desk import Peer
from planetary.collectives.master.group_machine import GroupMachine
from planetary.collectives.master.group_operations import Running
from planetary.collectives.protocol import messages as m
from planetary.collectives.protocol.options import Spec
from planetary.machine.events import Instruction, Send

SPEC = Spec(kind="all_reduce", dtype="f32", count=1 << 20, op="sum")
REFUSED = "sending to c: connecting to 127.0.0.1:1: Connection refused"


class Ring:
    """Peers a, b and c, of which `seq` runs; outcomes as they are told."""

    def __init__(self) -> None:
        self.machine = GroupMachine(0, lambda: "key", lambda: (3, 1, 3))
        self.outcomes: list[m.Outcome] = []
        for number, name in enumerate("abc"):
            info = m.PeerInfo(name, name, "127.0.0.1", 1, "machine", "")
            self.machine.desk.peers[name] = Peer(info, "secret", (), number)
        for name in "abc":
            self.said(name, m.Vote(call=1, number=1, timeout_s=10.0, min_world=3))
        self.seq = 0
        self.start()

    def start(self, now: float = 0.0) -> None:
        for call, name in enumerate("abc"):
            self.said(name, m.Start(call=10 + call, timeout_s=10.0, tag=0, spec=SPEC), now)

    def said(self, peer: str, message: m.Message, now: float = 0.0) -> None:
        self.take(self.machine.request(peer, message, now))

    def take(self, out: list[Instruction]) -> None:
        for instruction in out:
            match instruction:
                case Send(_, m.Commence(seq=seq)):
                    self.seq = seq
                case Send(_, m.Outcome() as outcome):
                    self.outcomes.append(outcome)

    def blame(self, reporter: str, blamed: str, now: float) -> None:
        self.said(reporter, m.Done(seq=self.seq, ok=False, reason=REFUSED, blame=blamed), now)


def test_a_refused_connection_is_a_loss_when_the_loss_follows() -> None:
    ring = Ring()
    ring.blame("b", "c", 1.0)
    assert not ring.outcomes
    ring.take(ring.machine.lose("c", "closed its connection", 1.01))
    assert [(told.code, told.peers) for told in ring.outcomes] == [("lost", ("c",))] * 2
    assert math.isinf(ring.machine.next_deadline())


def test_broken_link_between_live_peers_aborts_after_a_verdict() -> None:
    """A broken link between peers that live aborts after the time for a verdict."""
    ring = Ring()
    ring.blame("b", "c", 1.0)
    due = ring.machine.next_deadline()
    ring.take(ring.machine.tick(due - 0.01))
    assert not ring.outcomes
    ring.take(ring.machine.tick(due))
    assert [(told.code, told.peers) for told in ring.outcomes] == [("aborted", ("c",))] * 3
    assert "b reports: sending to c" in ring.outcomes[0].reason
    ring.start(due)
    ring.blame("b", "c", due)
    ring.take(ring.machine.tick(ring.machine.next_deadline()))
    assert ring.machine.links.costs("bc")[0][1] == math.inf  # two faults in a row


def test_first_report_counts_and_faulty_operations_go_on() -> None:
    """The first report counts and completions do not end a faulty operation."""
    ring = Ring()
    ring.blame("b", "c", 1.0)
    due = ring.machine.next_deadline()
    ring.said("a", m.Done(seq=ring.seq, ok=True), 1.1)
    ring.blame("c", "b", 1.1)
    for name in "bc":
        ring.said(name, m.Done(seq=ring.seq, ok=True), 1.1)  # as no peer says that reported a fault
    assert ring.machine.next_deadline() == due
    ring.take(ring.machine.tick(due))
    assert {told.peers for told in ring.outcomes} == {("c",)}


def test_a_fault_that_names_nobody_aborts_at_once() -> None:
    ring = Ring()
    ring.blame("b", "", 1.0)
    assert [(told.code, told.peers) for told in ring.outcomes] == [("aborted", ("b",))] * 3


def test_the_loss_of_another_peer_aborts_a_faulty_operation() -> None:
    ring = Ring()
    ring.blame("b", "c", 1.0)
    ring.take(ring.machine.lose("a", "closed its connection", 1.1))
    assert [(told.code, told.peers) for told in ring.outcomes] == [("lost", ("a",))] * 2


def test_a_synchronisation_whose_donor_is_blamed_and_lost_aborts() -> None:
    """Peers report faults of a synchronisation without blame; one that does otherwise does not stop the master."""
    ring = Ring()
    operations = ring.machine.operations
    ring.seq = operations.begin(Running("sync_shared_state", ("a", "b", "c"), revision=1))
    ring.blame("b", "c", 1.0)
    ring.take(ring.machine.lose("c", "closed its connection", 1.1))
    ring.take(ring.machine.tick(ring.machine.next_deadline()))
    assert [(told.seq, told.code) for told in ring.outcomes if told.seq == ring.seq] == [(ring.seq, "aborted")] * 2
