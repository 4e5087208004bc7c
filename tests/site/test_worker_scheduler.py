"""The scheduler of workers as a pure machine: rules one by one, and random schedules."""

from __future__ import annotations

import random

import pytest

from planetary.machine.events import Event, Tick
from planetary.site.worker_scheduler import (
    AWAY_S,
    IDLE,
    RELEASE_S,
    Assign,
    Drain,
    PlaceWorker,
    Recall,
    RunOver,
    RunWants,
    WorkerCame,
    WorkerScheduler,
    WorkerWent,
)


def wants(run: str, least: int = 1, most: int | None = None, priority: int = 0, **more: object) -> RunWants:
    controller = str(more.pop("controller", "training"))
    return RunWants(run=run, controller=controller, priority=priority, least=least, most=most, **more)  # type: ignore[arg-type]


class World:
    """Connections as a site has them: a worker that is let go comes again, after as long as its task takes."""

    def __init__(self, seed: int = 0) -> None:
        self.scheduler, self.now = WorkerScheduler(), 0.0
        self.random = random.Random(seed)
        self.at: dict[str, str] = {}  # worker -> run whose task it has; absent: no connection
        self.leaving: dict[str, float] = {}  # worker -> when its task ends
        self.moves: list[tuple[str, str, str]] = []

    def tell(self, event: Event) -> None:
        for instruction in self.scheduler.handle(event, self.now):
            match instruction:
                case PlaceWorker():
                    assert instruction.run == IDLE or instruction.why, "a worker is placed, and nothing says why"
                    if instruction.run != instruction.source:
                        self.moves.append((instruction.worker, instruction.source, instruction.run))
                    self.at[instruction.worker] = instruction.run
                case Recall():
                    assert self.at[instruction.worker] == instruction.run
                    assert instruction.why
                    self.leaving[instruction.worker] = self.now + self.random.random() * 3
        self.scheduler.validate()

    def come(self, worker: str, **more: object) -> None:
        self.tell(WorkerCame(worker=worker, **more))  # type: ignore[arg-type]

    def go(self, worker: str) -> None:
        self.at.pop(worker, None)
        self.leaving.pop(worker, None)
        self.tell(WorkerWent(worker))

    def settle(self, for_s: float = 0.0) -> None:
        """Let tasks end, and workers that were let go come again, until nothing is under way and `for_s` has passed."""
        until = self.now + for_s
        while self.leaving or self.now < until:
            times = [*self.leaving.values(), until if self.now < until else float("inf")]
            deadline = self.scheduler.next_deadline()
            self.now = max(self.now, min([*times, *([deadline] if deadline is not None else [])]))
            for worker in [one for one, when in self.leaving.items() if when <= self.now]:
                roles = self.scheduler.workers[worker].roles
                self.go(worker)
                self.come(worker, roles=roles)
            self.tell(Tick())

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for run in self.at.values():
            found[run] = found.get(run, 0) + 1
        return found


def world(workers: int, *needs: RunWants) -> World:
    found = World()
    for number in range(workers):
        found.come(f"w{number}")
    for need in needs:
        found.tell(need)
    found.settle()
    return found


def test_waiting_workers_go_to_the_first_run() -> None:
    found = world(2)
    assert found.counts() == {IDLE: 2}
    found.tell(wants("a"))
    assert found.counts() == {"a": 2}
    found.tell(RunOver("a"))
    assert found.counts() == {IDLE: 2}


def test_served_model_takes_workers_by_demand() -> None:
    """A served model takes one worker from a training and more by demand."""
    found = world(3, wants("train"))
    serving = {"priority": 100, "controller": "inference"}
    found.tell(wants("serve", 1, 1, **serving))
    assert [move for move in found.moves if move[1] == "train"] == []  # not before its task has ended
    found.settle()
    assert found.counts() == {"train": 2, "serve": 1}
    found.tell(wants("serve", 1, 2, **serving))
    found.settle()
    assert found.counts() == {"train": 1, "serve": 2}
    found.tell(wants("serve", 1, 9, **serving))
    found.settle()
    assert found.counts() == {"train": 1, "serve": 2}  # the last one that a training needs stays


def test_a_demand_that_is_smaller_for_a_moment_moves_nobody() -> None:
    found = world(3, wants("train"), wants("serve", 1, 2, priority=100))
    assert found.counts() == {"train": 1, "serve": 2}
    found.moves.clear()
    found.tell(wants("serve", 1, 1, priority=100))
    found.settle(RELEASE_S / 2)
    found.tell(wants("serve", 1, 2, priority=100))
    found.settle(2 * RELEASE_S)
    assert found.moves == []
    found.tell(wants("serve", 1, 1, priority=100))
    found.settle(2 * RELEASE_S)
    assert found.counts() == {"train": 2, "serve": 1}


def test_equal_priorities_share_evenly_with_fewest_moves() -> None:
    found = world(5, wants("a"))
    found.moves.clear()
    found.tell(wants("b"))
    found.settle()
    assert found.counts() == {"a": 3, "b": 2}
    assert len(found.moves) == 2


def test_higher_priority_gets_all_but_the_others_needs() -> None:
    assert world(5, wants("low"), wants("high", priority=1)).counts() == {"low": 1, "high": 4}
    assert world(1, wants("low"), wants("high", priority=1)).counts() == {"high": 1}


def test_restart_moves_no_worker_and_absent_ones_are_replaced() -> None:
    found = world(3, wants("train"), wants("serve", 1, 1, priority=100))
    (server,) = [worker for worker, run in found.at.items() if run == "serve"]
    found.moves.clear()
    found.go(server)
    found.settle(AWAY_S / 2)
    found.come(server)
    assert found.at[server] == "serve"
    found.go(server)
    found.settle(2 * AWAY_S)
    assert found.counts() == {"train": 1, "serve": 1}
    assert len(found.moves) == 1


def test_returned_worker_of_an_ended_run_is_placed_with_reason() -> None:
    """A worker that was away while its run ended is placed with the reason."""
    found = world(2, wants("a", 1, 1), wants("b", 1, None))
    (worker,) = [one for one, run in found.at.items() if run == "a"]
    found.go(worker)
    found.tell(RunOver("a"))
    found.come(worker)
    assert found.scheduler.workers[worker].why == "workers are shared evenly"
    assert found.moves[-1] == (worker, "a", "b")


def test_drained_worker_idles_and_assigned_one_is_exclusive() -> None:
    """A drained worker idles and one that is assigned works for its controller only."""
    found = world(2, wants("train"))
    found.tell(Drain("w0", True))
    found.settle()
    assert found.at == {"w0": IDLE, "w1": "train"}
    found.tell(Drain("w0", False))
    assert found.at["w0"] == "train"
    found.tell(Assign("w0", "inference"))
    found.settle()
    assert found.at["w0"] == IDLE
    found.tell(wants("serve", 1, 1, controller="inference"))
    assert found.at["w0"] == "serve"


def test_roles_and_bans_are_kept() -> None:
    found = World()
    found.come("server", roles=("server",))
    found.come("banned")
    found.tell(wants("train", roles=("trainer",), without=frozenset({"banned"})))
    assert found.counts() == {IDLE: 2}
    found.tell(wants("serve", 1, None, roles=("server",)))
    found.settle()
    assert found.at == {"server": "serve", "banned": "serve"}


def test_a_trial_of_a_backend_takes_nobodys_place() -> None:
    found = world(1, wants("serve", 1, 1))
    found.come("trial", trial=True)
    assert found.at == {"w0": "serve", "trial": "serve"}


def random_event(found: World) -> Event | None:
    """Return what may happen next; None: a worker's connection ends or is made."""
    draw, chosen = found.random.random(), found.random
    run = f"r{chosen.randrange(4)}"
    worker = f"w{chosen.randrange(8)}"
    if draw < 0.4:
        if worker in found.at:
            found.go(worker)
        else:
            found.come(worker, roles=chosen.choice([(), (), ("trainer",), ("server",)]))
        return None
    if draw < 0.75:
        least = chosen.randrange(3)
        most = chosen.choice([None, least, least + 1, least + 3])
        roles = chosen.choice([(), ("trainer",), ("server",)])
        banned = frozenset({worker} if chosen.random() < 0.2 else ())
        return wants(run, least, most, priority=chosen.randrange(3), roles=roles, without=banned)
    if draw < 0.85:
        return RunOver(run)
    if draw < 0.92:
        return Drain(worker, chosen.random() < 0.5)
    return Assign(worker, chosen.choice(["", "training", "inference"]))


@pytest.mark.parametrize("first", [0, 100, 200])
def test_random_schedules_keep_states_possible_and_moves_finite(first: int) -> None:
    """Under random schedules every state is possible and moves come to an end."""
    moved = 0
    for seed in range(first, first + 100):
        found = World(seed)
        for _ in range(60):
            event = random_event(found)
            if event is not None:
                found.tell(event)
            if found.random.random() < 0.5:
                found.settle(found.random.random() * 10)
        found.settle(3 * max(AWAY_S, RELEASE_S))
        moved += len(found.moves)
        scheduler, before = found.scheduler, dict(found.at)
        for name, one in scheduler.workers.items():
            assert one.at == one.goal == found.at[name], f"seed {seed}: {name} is not where it is to be"
        found.settle(3 * max(AWAY_S, RELEASE_S))
        assert found.at == before, f"seed {seed}: workers move although nothing has changed"
    assert moved > 100
