"""What the master remembers of links."""

from __future__ import annotations

import math

from planetary.collectives.master.events import Solve
from planetary.collectives.master.group_desk import GroupDesk, Peer
from planetary.collectives.master.group_links import GroupLinks
from planetary.collectives.master.group_operations import GroupOperations, Running
from planetary.collectives.master.ring_order import solve
from planetary.collectives.protocol import messages as m
from planetary.machine.events import Send

AB, BA = ("a", "b"), ("b", "a")


def test_a_lasting_drop_has_the_link_measured_again() -> None:
    links = GroupLinks()
    links.measured(AB, 1e9, 0.001)
    links.measured(BA, 1e9, 0.001)
    for speed in (0.8e9, 0.9e9, 0.7e9):
        links.observed(AB, speed)
    for _ in range(4):
        links.observed(AB, 0.2e9)
    assert links.known() == {AB, BA}  # a short dip is none
    links.observed(AB, 0.6e9)
    for _ in range(4):
        links.observed(AB, 0.2e9)
    assert links.known() == {AB, BA}
    links.observed(AB, 0.2e9)
    assert links.known() == {BA}
    links.measured(AB, 0.2e9, 0.001)
    for _ in range(20):
        links.observed(AB, 0.2e9)  # as slow as it now is known to be
    assert links.known() == {AB, BA}


def test_speeds_that_cannot_be_are_passed_over() -> None:
    links = GroupLinks()
    links.measured(AB, 1e9, 0.001)
    for speed in (0.0, -1.0, math.nan, math.inf):
        for _ in range(10):
            links.observed(AB, speed)
    assert links.known() == {AB}


def test_costs_of_unknown_broken_and_forgotten_links() -> None:
    links = GroupLinks()
    assert links.costs("ab") == ((0.0, 1.0), (1.0, 0.0))
    links.measured(AB, float(1 << 20), 0.5)
    assert links.costs("ab") == ((0.0, 1.5), (1.5, 0.0))
    assert not links.blame(BA)
    assert links.blame(BA)
    links.give_up(BA)
    assert links.costs("ab") == ((0.0, 1.5), (math.inf, 0.0))
    assert links.known() == {AB}
    links.forget("a")
    assert links.costs("ab") == ((0.0, 1.0), (1.0, 0.0))


def ring_of_four() -> tuple[GroupDesk, GroupOperations]:
    desk = GroupDesk(0, lambda: "secret", lambda: (4, 1, 4))
    for number, name in enumerate("abcd"):
        desk.peers[name] = Peer(m.PeerInfo(name, name, "127.0.0.1", 1, "machine", ""), "secret", (), number)
    desk.lay("abcd")
    return desk, GroupOperations(desk, GroupLinks())


def break_link(operations: GroupOperations, reporter: str, blamed: str) -> None:
    for _ in range(2):  # faults of one link, within operations that failed on all peers
        seq = operations.begin(Running("all_reduce", ("a", "b", "c", "d")))
        operations.done(reporter, m.Done(seq=seq, ok=False, reason="reset", blame=blamed), 1.0)
        operations.expire(operations.deadline())


def test_a_detour_that_meets_a_link_broken_since_is_sought_again() -> None:
    desk, operations = ring_of_four()
    break_link(operations, "b", "c")
    assert [item.peers for item in desk.take() if isinstance(item, Solve)] == [("a", "b", "c", "d")]
    break_link(operations, "a", "d")  # while the solver works
    assert not [item for item in desk.take() if isinstance(item, Solve)]  # one search at a time
    operations.detour(("a", "b", "c", "d"), (0, 3, 2, 1))  # by a-d
    (again,) = [item for item in desk.take() if isinstance(item, Solve)]
    assert desk.ring == ["a", "b", "c", "d"]
    order = solve(again.costs)
    assert order is not None
    operations.detour(again.peers, order)
    hops = set(zip(desk.ring, [*desk.ring[1:], desk.ring[0]], strict=True))
    assert not hops & {("b", "c"), ("a", "d")}


def test_a_detour_for_a_ring_that_has_changed_is_sought_again() -> None:
    """The old ring stays in use while the solver works; what it finds for another ring is of no use."""
    desk, operations = ring_of_four()
    break_link(operations, "b", "c")
    seq = operations.begin(Running("all_reduce", ("a", "b", "c", "d")))
    first = [item for item in desk.take() if isinstance(item, Solve)]
    assert [item.peers for item in first] == [("a", "b", "c", "d")]
    assert desk.ring == ["a", "b", "c", "d"]
    assert seq in operations.running  # nothing is disturbed by the search

    desk.lay("abc")  # d was lost meanwhile, and the broken link is still in the ring
    operations.detour(("a", "b", "c", "d"), (0, 1, 3, 2))
    again = [item for item in desk.take() if isinstance(item, Solve)]
    assert [item.peers for item in again] == [("a", "b", "c")]
    operations.detour(("a", "b", "c"), (0, 2, 1))
    assert desk.ring == ["a", "c", "b"]
    told = [item.message for item in desk.take() if isinstance(item, Send)]
    assert any(isinstance(message, m.Outcome) and "laid anew" in message.reason for message in told)
    assert any(isinstance(message, m.RingChanged) for message in told)

    operations.detour(("a", "b", "c"), (0, 2, 1))  # late, for a ring of the past: the present one avoids the link
    assert desk.ring == ["a", "c", "b"]
    assert not [item for item in desk.take() if isinstance(item, Solve)]
