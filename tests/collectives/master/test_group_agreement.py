"""Which members have agreed on the shared state of a group, also beyond a restart of the master."""

from __future__ import annotations

from planetary.collectives.master.group_desk import GroupDesk, Peer
from planetary.collectives.master.machine import MasterMachine
from planetary.collectives.protocol.messages import PeerInfo


def desk_of(*names: str) -> GroupDesk:
    desk = GroupDesk(0, lambda: "key", lambda: (0, 0, 0))
    for number, name in enumerate(names):
        info = PeerInfo(peer=name, name=name, host="127.0.0.1", port=number + 1, machine="m", certificate="")
        desk.peers[name] = Peer(info, "secret", (), connection=number)
    desk.lay(names)
    return desk


def lose(desk: GroupDesk, name: str) -> None:
    del desk.peers[name]
    desk.lay([other for other in desk.ring if other != name])


def test_a_group_is_emptied_when_the_last_that_agreed_is_lost() -> None:
    desk = desk_of("a", "b", "newcomer")
    assert not desk.emptied  # nothing was agreed on
    desk.agree(["a", "b"], revision=1, content="x")
    assert not desk.emptied
    lose(desk, "a")
    assert not desk.emptied
    lose(desk, "b")
    assert desk.emptied
    desk.agree(["newcomer"], revision=1, content="x")
    assert not desk.emptied


def test_a_restarted_master_knows_who_agreed() -> None:
    desk = desk_of("a", "newcomer")
    desk.agree(["a"], revision=1, content="x")
    master = MasterMachine(lambda: "key")
    master.restore([desk.record()], now=0.0, grace_s=10.0)
    restored = master.groups[0].desk
    assert (restored.revision, restored.emptied) == (1, False)
    lose(restored, "a")
    assert restored.emptied
