"""Count the random fault schedules that the tests run: `python bench/schedules.py`, or with `--list` by test.

A schedule is a whole simulated world whose faults are drawn from a seed; `tests/random_schedules.py` runs those of
every kind. The tests run with functions in place of its own that count the seeds, so that the ranges are those of the
sweeps themselves. Runs with faults at chosen places are not counted, and a seed that one test runs twice is counted
once. The count is exact: a test that ends for want of a result before its last schedule is an error.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import inspect
import io
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from planetary.simulation.world import World  # noqa: E402
from random_schedules import FILES, Schedules, schedules_of  # noqa: E402

TESTS = ("make test", "the rest of .ci/run", "make soak")
"""As the Makefile chooses them by markers: neither slow nor soak, slow, soak."""
RUNS = {"run", "run_schedule", "sweep", "sweep_modes", "sweep_on_two_cores"}
"""Names under which tests call the functions that run schedules."""


class Counter:
    """A plugin of pytest that counts.

    Attributes:
        seen: which of `TESTS` -> test -> the schedules that it would run.
        uncounted: tests that ended before a later schedule of theirs, and where.
    """

    def __init__(self) -> None:
        self.seen = {name: collections.defaultdict[str, set[object]](set) for name in TESTS}
        self.uncounted: list[str] = []
        self._test, self._of = "", TESTS[0]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note the test."""
        of = [number for number, mark in ((2, "soak"), (1, "slow")) if item.get_closest_marker(mark)]
        self._test, self._of = item.nodeid, TESTS[of[0] if of else 0]

    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo[None]) -> None:
        """Find schedules that the test would have run after it failed."""
        if call.when != "call" or call.excinfo is None or self._test not in self.seen[self._of]:
            return
        lines = [
            frame.lineno or 0 for frame in traceback.extract_tb(call.excinfo.tb) if frame.name == item.originalname
        ]
        if not lines or (line := later_run(item.function, lines[-1])):
            self.uncounted.append(f"{self._test}: line {line if lines else '?'}")

    def run(self, schedules: Any, seed: int, **options: Any) -> Any:
        """Count in place of `Schedules.run`."""
        if schedules.kind in FILES:  # not those of the library's own tests
            self.seen[self._of][self._test].add(
                (schedules.kind, seed, repr(sorted(options.items(), key=lambda item: item[0])))
            )
        world = MagicMock(struck=[], journal=[])
        world.__iter__.return_value = iter(())
        return world

    def sweep(self, schedules: Any, seeds: Iterable[int], **options: Any) -> Any:
        """Count in place of `Schedules.sweep`; the result passes every test for a minimum."""
        for seed in seeds:
            self.run(schedules, seed, sweep=True, **options)
        many = collections.defaultdict[object, int](lambda: 10**9)
        return MagicMock(struck=many, records=many, seen=many)


def later_run(test: Any, line: int) -> int:
    """Return the line of a call in `test` that would run other schedules after `line` failed; 0: there is none."""
    source, first = inspect.getsourcelines(test)
    tree = ast.increment_lineno(ast.parse("".join(source)), first - 1)
    again = set[str]()  # variables of the loops that would go on
    begins = line + 1
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        if loop.lineno <= line <= (loop.end_lineno or 0):
            begins = min(begins, loop.lineno)
            again |= _names(loop.target)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.lineno >= begins):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg != "begin")]
        differs = call.lineno > line or again & set().union(*map(_names, given))
        if name in RUNS and ast.unparse(call.func) != "cluster.run" and differs:
            return call.lineno
    return 0


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the schedules of each test")
    given = parser.parse_args()
    os.chdir(ROOT)

    counter = Counter()

    def run(schedules: Any, seed: int, *, begin: object = None, **options: Any) -> Any:
        return counter.run(schedules, seed, **options)

    def sweep(schedules: Any, seeds: Iterable[int], *_: object, **options: Any) -> Any:
        return counter.sweep(schedules, seeds, **options)

    def refuse(*_: object) -> bool:
        raise AssertionError("runs at chosen places are not counted")

    for name, function in {"run": run, "sweep": sweep, "sweep_on_two_cores": sweep}.items():
        setattr(Schedules, name, function)
    World.run = refuse
    print("kinds of faults  invariants")
    for name in FILES:
        found = schedules_of(name)
        print(f"{len(set(found.faults)):>15}  {len(found.invariants):>10}  {name}")
    print("schedules")
    files = [str(path) for path in sorted(Path("tests").rglob("test_*.py")) if "_schedules import" in path.read_text()]
    with contextlib.redirect_stdout(io.StringIO()) as shown:  # tests fail without their results
        marks = "not device and not processes"
        code = pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "-m", marks, *files], plugins=[counter])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(shown.getvalue())
    for name in TESTS:
        found = collections.Counter({test: len(seen) for test, seen in counter.seen[name].items()})
        for test, count in sorted(found.items()) if given.list else ():
            print(f"{count:>7,}  {test}")
        print(f"{found.total():>7,}  {name}")
    if counter.uncounted:
        raise SystemExit("schedules of these tests were not counted:\n" + "\n".join(counter.uncounted))


if __name__ == "__main__":
    main()
