"""Which run a worker of a site works for: a pure machine.

Runs say how many workers they can use; workers come and go. After every event the plan is made again:

1. in order of priority, then of their beginning, runs get the workers without which they do not go on well,
2. in the same order, those of a limited demand get the rest of it,
3. the remaining ones go to the runs of the highest priority that can use any number, evenly.

A worker stays where it is unless a rule needs it elsewhere. A worker is moved at the end of a task: the run is asked to
let it go, and the returning worker is placed. A lost worker keeps the place for a while: a restart moves no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from planetary.fleet.protocol.status import Leave
from planetary.machine.events import Event, Instruction, Tick
from planetary.machine.machine import check_invariants

AWAY_S = 15.0
"""How long a lost worker keeps the place."""
RELEASE_S = 20.0
"""How long a run's demand has to be smaller before workers are taken from it."""

IDLE = ""
"""In place of a run: none."""


class WorkerCame(Event, frozen=True, kw_only=True):
    """A worker is here, and waits to be placed."""

    worker: str
    roles: tuple[str, ...] = ()  # roles allowed by the operator; empty: all
    trial: bool = False  # trial of a backend: it takes no place


class WorkerWent(Event, frozen=True):
    """A worker's connection has ended."""

    worker: str


class RunWants(Event, frozen=True, kw_only=True):
    """A run can use workers; repeated after each change."""

    run: str
    controller: str
    priority: int
    least: int
    most: int | None  # None: any number
    roles: tuple[str, ...] = ()  # roles of workers; empty: there is one role only
    without: frozenset[str] = frozenset()  # workers it does not use any more


class RunOver(Event, frozen=True):
    """A run uses workers no more."""

    run: str


class Drain(Event, frozen=True):
    """Keep a worker from every run, or no longer."""

    worker: str
    drained: bool


class Assign(Event, frozen=True):
    """Let a worker work for one controller only; "": for any."""

    worker: str
    controller: str


class PlaceWorker(Instruction, frozen=True):
    """A worker that waits works for `run`; `IDLE`: it waits on."""

    worker: str
    run: str
    source: str  # previous run of the worker
    why: str


class Recall(Instruction, frozen=True):
    """Ask a run to let a worker go at the end of the task."""

    worker: str
    run: str
    why: str
    kind: Leave


class SeenWorker(msgspec.Struct):
    """A worker.

    Attributes:
        at: run it works for.
        goal: run the plan has for it.
        why: it has this goal.
        recalled: the run was asked to let it go.
        gone_at: since when it is away; None: it is here.
    """

    worker: str
    roles: tuple[str, ...]
    trial: bool
    at: str = IDLE
    goal: str = IDLE
    why: str = ""
    recalled: bool = False
    gone_at: float | None = None


class _Need(msgspec.Struct):
    order: int
    wants: RunWants
    most: int | None  # planned workers: smaller numbers count after a while only
    smaller_since: float | None = None


class WorkerScheduler:
    """Assigns the workers of a site to runs: a pure machine.

    Attributes:
        workers: that are here, or were until a moment ago, by name.
    """

    def __init__(self) -> None:
        """Begin without runs and workers."""
        self.workers: dict[str, SeenWorker] = {}
        self._needs: dict[str, _Need] = {}
        self._order = 0
        self._drained: set[str] = set()
        self._assigned: dict[str, str] = {}
        self._newcomer = IDLE  # the worker the event is about, if it waits for an answer
        self._counts: dict[str, int] = {}  # workers by run, of the plan before
        self._out: list[Instruction] = []

    def handle(self, event: Event, now: float) -> Sequence[Instruction]:
        self._out = []
        self._dispatch(event, now)
        self._forget(now)
        self._plan(now)
        self._carry_on()
        return self._out

    def next_deadline(self) -> float | None:
        times = [one.gone_at + AWAY_S for one in self.workers.values() if one.gone_at is not None]
        times += [need.smaller_since + RELEASE_S for need in self._needs.values() if need.smaller_since is not None]
        return min(times, default=None)

    def run_of(self, worker: str) -> str:
        """Return the run a worker works for."""
        return self.workers[worker].at if worker in self.workers else IDLE

    def planned(self, run: str) -> int:
        """Return how many workers the plan has for a run."""
        return sum(one.goal == run for one in self.workers.values() if not one.trial)

    def validate(self) -> None:
        check_invariants("the scheduler of workers", self._invariants())

    def _invariants(self) -> Iterator[tuple[bool, str]]:
        for one in self.workers.values():
            name = f"worker {one.worker}"
            yield one.goal == IDLE or one.goal in self._needs, f"{name} is to work for {one.goal}, which is over"
            yield not one.recalled or one.at != IDLE, f"{name} was recalled from no run"
            may = one.goal == IDLE or self._may(one, self._needs[one.goal])
            yield may, f"{name} is to work for {one.goal}, which cannot use it"
            yield one.goal == IDLE or one.worker not in self._drained, f"{name} is drained, and is to work"
            settled = one.gone_at is not None or one.at == one.goal or one.recalled or one.at not in self._needs
            yield settled, f"{name} works for {one.at}, is to work for {one.goal}, and nothing is done about it"
        for run, need in self._needs.items():
            over = need.most is not None and self.planned(run) > max(need.most, need.wants.least)
            yield not over, f"run {run} has {self.planned(run)} workers and can use {need.most}"

    # --- events -----------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case WorkerCame():
                one = self.workers.setdefault(event.worker, SeenWorker(event.worker, event.roles, event.trial))
                one.roles, one.trial, one.gone_at, one.recalled = event.roles, event.trial, None, False
                self._newcomer = one.worker
            case WorkerWent() if event.worker in self.workers:
                one = self.workers[event.worker]
                one.gone_at, one.recalled = now, False
                if one.trial:
                    del self.workers[event.worker]
            case RunWants():
                self._wants(event, now)
            case RunOver():
                self._needs.pop(event.run, None)
            case Drain():
                (self._drained.add if event.drained else self._drained.discard)(event.worker)
            case Assign():
                self._assigned.pop(event.worker, None)
                if event.controller:
                    self._assigned[event.worker] = event.controller
            case Tick():
                pass

    def _wants(self, event: RunWants, now: float) -> None:
        need = self._needs.get(event.run)
        if need is None:
            self._order += 1
            self._needs[event.run] = _Need(self._order, event, event.most)
            return
        need.wants = event
        if need.most is not None and event.most is not None and event.most < need.most:
            need.smaller_since = now if need.smaller_since is None else need.smaller_since
        else:
            need.most, need.smaller_since = event.most, None

    def _forget(self, now: float) -> None:
        for one in list(self.workers.values()):
            if one.gone_at is not None and now >= one.gone_at + AWAY_S:
                del self.workers[one.worker]
        for need in self._needs.values():
            if need.smaller_since is not None and now >= need.smaller_since + RELEASE_S:
                need.most, need.smaller_since = need.wants.most, None

    # --- the plan ---------------------------------------------------------------------------------------------

    def _may(self, one: SeenWorker, need: _Need) -> bool:
        wants = need.wants
        assigned = self._assigned.get(one.worker, "")
        roles = not one.roles or not wants.roles or bool(set(one.roles) & set(wants.roles))
        return roles and one.worker not in wants.without and assigned in ("", wants.controller)

    def _plan(self, now: float) -> None:
        """Give every worker a goal."""
        needs = sorted(self._needs.values(), key=lambda need: (-need.wants.priority, need.order))
        free = {one.worker: one for one in self.workers.values() if not one.trial and one.worker not in self._drained}
        goals: dict[str, tuple[str, str]] = {}
        self._counts = {run: self.planned(run) for run in self._needs}
        for need in needs:
            self._take(need, need.wants.least, free, goals, "it needs {least}")
        for need in needs:
            if need.most is not None:
                self._take(need, need.most, free, goals, "it can use {most}")
        unlimited = [need for need in needs if need.most is None]
        while free and unlimited:
            level = [need for need in unlimited if need.wants.priority == unlimited[0].wants.priority]
            self._share(level, free, goals)
            unlimited = unlimited[len(level) :]
        for one in self.workers.values():
            assigned = self._assigned.get(one.worker, "")
            goal, why = goals.get(one.worker, (IDLE, f"it works for {assigned} alone" if assigned else ""))
            still_goes = goal == one.goal != one.at and one.why  # the reason of a move is the one at its beginning
            one.goal, one.why = goal, one.why if still_goes else why
            if one.trial:
                one.goal = next((need.wants.run for need in needs if self._may(one, need)), IDLE)
                one.why = "it tries a backend"
        for one in self.workers.values():
            if one.worker in self._drained:
                one.goal, one.why = IDLE, "it is drained"

    def _take(
        self,
        need: _Need,
        number: int,
        free: dict[str, SeenWorker],
        goals: dict[str, tuple[str, str]],
        why: str,
    ) -> None:
        """Give a run workers until it has `number`: the run's own, then idle workers, then workers of the lowest
        priority.
        """
        wants = need.wants
        text = why.format(least=wants.least, most=need.most)
        have = sum(goal == wants.run for goal, _ in goals.values())
        able = sorted(
            (one for one in free.values() if self._may(one, need)), key=lambda one: self._cost(one, wants.run)
        )
        for one in able[: max(0, number - have)]:
            goals[one.worker] = (wants.run, text)
            del free[one.worker]

    def _share(self, level: Sequence[_Need], free: dict[str, SeenWorker], goals: dict[str, tuple[str, str]]) -> None:
        """Spread the remaining workers over runs of one priority, evenly, with the fewest moves."""
        counts = {need.wants.run: sum(goal == need.wants.run for goal, _ in goals.values()) for need in level}
        by_run = {need.wants.run: need for need in level}
        total = sum(counts.values()) + len(free)
        even = -(-total // len(level))
        for one in sorted(free.values(), key=lambda one: one.worker):  # those that may stay
            need = by_run.get(one.goal)
            if need is not None and self._may(one, need) and counts[one.goal] < even:
                goals[one.worker] = (one.goal, "it works there")
                counts[one.goal] += 1
                del free[one.worker]
        for one in sorted(free.values(), key=lambda one: one.worker):
            able = [need for need in level if self._may(one, need)]
            if able:
                need = min(able, key=lambda need: (counts[need.wants.run], need.order))
                goals[one.worker] = (need.wants.run, "workers are shared evenly")
                counts[need.wants.run] += 1
                del free[one.worker]

    def _cost(self, one: SeenWorker, run: str) -> tuple[int, int, int, str]:
        """Sort workers by how little it costs to have them work for `run`."""
        if run in (one.goal, one.at):
            return (0 if one.at == run else 1), 0, 0, one.worker
        source = self._needs.get(one.goal)
        if source is None:
            return 2, 0, 0, one.worker
        spare = self._counts.get(one.goal, 0) - source.wants.least
        return 3, source.wants.priority, -spare, one.worker

    # --- moves of workers -------------------------------------------------------------------------------------

    def _carry_on(self) -> None:
        newcomer, self._newcomer = self._newcomer, IDLE
        for one in self.workers.values():
            if one.gone_at is not None:
                continue
            waits = one.worker == newcomer or one.at == IDLE or one.at not in self._needs
            if waits and (one.at != one.goal or one.worker == newcomer):
                source, one.at, one.recalled = one.at, one.goal, False
                self._out.append(PlaceWorker(one.worker, one.goal, source, one.why))
            elif one.at != one.goal and not one.recalled:
                one.recalled = True
                kind = "drained" if one.worker in self._drained else "moved"
                self._out.append(Recall(one.worker, one.at, self._reason(one), kind))

    def _reason(self, one: SeenWorker) -> str:
        if one.goal == IDLE:
            return one.why or f"the run {one.at} can use fewer workers"
        need = self._needs[one.goal]
        return f"the run {one.goal} ({need.wants.controller}, priority {need.wants.priority}) gets it: {one.why}"
