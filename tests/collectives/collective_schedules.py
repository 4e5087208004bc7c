"""Random fault schedules of simulated groups; what must hold is checked while they run, and at their end.

A schedule is a function of its seed. One that fails says how it is run again, for example:

    PYTHONPATH=src python tests/collectives/collective_schedules.py 44
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections import Counter
from collections.abc import Iterable

from simulated_trainer import MOST_PEERS, TAGS, Trainer, TrainerOptions, TrainerStory

from planetary.simulation.collectives.simulated_group import (
    KINDS,
    OF_PEERS,
    GroupFault,
    GroupOptions,
    SimulatedGroup,
    SimulatedPeer,
    strike,
)
from planetary.simulation.world import World

LIMIT_S = 600.0
CI_SEEDS, SOAK_SEEDS = 10_000, 100_000  # where the seeds of longer sweeps begin

# Half of all faults are of these: the commonest in practice.
_COMMON: tuple[GroupFault, ...] = ("kill", "stop", "drop_links", "join", "kill_master")


class CollectiveSchedule:
    """A group and what goes wrong in it.

    Attributes:
        group: in its world.
        training: what its peers do.
        story: what they saw.
    """

    def __init__(self, seed: int, options: GroupOptions, training: TrainerOptions, peers: int) -> None:
        self.seed, self.training, self.story = seed, training, TrainerStory()
        self.group = SimulatedGroup(seed, options)
        for _ in range(peers):
            self.join()

    def join(self) -> None:
        """Start a trainer, unless all numbers are taken."""
        if len(self.group.peers) < MOST_PEERS:
            self.group.join(self._train)

    def strike(self, kind: GroupFault) -> None:
        """Let something go wrong now."""
        if kind != "join" or len(self.group.peers) < MOST_PEERS:
            strike(self.group, kind, self._train)

    def run(self, limit_s: float = LIMIT_S) -> None:
        """Run until all peers are done, out or dead. Raises when an invariant breaks, or the time is over: a hang."""
        group = self.group
        try:
            over = group.run(lambda: group.is_over, limit_s)
            waiting = [peer.name for peer in group.peers if not peer.is_over]
            assert over, f"hangs: {', '.join(waiting)} did not come to an end within {limit_s:g} s"
            observed = group.observed
            assert observed.most_operations <= TAGS + 1, f"{observed.most_operations} operations ran in a group at once"
            most = 8 + 8 * len(group.peers)
            assert observed.most_threads <= most, f"a peer had {observed.most_threads} threads"
            if not group.struck:
                assert {peer.ended for peer in group.peers} == {"done"}
        except BaseException as error:
            error.add_note(f"faults: {group.struck}; at {group.world.now:.3f} s")
            error.add_note(f"replay: PYTHONPATH=src python tests/collectives/collective_schedules.py {self.seed}")
            raise
        finally:
            group.close()

    def _train(self, peer: SimulatedPeer) -> str:
        return Trainer(peer, self.training, self.story).run()


def scenario(seed: int) -> CollectiveSchedule:
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
    schedule = CollectiveSchedule(seed, options, training, peers)
    kinds = KINDS if restarts else OF_PEERS
    common = tuple(kind for kind in _COMMON if kind in kinds)
    for _ in range(draw.randrange(6)):
        kind = draw.choice(common if draw.random() < 0.5 else kinds)
        schedule.group.world.at(draw.uniform(0.0, 3.0), lambda kind=kind: schedule.strike(kind))
    return schedule


def sweep(seeds: Iterable[int]) -> Counter[str]:
    """Run schedules; return what they came across."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        schedule = scenario(seed)
        schedule.run()
        story = schedule.story
        seen.update(schedule.group.struck)
        for name in ("succeeded", "small", "aborted", "fetched", "restarts"):
            seen[name] += getattr(story, name)
        seen["done"] += sum(peer.ended == "done" for peer in schedule.group.peers)
        seen["events"] += schedule.group.observed.events
    return seen


def main() -> None:
    """Run schedules by their seeds, and tell what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int, metavar="SEED", help="run all seeds up to this one, without it")
    parser.add_argument("--log", action="store_true", help="show the log of master and peers")
    args = parser.parse_args()
    if args.to is not None:
        sys.stdout.write(f"{dict(sorted(sweep(range(args.seed, args.to)).items()))}\n")
        return
    schedule = scenario(args.seed)
    group = schedule.group
    if args.log:
        logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format="%(simulated)9.4f %(name)s: %(message)s")
        logging.getLogger().handlers[0].addFilter(_Stamp(group.world))
    try:
        schedule.run()
    finally:
        sys.stdout.write(f"{group.options}\n{schedule.training}\nfaults: {group.struck}\n")
        for peer in group.peers:
            sys.stdout.write(f"{peer.name}: {peer.ended or ('not over' if peer.process.alive else 'dead')}\n")


class _Stamp(logging.Filter):
    """Adds the simulated time to records of the log."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def filter(self, record: logging.LogRecord) -> bool:
        record.simulated = self._world.now
        return True


if __name__ == "__main__":
    main()
