"""Random fault schedules of simulated groups of the collectives; see `random_schedules`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

from simulated_group import (
    KINDS,
    OF_PEERS,
    GroupFault,
    GroupOptions,
    SimulatedGroup,
    SimulatedPeer,
    strike,
)
from simulated_trainer import MOST_PEERS, TAGS, Trainer, TrainerOptions, TrainerStory

from planetary.simulation.world import World
from random_schedules import Schedules

# Half of all faults are of these: the commonest in practice.
_COMMON: tuple[GroupFault, ...] = ("kill", "stop", "drop_links", "join", "kill_master")


class FaultyGroup:
    """A group with faults, whose peers train.

    Attributes:
        group: in its world.
        training: the options of its peers.
        story: what they saw; a contradiction is an error at once.
        waits_for: peers that did not come to an end.
    """

    def __init__(self, seed: int, options: GroupOptions, training: TrainerOptions, peers: int) -> None:
        self.training, self.story, self.waits_for = training, TrainerStory(), ""
        self.group = SimulatedGroup(seed, options)
        for _ in range(peers):
            self.join()

    @property
    def world(self) -> World:
        """The world of the group."""
        return self.group.world

    @property
    def struck(self) -> list[str]:
        """Kinds of the faults that hit something, in that order."""
        return self.group.struck

    def join(self) -> None:
        """Start a trainer, unless all numbers are taken."""
        if len(self.group.peers) < MOST_PEERS:
            self.group.join(self._train)

    def strike(self, kind: GroupFault) -> None:
        """Let something go wrong now."""
        if kind != "join" or len(self.group.peers) < MOST_PEERS:
            strike(self.group, kind, self._train)

    def run(self, limit_s: float) -> bool:
        """Run until all peers are done, out or dead; false when that takes too long."""
        try:
            return self.group.run(lambda: self.group.is_over, limit_s)
        finally:
            self.waits_for = ", ".join(peer.name for peer in self.group.peers if not peer.is_over)
            self.group.close()

    def _train(self, peer: SimulatedPeer) -> str:
        return Trainer(peer, self.training, self.story).run()


@contextlib.contextmanager
def faulty_group(seed: int) -> Iterator[FaultyGroup]:
    """Draw a group and its faults from a seed."""
    draw = random.Random(f"collectives {seed}")
    restarts = draw.random() < 0.35
    slowest = draw.choice((0.001, 0.02, 0.1))
    options = GroupOptions(
        restarts=restarts,
        preempt_chance=draw.choice((0.0, 0.0, 0.05)),
        remeasure_s=draw.choice((0.0, 0.05, 1.0)),
        connections=draw.choice((None, 1, 1, 3)),
        delay_s=(0.0002, slowest),
    )
    training = TrainerOptions(
        count=draw.choice((0, 1, 5, 40, 3000, 7000)),
        bits=draw.choice((0, 0, 0, 8, 4)),
        optimizes=draw.random() < 0.15,
        asks=draw.random() < 0.3,
        extras=draw.random() < 0.2,
        verifies=draw.random() < 0.3,
    )
    # The pieces of one operation go as the square of the peers: many large groups cost more than they tell.
    peers = draw.choices((1, 2, 3, 4, 5, 8, 12), (8, 22, 30, 16, 14, 5, 1))[0]
    schedule = FaultyGroup(seed, options, training, peers)
    kinds = KINDS if restarts else OF_PEERS
    common = tuple(kind for kind in _COMMON if kind in kinds)
    for _ in range(draw.randrange(6)):
        kind = draw.choice(common if draw.random() < 0.5 else kinds)
        schedule.world.at(draw.uniform(0.0, 3.0), lambda kind=kind: schedule.strike(kind))
    yield schedule


def check_memory_was_bounded(schedule: FaultyGroup) -> None:
    """Few operations ran in a group at once, and a peer had few threads."""
    observed = schedule.group.observed
    assert observed.most_operations <= TAGS + 1, f"{observed.most_operations} operations ran in a group at once"
    most = 8 + 8 * len(schedule.group.peers)
    assert observed.most_threads <= most, f"a peer had {observed.most_threads} threads"


def check_undisturbed_peers_are_done(schedule: FaultyGroup) -> None:
    """Without a fault every peer takes all its steps."""
    assert schedule.struck or {peer.ended for peer in schedule.group.peers} == {"done"}


def observations(schedule: FaultyGroup) -> dict[str, int]:
    """Count the operations of a group as its peers saw them."""
    story = schedule.story
    counts = {name: getattr(story, name) for name in ("succeeded", "small", "aborted", "fetched", "restarts")}
    done = sum(peer.ended == "done" for peer in schedule.group.peers)
    return {**counts, "done": done, "events": schedule.group.observed.events}


SCHEDULES = Schedules(
    kind="collectives",
    build=faulty_group,
    faults=KINDS,
    invariants=(check_memory_was_bounded, check_undisturbed_peers_are_done),
    limit_s=600.0,
    observe=observations,
    options={},
)
