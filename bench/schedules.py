"""Count the random fault schedules that the tests run: `python bench/schedules.py`, or with `--list` by test.

A schedule is a whole simulated run, or group of the collectives, whose faults are drawn from a seed. The tests run with
functions in place of the simulations that count the seeds, so that the ranges are those of the sweeps themselves. Runs
with faults at chosen places are not counted, and a seed that one test runs twice is counted once.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[1]
TESTS = {
    "make test": "not slow and not soak and not device",
    "the rest of .ci/run": "slow and not soak and not device",
    "make soak": "soak",
}
"""Markers, as in the Makefile."""
OF_A_SEED = {
    "fault_schedules": "run_schedule",
    "mixture_schedules": "run_schedule",
    "policy_schedules": "run_schedule",
    "federation_schedules": "run_schedule",
    "placement_schedules": "run_schedule",
    "test_letting_go": "departures",
}
"""By module: functions that run a schedule, or draw its faults."""
OF_SEEDS = {
    "fault_schedules": "sweep",
    "mixture_schedules": "sweep",
    "policy_schedules": "sweep",
    "collective_schedules": "sweep",
    "test_collective_schedules": "sweep_on_two_cores",
    "test_step_roll_outs": "random_schedules",
}
"""By module: functions that run one for each of their seeds."""


class Plenty(dict[object, int]):
    """Counts in place of a sweep's: more of every key than a test asserts, so that the test goes on."""

    def __missing__(self, key: object) -> int:
        return 10**9

    def __gt__(self, other: object) -> bool:
        return True

    @property
    def records(self) -> Plenty:
        """See `schedule_sweep.Sweep`."""
        return self

    @property
    def struck(self) -> Plenty:
        """See `schedule_sweep.Sweep`."""
        return self

    def require(self, *records: type, kinds: bool = True) -> None:
        """See `schedule_sweep.Sweep`."""


class Counter:
    """A plugin of pytest: replaces the functions in all modules of the tests, and counts.

    Attributes:
        seen: test -> the schedules that it would run.
    """

    def __init__(self) -> None:
        self.seen: dict[str, set[object]] = collections.defaultdict(set)
        self._test = ""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Replace the functions, wherever they were imported, and leave out tests of modules that have none."""
        modules = {name.rpartition(".")[2]: module for name, module in list(sys.modules.items())}
        counted = {id(getattr(modules[name], one)): self._of_a_seed(name) for name, one in OF_A_SEED.items()}
        counted |= {id(getattr(modules[name], one)): self._of_seeds(name) for name, one in OF_SEEDS.items()}
        others = {id(modules["fault_schedules"].check), id(modules["fault_schedules"].SimCluster)}
        having = set()
        for name, module in modules.items():
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                if id(value) in counted:
                    having.add(name)
                    setattr(module, attribute, counted[id(value)])
                elif id(value) in others and name.startswith("test_"):
                    setattr(module, attribute, MagicMock())
        items[:] = [item for item in items if Path(str(item.fspath)).stem in having]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note the test."""
        self._test = item.nodeid

    def _of_a_seed(self, name: str) -> Callable[..., Any]:
        def run_schedule(*args: object, **options: object) -> Any:
            self.seen[self._test].add((name, repr(args), repr(sorted(options.items()))))
            world = MagicMock(struck=[], journal=[], metrics={}, sites={})
            world.hub.book.jobs = {"job": MagicMock(attempts=1)}
            world.__iter__.return_value = iter(())
            return world

        return run_schedule

    def _of_seeds(self, name: str) -> Callable[..., Any]:
        def sweep(seeds: Iterable[int], *args: object, **options: object) -> Plenty:
            mode = repr((args, sorted(options.items())))
            self.seen[self._test] |= {(name, seed, mode) for seed in seeds}
            return Plenty()

        return sweep


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the schedules of each test")
    given = parser.parse_args()
    os.chdir(ROOT)
    for name, marker in TESTS.items():
        counter = Counter()
        with contextlib.redirect_stdout(io.StringIO()) as shown:  # tests fail without their results
            code = pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "-m", marker, "tests"], plugins=[counter])
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise SystemExit(shown.getvalue())
        found = collections.Counter({test: len(seen) for test, seen in counter.seen.items()})
        for test, count in sorted(found.items()) if given.list else ():
            print(f"{count:>7,}  {test}")
        print(f"{found.total():>7,}  {name}")


if __name__ == "__main__":
    main()
