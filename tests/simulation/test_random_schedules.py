"""The library of random schedules: what it runs, checks, counts and prints, with a world of a few lines."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest

from planetary.simulation.world import World
from random_schedules import FILES, Schedules, schedules_of


class Coin:
    """A world that ends unless its seed is a multiple of five; heads, even seeds, are its faults."""

    waits_for = "a sixth side"

    def __init__(self, seed: int) -> None:
        self.seed, self.world, self.begun = seed, World(seed), False
        self.struck = ["heads"] if seed % 2 == 0 else []

    def run(self, limit_s: float) -> bool:
        assert self.begun
        return self.seed % 5 > 0


@contextlib.contextmanager
def coin(seed: int, *, mode: str = "plain") -> Iterator[Coin]:
    world = Coin(seed)
    world.begun = True
    yield world
    world.begun = False


def check_it_is_over(world: Coin) -> None:
    assert not world.begun


def check_seven_is_unlucky(world: Coin) -> None:
    assert world.seed != 7, "seven"


COINS = Schedules(
    kind="coins",
    build=coin,
    faults=["heads"],
    invariants=(check_it_is_over, check_seven_is_unlucky),
    limit_s=1.0,
    journals=lambda world: {"own": [world.seed]},
    observe=lambda world: {"seeds": world.seed},
    options={"--mode": {"choices": ["plain", "bent twice"], "default": "plain"}},
)


def test_sweep_counts_faults_records_and_observations() -> None:
    found = COINS.sweep(range(1, 5))
    assert (found.struck["heads"], found.records[int], found.seen["seeds"]) == (2, 4, 10)
    found.require(int)
    with pytest.raises(AssertionError, match="no schedule had a record str"):
        found.require(str)
    with pytest.raises(AssertionError, match=r"no schedule had an effective fault of the kinds \['heads'\]"):
        COINS.sweep([1, 3]).require()


def test_sweep_goes_through_the_modes_in_turn() -> None:
    modes: list[str] = []

    @contextlib.contextmanager
    def noting(seed: int, *, mode: str) -> Iterator[Coin]:
        modes.append(mode)
        with coin(seed) as world:
            yield world

    dataclasses.replace(COINS, build=noting).sweep_modes(range(1, 4), ("plain", "bent twice"))
    assert modes == ["plain", "bent twice", "plain"]


@pytest.mark.parametrize(("seed", "why"), [(7, "seven"), (5, "hangs: a sixth side")])
def test_failing_schedule_prints_faults_and_command(seed: int, why: str) -> None:
    with pytest.raises(AssertionError, match=why) as error:
        COINS.run(seed, mode="bent twice")
    faults, replay = error.value.__notes__
    assert faults == "faults: []; at 0.000 s"
    assert replay == f"replay: PYTHONPATH=src python tests/random_schedules.py coins {seed} --mode='bent twice'"


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_has_faults_and_invariants(kind: str) -> None:
    schedules = schedules_of(kind)
    assert schedules.kind == kind
    assert len(set(schedules.faults)) >= 8
    assert len(schedules.invariants) >= 2
