"""Random fault schedules of simulated worlds: drawn from a seed, run, checked, counted, and run again by hand.

A kind of run gives its `Schedules`: how the world of a seed is built with its faults, which kinds of faults it has, and
the invariants of a world that has ended. Only the world is simulated; all shells are those of production. A schedule
is a function of its seed and options. One that fails prints the command that runs it again, for example:

    PYTHONPATH=src python tests/random_schedules.py rounds 44 --ring --checkpoint-every=3
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import functools
import importlib
import logging
import multiprocessing
import shlex
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from unittest import mock

import msgspec

from planetary.fleet.controller.controller import RunController
from planetary.fleet.controller.desk import AnyDesk, Desk, task_of
from planetary.fleet.controller.membership import Membership
from planetary.fleet.protocol.records import RunFinished, RunResumed, WorkerBanned
from planetary.runs.rounds.records import RolledBack, RoundClosed, RoundFinished
from planetary.simulation.faults import Fault
from planetary.simulation.simulated_cluster import SimulatedCluster
from planetary.simulation.world import World
from planetary.wire.message import Message

TESTS = Path(__file__).parent
FILES = {
    "rounds": "runs/rounds/fault_schedules.py",
    "steps": "runs/rounds/test_step_roll_outs.py",
    "mixture": "runs/mixture/mixture_schedules.py",
    "policy": "runs/rl/policy_schedules.py",
    "federation": "runs/federation/federation_schedules.py",
    "collectives": "collectives/collective_schedules.py",
    "placement": "site/placement_schedules.py",
}
"""Modules with the `SCHEDULES` of a kind."""

UNSURE = "it claims a gain of"  # an audit of a few tokens bans honest expert workers, too, forgeries or not
SLOW_SEEDS, SOAK_SEEDS = 10_000, 100_000  # where the seeds of longer sweeps begin
PART = 50  # seeds of a sweep that a process takes at once


class Simulated(Protocol):
    """A world with its faults.

    Attributes:
        world: clock, network and processes.
        struck: kinds of the faults that hit something, each as often as it did.
        waits_for: the unmet condition of a world that did not end in time.
    """

    @property
    def world(self) -> World: ...

    @property
    def struck(self) -> Collection[str]: ...

    @property
    def waits_for(self) -> Any: ...

    def run(self, limit_s: float) -> bool:
        """Run to the end; false when it did not come within `limit_s` simulated seconds."""
        ...


WorldT = TypeVar("WorldT", bound=Simulated)


class Sweep:
    """Counts of a sweep.

    Attributes:
        struck: faults that hit something, by kind.
        records: records of all journals, by class.
        seen: whatever else a kind of run counts.
    """

    def __init__(self, faults: Collection[str]) -> None:
        """Begin with nothing; `faults`: the kinds that a sweep should have."""
        self._faults = faults
        self.struck: collections.Counter[str] = collections.Counter()
        self.records: collections.Counter[type] = collections.Counter()
        self.seen: collections.Counter[str] = collections.Counter()

    def add(self, other: Sweep) -> None:
        """Add another sweep."""
        self.struck.update(other.struck)
        self.records.update(other.records)
        self.seen.update(other.seen)

    def require(self, *records: type, kinds: bool = True) -> None:
        """Assert that the sweep had all `kinds` of faults, and these records."""
        missing = [kind for kind in self._faults if kinds and not self.struck[kind]]
        assert not missing, f"no schedule had an effective fault of the kinds {missing}"
        for record in records:
            assert self.records[record] > 0, f"no schedule had a record {record.__name__}"


@dataclass(frozen=True, kw_only=True)
class Schedules(Generic[WorldT]):
    """The random schedules of a kind of run.

    Attributes:
        kind: name, as in `FILES`.
        build: makes the world of a seed and options; the context lasts until the world has ended.
        faults: kinds of faults that can be drawn.
        invariants: functions of a world that has ended; each raises `AssertionError` where it is broken.
        limit_s: simulated seconds after which a world that has not ended hangs.
        options: arguments of `add_argument` for the options of `build`, by flag.
        journals: the journals of a world, by name.
        observe: counts for `Sweep.seen`.
    """

    kind: str
    build: Callable[..., contextlib.AbstractContextManager[WorldT]]
    faults: Collection[str]
    invariants: Sequence[Callable[[WorldT], object]]
    limit_s: float
    options: Mapping[str, Mapping[str, Any]]
    journals: Callable[[WorldT], Mapping[str, Sequence[Any]]] = lambda _: {}
    observe: Callable[[WorldT], Mapping[str, int]] = lambda _: {}

    def run(self, seed: int, *, begin: Callable[[WorldT], object] = lambda _: None, **options: Any) -> WorldT:
        """Run a schedule and check everything that must be true after it; `begin` gets the world before."""
        world = None
        try:
            with self.build(seed, **options) as world:
                begin(world)
                assert world.run(self.limit_s), f"hangs: {world.waits_for}"
            self.check(world)
        except BaseException as error:
            if world is not None:
                error.add_note(f"faults: {world.struck}; at {world.world.now:.3f} s")
            error.add_note(f"replay: {self.replay(seed, options)}")
            raise
        return world

    def check(self, world: WorldT) -> None:
        """Assert the invariants of a world that has ended; see docs/invariants.md."""
        for invariant in self.invariants:
            invariant(world)

    def sweep(
        self, seeds: Iterable[int], each: Callable[[int, int], Mapping[str, Any]] = lambda *_: {}, **options: Any
    ) -> Sweep:
        """Run schedules and count; `each`: more options, by a schedule's place in the sweep and its seed."""
        found = Sweep(self.faults)
        for number, seed in enumerate(seeds):
            world = self.run(seed, **options, **each(number, seed))
            found.struck.update(world.struck)
            found.seen.update(self.observe(world))
            for journal in self.journals(world).values():
                found.records.update(map(type, journal))
        return found

    def sweep_modes(self, seeds: Iterable[int], modes: Iterable[str]) -> Sweep:
        """Run schedules in turn in each of `modes`, and count."""
        names = [*modes]
        return self.sweep(seeds, lambda number, _: {"mode": names[number % len(names)]})

    def sweep_on_two_cores(self, seeds: range) -> Sweep:
        """Run schedules in two processes, and count."""
        found = Sweep(self.faults)
        parts = [seeds[first : first + PART] for first in range(0, len(seeds), PART)]
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            for part in pool.imap(functools.partial(_sweep_of, self.kind), parts):
                found.add(part)
        return found

    def arguments(self) -> argparse.ArgumentParser:
        """Return the parser of the options."""
        parser = argparse.ArgumentParser(add_help=False)
        for flag, settings in self.options.items():
            parser.add_argument(flag, **settings)
        return parser

    def replay(self, seed: int, options: Mapping[str, Any]) -> str:
        """Return the command that runs a schedule again."""
        given = ""
        for flag, settings in self.options.items():
            is_flag = settings.get("action") == "store_true"
            default = False if is_flag else settings.get("default")
            value = options.get(settings.get("dest", flag.lstrip("-").replace("-", "_")), default)
            values = value if settings.get("action") == "append" else [] if value == default else [value]
            given += "".join(f" {flag}" if is_flag else f" {flag}={shlex.quote(str(one))}" for one in values)
        return f"PYTHONPATH=src python tests/random_schedules.py {self.kind} {seed}{given}"


def schedules_of(kind: str) -> Schedules[Any]:
    """Return the schedules of a kind of run."""
    for file in FILES.values():
        folder = str((TESTS / file).parent)
        if folder not in sys.path:
            sys.path.append(folder)
    return importlib.import_module(Path(FILES[kind]).stem).SCHEDULES


def _sweep_of(kind: str, seeds: range) -> Sweep:
    return schedules_of(kind).sweep(seeds)


# --- parts of several kinds -------------------------------------------------------------------------------------------


def journal_of(cluster: SimulatedCluster[Any]) -> Mapping[str, Sequence[Any]]:
    """Return the one journal of a run."""
    return {"run": cluster.journal}


def check_ended_well(cluster: SimulatedCluster[Any]) -> None:
    """Assert that a run took all its steps, and its gateway says so."""
    end = cluster.journal[-1]
    assert isinstance(end, RunFinished)
    assert end.ok, end.reason
    assert cluster.gateway is not None
    assert cluster.gateway.status().state == "finished"


def untimed(state: Any) -> Any:
    """Return a state without the times at which records were written, which only the journal has."""
    state = copy.deepcopy(state)
    state.started = 0.0
    if state.checkpoint_at is not None:
        state.checkpoint_at = 0.0
    for work in state.newest.values():
        work.contributed_at = None
    if state.ended is not None:
        state.ended = msgspec.structs.replace(state.ended, t=0.0)
    return state


def surviving(
    journal: Iterable[Any],
    *,
    overlapping: bool = False,
    outlasts: Callable[[Any, int], bool] = lambda *_: False,
) -> list[Any]:
    """Return a journal without the records that resumes and rollbacks voided.

    Args:
        journal: of a run with rounds.
        overlapping: whether a round may have begun before the one of a mark was over.
        outlasts: whether a record of the voided part stays, by the round of the mark.
    """
    history: list[Any] = []
    for record in journal:
        if isinstance(record, RunResumed | RolledBack):
            mark = record.mark.round
            ends = [i for i, r in enumerate(history) if isinstance(r, RoundFinished | RoundClosed) and r.round == mark]
            end = ends[-1] + 1 if ends else 0
            history = history[:end] + [r for r in history[end:] if outlasts(r, mark)]
            if overlapping:
                history = [r for r in history if getattr(r, "round", 0) <= mark]
        history.append(record)
    return history


@contextlib.contextmanager
def forging(
    cluster: SimulatedCluster[Any], choose: int | Callable[[], int], *, punished: bool, at_s: float = 0.0
) -> Iterator[None]:
    """Let a worker forge messages from a time to the end; see `planetary.simulation.forgeries`.

    `choose`: its number, or what gives it then. `punished` False: no worker is banned for a forged message, so that the
    forger goes on for the whole run. No honest worker may be banned either way.
    """

    def begin() -> None:
        cluster.strike(Fault(0.0, "forge", worker=choose if isinstance(choose, int) else choose(), seconds=1e6))

    cluster.world.at(at_s, begin)
    violated = Membership.violated
    if not punished:
        Membership.violated = lambda *_: ""
    try:
        with reports_are_own():
            yield
    finally:
        Membership.violated = violated
    banned = {record.worker: record.reason for record in cluster.journal if isinstance(record, WorkerBanned)}
    others = banned.keys() - cluster.forgery.forgers
    assert not {name for name in others if UNSURE not in banned[name]}


@contextlib.contextmanager
def reports_are_own() -> Iterator[None]:
    """Assert that a report which reaches the code of a kind of run is about a task that its worker was given.

    The tasks are those of the messages that left, so that the controllers' own record of them is checked, too.
    """
    given: weakref.WeakKeyDictionary[AnyDesk, dict[int, set[int]]] = weakref.WeakKeyDictionary()
    send = Desk.send

    def sending(self: AnyDesk, session: int, message: Message, payload: Any = None) -> None:
        if (task := task_of(message)) is not None:
            given.setdefault(self, {}).setdefault(session, set()).add(task)
        send(self, session, message, payload)

    def checked(take: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(take)
        def taking(self: RunController[AnyDesk, Any], sender: Any, reported: Any, *rest: Any) -> object:
            session, message = getattr(sender, "session", sender), getattr(reported, "message", reported)
            task = task_of(message)
            own = given.get(self.desk, {}).get(session, ())
            assert task is None or task in own, f"{message} of session {session}, which has the tasks {sorted(own)}"
            return take(self, sender, reported, *rest)

        return taking

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Desk, "send", sending))
        for kind in _kinds_of(RunController):
            for name in {"_take_message", "_take_failure", "_payload_arrives"} & vars(kind).keys():
                stack.enter_context(mock.patch.object(kind, name, checked(vars(kind)[name])))
        yield


def _kinds_of(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds_of(kind)


# --- by hand ----------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run schedules again; of one print its journals and faults, of several the counts."""
    kinds = argparse.ArgumentParser(add_help=False)
    kinds.add_argument("kind", choices=FILES)
    schedules = schedules_of(kinds.parse_known_args(sys.argv[1:2])[0].kind)
    parser = argparse.ArgumentParser(description=main.__doc__, parents=[kinds, schedules.arguments()])
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int, metavar="SEED", help="run all seeds up to this one, without it")
    parser.add_argument("--log", action="store_true", help="show the debug log of all processes")
    options = vars(parser.parse_args())
    seed, end, log = options.pop("seed"), options.pop("to"), options.pop("log")
    del options["kind"]
    if end is not None:
        found = schedules.sweep(range(seed, end), **options)
        records = {record.__name__: count for record, count in found.records.items()}
        sys.stdout.write(f"faults: {dict(found.struck)}\nrecords: {records}\nseen: {dict(found.seen)}\n")
        return
    logging.basicConfig(level=logging.DEBUG if log else logging.INFO, format="%(name)s: %(message)s")

    def stamp(world: Simulated) -> None:
        handler = logging.getLogger().handlers[0]
        handler.setFormatter(logging.Formatter("%(simulated)9.4f %(name)s: %(message)s"))
        handler.addFilter(lambda record: record.__dict__.setdefault("simulated", world.world.now) is not None)

    world = schedules.run(seed, begin=stamp, **options)
    for name, journal in schedules.journals(world).items():
        for record in journal:
            sys.stdout.write(f"{name} {record.t:8.3f} {msgspec.json.encode(record).decode()}\n")
    sys.stdout.write(f"faults: {world.struck}; all invariants hold\n")


if __name__ == "__main__":
    main()
