"""What contradicts itself in a peer or in the master is found; simulated rings ask after every event."""

from __future__ import annotations

import pytest
from sim_ring import SimGroup

from planetary.collectives.peer.peer_machine import PeerMachine
from planetary.core.errors import LocalProtocolError


def group_of_two() -> SimGroup:
    group = SimGroup(1, 2, steps=50)

    def closed() -> bool:
        return all(peer.machine.topology is not None and len(peer.machine.topology.ring) == 2 for peer in group.peers)

    assert group.world.run(closed, 60.0)
    return group


def test_a_member_without_a_connection_is_found() -> None:
    peer: PeerMachine = group_of_two().peers[0].machine
    peer.validate()
    peer.state = "outside"
    with pytest.raises(LocalProtocolError, match="in no possible state: it is outside and knows a ring"):
        peer.validate()


def test_a_ring_with_a_stranger_is_found() -> None:
    master = group_of_two().master
    assert master is not None
    master.machine.validate()
    [made] = master.machine.groups.values()
    made.desk.ring.append("stranger")
    with pytest.raises(LocalProtocolError, match=r"the ring \['.*', 'stranger'\] has others than the peers"):
        master.machine.validate()
