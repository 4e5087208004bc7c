"""Ring orders against brute force, and the schedule of measurements."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from planetary.collectives.master.group_measurement import schedule
from planetary.collectives.master.ring_order import EXACT_MOST, solve, tour_cost


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_small_rings_are_optimal(count: int) -> None:
    rng = random.Random(count)
    for _ in range(20):
        costs = [[rng.uniform(0.1, 1) for _ in range(count)] for _ in range(count)]
        best = min(tour_cost(costs, (0, *rest)) for rest in itertools.permutations(range(1, count)))
        found = solve(costs)
        assert found is not None
        assert sorted(found) == list(range(count))
        assert tour_cost(costs, found) == pytest.approx(best)


def test_two_regions_are_crossed_twice() -> None:
    region = [0, 1, 0, 1, 0, 1]
    costs = [[0.001 if region[a] == region[b] else 0.1 for b in range(6)] for a in range(6)]
    found = solve(costs)
    assert found is not None
    assert tour_cost(costs, found) == pytest.approx(0.204)


def test_impossible_ring_is_none_and_broken_links_are_avoided() -> None:
    costs = [[1.0] * 4 for _ in range(4)]
    costs[0][1] = math.inf
    found = solve(costs)
    assert found is not None
    assert all((a, b) != (0, 1) for a, b in zip(found, (*found[1:], found[0]), strict=True))
    for other in range(4):
        costs[0][other] = math.inf
    assert solve(costs) is None


def test_large_rings_come_close_to_a_planted_tour() -> None:
    rng = random.Random(5)
    count = EXACT_MOST + 12
    planted = list(range(1, count))
    rng.shuffle(planted)
    planted = [0, *planted]
    costs = [[rng.uniform(1, 3) for _ in range(count)] for _ in range(count)]
    for a, b in zip(planted, [*planted[1:], planted[0]], strict=True):
        costs[a][b] = 0.5
    found = solve(costs)
    assert found is not None
    assert sorted(found) == list(range(count))
    assert tour_cost(costs, found) <= 1.15 * tour_cost(costs, planted)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_every_pair_is_measured_once_and_nobody_twice_at_a_time(count: int) -> None:
    peers = [f"p{i}" for i in range(count)]
    known = {("p0", "p1")}
    rounds = schedule(peers, known)
    pairs = [pair for one in rounds for pair in one]
    assert sorted(pairs) == sorted(set(itertools.permutations(peers, 2)) - known)
    for one in rounds:
        involved = [peer for pair in one for peer in pair]
        assert len(involved) == len(set(involved))
