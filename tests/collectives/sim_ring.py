"""A simulated group: the real master, peers and operations, on a simulated clock and network, with faults.

After every event the invariants are checked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sim_master import Channel, SimMaster
from sim_peer import SimPeer
from sim_trainer import SimTrainer

from planetary.collectives.master import master_events as me
from planetary.collectives.peer import peer_events as pe
from planetary.simulation.world import World

RESTART_S = 0.7


@dataclass
class Story:
    """What all peers saw, for the invariants."""

    outcomes: dict[tuple[int, int], bool] = field(default_factory=dict)  # (incarnation of the group, seq)
    results: dict[tuple[int, int], bytes] = field(default_factory=dict)
    states: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)
    decided: set[tuple[str, int]] = field(default_factory=set)  # (peer, call) of small operations that succeeded
    succeeded: int = 0
    small: int = 0  # of these: through the master
    aborted: int = 0
    synced: int = 0
    restarts: int = 0  # refusals to begin anew unnoticed, after which it was asked for
    struck: list[str] = field(default_factory=list)


class SimGroup:
    """A master, its journal and some peers."""

    def __init__(self, seed: int, peers: int, *, steps: int = 3, restarts: bool = False, min_world: int = 1) -> None:
        self.world = World(seed)
        random = self.world.random
        self.steps, self.restarts, self.min_world = steps, restarts, min_world
        self.count = random.choice([0, 1, 5, 40, 7000])
        self.bits = random.choice([0, 0, 0, 8, 4])
        self.slowest = random.choice([0.001, 0.02, 0.1])
        self.small = random.random() < 0.3
        self.remeasure_s = random.choice([0.0, 0.05, 1.0])
        self.asks, self.optimizes = random.random() < 0.3, random.random() < 0.15
        self.story = Story()
        self.journal: list[me.Record] = []
        self.connections = self.lives = self._done = 0
        self._data: dict[tuple[int, int], Channel] = {}
        self.master: SimMaster | None = SimMaster(self)
        self.peers: list[SimPeer] = []
        self._names = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        for _ in range(peers):
            self.join()

    def join(self) -> SimPeer:
        peer = SimTrainer(self, f"peer-{next(self._names)}")
        self.peers.append(peer)
        return peer

    def by_id(self, peer: str) -> SimPeer | None:
        return next((p for p in self.peers if p.machine.peer == peer), None)

    def generation(self, peer: SimPeer) -> int:
        """Which life of the group a peer is in: its numbers start again when everybody is gone."""
        return -1 - self.peers.index(peer) if peer.machine.topology is None else int(peer.machine.topology.key)

    def data_channel(self, a: SimPeer, b: SimPeer) -> Channel:
        key = (id(a), id(b))
        if key not in self._data or not self._data[key].open:
            self._data[key] = Channel(self.world, lambda item: b.piece(*item), self.slowest)
        return self._data[key]

    # --- faults

    def strike(self, kind: str) -> None:
        """Let something go wrong; remembered when it hit."""
        alive = [p for p in self.peers if not p.dead and not p.finished]
        hit = bool(alive)
        match kind:
            case "kill" if alive:
                self.world.random.choice(alive).kill()
            case "freeze" if alive:
                self.world.random.choice(alive).freeze(self.world.random.choice([0.5, 20.0]))
            case "link" if alive and self._data:
                channel = self.world.random.choice(list(self._data.values()))
                channel.open = False
                for peer in alive:
                    for call, running in list(peer.running.items()):
                        fault = pe.LocalFault(call, "link reset", running.neighbours[0])
                        self.world.after(0.01, lambda p=peer, f=fault: p.handle(f))
            case "join":
                hit = True
                self.join()
            case "master" if self.restarts and self.master is not None:
                self._restart_master()
            case _:
                hit = False
        if hit:
            self.story.struck.append(kind)

    def _restart_master(self) -> None:
        master = self.master
        assert master is not None
        master.dead = True
        self.master = None
        self.lives += 1
        for number, (peer, channel) in master.connections.items():
            # What was sent may still arrive; then the stream ends.
            channel.put("connection reset")
            del number, peer

        def again() -> None:
            self.master = SimMaster(self)

        self.world.after(RESTART_S, again)

    def run(self, limit_s: float) -> bool:
        """Go on until every peer is done, out or dead; false when that takes too long: a hang."""

        def over() -> bool:  # asked after every event; who is done stays so
            while self._done < len(self.peers) and (self.peers[self._done].dead or self.peers[self._done].finished):
                self._done += 1
            return self._done == len(self.peers)

        return self.world.run(over, limit_s)


def scenario(seed: int) -> SimGroup:
    """Draw a group and its faults from a seed, and run it to the end. Raises when an invariant breaks."""
    draw = World(seed).random
    restarts = draw.random() < 0.3
    # The pieces of one operation go as the square of the peers: many large groups cost more than they tell.
    peers = draw.choices([1, 2, 3, 4, 5, 8, 16], [8, 22, 30, 16, 14, 7, 3])[0]
    group = SimGroup(seed, peers, restarts=restarts)
    kinds = ["kill", "kill", "freeze", "link", "join", "join", "master"]
    for _ in range(draw.randrange(6)):
        kind = draw.choice(kinds)
        group.world.at(draw.uniform(0.0, 3.0), lambda kind=kind: group.strike(kind))
    assert group.run(600.0), f"seed {seed}: not all peers came to an end"
    return group
