"""Sweeps of random fault schedules, and one schedule that is run again by hand."""

from __future__ import annotations

import argparse
import collections
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from planetary.fleet.controller.membership import Membership
from planetary.fleet.protocol.records import WorkerBanned
from planetary.simulation.faults import KINDS, Fault
from planetary.simulation.simulated_cluster import SimulatedCluster

UNSURE = "it claims a gain of"  # an audit of a few tokens bans honest expert workers, too, forgeries or not
SLOW_SEEDS, SOAK_SEEDS = 10_000, 100_000  # where the seeds of longer sweeps begin


class Sweep:
    """The faults that hit something, and the records, of a sweep.

    Attributes:
        struck: number of faults by kind.
        records: number of records by class.
    """

    def __init__(self, clusters: Iterable[SimulatedCluster[Any]], foreign: Sequence[str] = ()) -> None:
        """Count those of runs that have ended; `foreign`: faults of other kinds of run."""
        self._foreign = frozenset(foreign)
        self.struck: collections.Counter[str] = collections.Counter()
        self.records: collections.Counter[type] = collections.Counter()
        for cluster in clusters:
            self.struck.update(cluster.struck)
            self.records.update(type(record) for record in cluster.journal)

    def require(self, *records: type, kinds: bool = True) -> None:
        """Assert that the sweep had all `kinds` of faults, and these records."""
        missing = [kind for kind in KINDS if kinds and not self.struck[kind] and kind not in self._foreign]
        assert not missing, f"no schedule had an effective fault of the kinds {missing}"
        for record in records:
            assert self.records[record] > 0, f"no schedule had a record {record.__name__}"


def sweep_modes(
    run_schedule: Callable[[int, str], SimulatedCluster[Any]], seeds: Iterable[int], modes: Sequence[str]
) -> Sweep:
    """Run schedules in turn in each of `modes`, and count."""
    runs = (run_schedule(seed, modes[number % len(modes)]) for number, seed in enumerate(seeds))
    return Sweep(runs, ("repeat_result",))


@contextlib.contextmanager
def forging(cluster: SimulatedCluster[Any], number: int, *, punished: bool) -> Iterator[None]:
    """Let a worker forge messages from the start to the end; see `planetary.simulation.forgeries`.

    `punished` False: nobody is banned for a forged message, so that the forger goes on for the whole run. No honest
    worker may be banned either way.
    """
    cluster.world.at(0.0, lambda: cluster.strike(Fault(0.0, "forge", worker=number, seconds=1e6)))
    violated = Membership.violated
    if not punished:
        Membership.violated = lambda *_: ""
    try:
        yield
    finally:
        Membership.violated = violated
    banned = {record.worker: record.reason for record in cluster.journal if isinstance(record, WorkerBanned)}
    banned.pop(cluster.nodes[number].name, None)
    banned = {name: why for name, why in banned.items() if UNSURE not in why}
    assert not banned


def replay_by_hand(
    run_schedule: Callable[..., SimulatedCluster[Any]], options: Mapping[str, Mapping[str, Any]]
) -> None:
    """Run one schedule again, and print its journal.

    Args:
        run_schedule: called with the seed and the options by name.
        options: arguments of `add_argument`, by flag.
    """
    parser = argparse.ArgumentParser(description="Run one schedule again, and print its journal.")
    parser.add_argument("seed", type=int)
    for flag, settings in options.items():
        parser.add_argument(flag, **settings)
    arguments = vars(parser.parse_args())
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    cluster = run_schedule(arguments.pop("seed"), **arguments)
    for record in cluster.journal:
        sys.stdout.write(f"{record.t:8.3f} {msgspec.json.encode(record).decode()}\n")
    sys.stdout.write(f"faults: {cluster.struck}; all invariants hold\n")
