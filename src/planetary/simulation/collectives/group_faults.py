"""What goes wrong in a simulated group of the collectives."""

from __future__ import annotations

from typing import Literal, get_args

from planetary.simulation.collectives.simulated_group import Program, SimulatedGroup, SimulatedPeer

GroupFault = Literal[
    "kill",  # a peer's process dies at once, as by SIGKILL
    "stop",  # a peer's process stands still, as by SIGSTOP, for a moment or for longer than the master waits
    "hang_thread",  # one thread of a peer does nothing for a while
    "drop_links",  # all connections of a peer's machine break
    "cut_pair",  # nothing arrives from one peer's machine at another one's for a while; both hear the master
    "mute",  # nothing that a peer's machine sends arrives for a while; it hears the others
    "deafen",  # nothing arrives at a peer's machine for a while; the others hear it
    "slow_node",  # packets from and to a peer's machine take fifty times as long for a while
    "join",  # a peer is started
    "kill_master",  # the master dies, and is started again
    "stop_master",  # the master stands still for a while
    "kill_master_writing",  # it dies before one of its next operations on the disk
    "torn_write",  # it dies in the midst of a line of its journal
    "no_space",  # nothing can be written for a while: the master fails, and is started again until it can go on
]

KINDS: tuple[GroupFault, ...] = get_args(GroupFault)
OF_PEERS: tuple[GroupFault, ...] = KINDS[: KINDS.index("kill_master")]
LATER = {"kill_master_writing", "torn_write", "no_space"}
"""Faults that count when they happen, which is when the disk is used next."""


def strike(group: SimulatedGroup, kind: GroupFault, program: Program) -> None:
    """Let something go wrong now; kept in `struck` when it hit. `program`: of a peer that joins."""
    source = group.world.random
    seconds = source.choice((0.5, 2.0, 8.0))
    alive = [peer for peer in group.peers if not peer.is_over]
    victim = source.choice(alive) if alive else None
    hit = victim is not None
    if kind == "join":
        group.join(program)
        hit = True
    elif kind not in OF_PEERS:
        hit = group.options.restarts and group.master is not None
        if hit:
            _strike_master(group, kind, seconds)
    elif victim is not None:
        hit = _strike_peer(group, victim, kind, seconds)
    if hit and kind not in LATER:
        group.struck.append(kind)


def _strike_peer(group: SimulatedGroup, victim: SimulatedPeer, kind: GroupFault, seconds: float) -> bool:
    source, network = group.world.random, group.world.network
    match kind:
        case "kill":
            victim.process.kill()
        case "stop":
            victim.process.stop(source.choice((0.5, 20.0)))
        case "hang_thread":
            threads = victim.process.live_threads
            if not threads:
                return False
            source.choice(threads).hang(seconds)
        case "drop_links":
            return network.drop(victim.node) > 0
        case "cut_pair":
            others = [peer for peer in group.peers if not peer.is_over and peer is not victim]
            if not others:
                return False
            network.cut(victim.node, source.choice(others).node, seconds)
        case "mute":
            network.cut(victim.node, "*", seconds)
        case "deafen":
            network.cut("*", victim.node, seconds)
        case _:
            network.slow(victim.node, 50.0, seconds)
    return True


def _strike_master(group: SimulatedGroup, kind: GroupFault, seconds: float) -> None:
    disk, process = group.disk, group.master_process
    match kind:
        case "kill_master":
            process.kill()
        case "stop_master":
            process.stop(seconds)
        case "kill_master_writing":
            disk.dies_after = group.world.random.randint(0, 10)
        case "torn_write":
            disk.torn = True
        case _:
            disk.no_space = True
            group.world.after(seconds, disk.make_room)
