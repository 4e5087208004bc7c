"""The order of a ring: the asymmetric travelling-salesman problem over the cost of each hop.

Exact by dynamic programming (Held & Karp 1962) up to `EXACT_MOST` peers; above, nearest-neighbour starts improved by
or-opt moves (which keep the direction of every segment, as an asymmetric problem needs) with random restarts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

EXACT_MOST = 12

Costs = Sequence[Sequence[float]]
"""costs[i][j]: seconds of the hop from peer i to peer j; infinite where j cannot be reached from i."""


def tour_cost(costs: Costs, order: Sequence[int]) -> float:
    """Sum over the ring's hops."""
    return sum(costs[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True)) if len(order) > 1 else 0.0


def solve(costs: Costs, *, restarts: int = 16, seed: int = 0) -> tuple[int, ...] | None:
    """Return the cheapest ring that was found, starting at peer 0; None when no ring is possible (or was found)."""
    count = len(costs)
    if count <= 3:
        options = [(0, *rest) for rest in itertools.permutations(range(1, count))]
        best = min(options, key=lambda order: tour_cost(costs, order))
    else:
        best = _exact(costs) if count <= EXACT_MOST else _search(costs, restarts, random.Random(seed))
    return None if math.isinf(tour_cost(costs, best)) else tuple(best)


def _exact(costs: Costs) -> tuple[int, ...]:
    last = len(costs) - 1  # peers 1..n-1 are bits 0..n-2; peer 0 is the start
    full = (1 << last) - 1
    cost: list[list[float]] = [[math.inf] * last for _ in range(full + 1)]
    before = [[-1] * last for _ in range(full + 1)]
    for peer in range(last):
        cost[1 << peer][peer] = costs[0][peer + 1]
    for visited in range(1, full + 1):
        row = cost[visited]
        for end in range(last):
            here = row[end]
            if math.isinf(here):
                continue
            hops = costs[end + 1]
            for following in range(last):
                bit = 1 << following
                if visited & bit:
                    continue
                candidate = here + hops[following + 1]
                if candidate < cost[visited | bit][following]:
                    cost[visited | bit][following] = candidate
                    before[visited | bit][following] = end
    end = min(range(last), key=lambda peer: cost[full][peer] + costs[peer + 1][0])
    order, visited = [], full
    while end >= 0:
        order.append(end + 1)
        visited, end = visited ^ (1 << end), before[visited][end]
    if len(order) != last:
        return tuple(range(len(costs)))  # no ring exists; the cost of this order is infinite
    return (0, *reversed(order))


def _search(costs: Costs, restarts: int, rng: random.Random) -> tuple[int, ...]:
    count = len(costs)
    best: list[int] = list(range(count))
    for attempt in range(restarts):
        order = _nearest(costs, attempt % count if attempt < count else rng.randrange(count), rng, attempt)
        order = _improve(costs, order)
        if tour_cost(costs, order) < tour_cost(costs, best):
            best = order
    start = best.index(0)
    return tuple(best[start:] + best[:start])


def _nearest(costs: Costs, start: int, rng: random.Random, attempt: int) -> list[int]:
    left = set(range(len(costs))) - {start}
    order = [start]
    while left:
        ranked = sorted(left, key=lambda peer: (costs[order[-1]][peer], peer))
        choice = ranked[0] if attempt < len(costs) or len(ranked) < 2 or rng.random() < 0.8 else ranked[1]
        order.append(choice)
        left.remove(choice)
    return order


def _improve(costs: Costs, order: list[int]) -> list[int]:
    """Move runs of one to three peers elsewhere for as long as that helps."""
    count = len(order)
    improved = True
    while improved:
        improved = False
        for length, start in itertools.product((1, 2, 3), range(count)):
            if length >= count - 1:
                continue
            turned = order[start:] + order[:start]
            run, rest = turned[:length], turned[length:]
            gain = costs[rest[-1]][run[0]] + costs[run[-1]][rest[0]]
            joined = costs[rest[-1]][rest[0]]
            for place in range(len(rest) - 1):
                a, b = rest[place], rest[place + 1]
                added = costs[a][run[0]] + costs[run[-1]][b]
                if _less(added + joined, gain + costs[a][b]):
                    order = rest[: place + 1] + run + rest[place + 1 :]
                    improved = True
                    break
            if improved:
                break
    return order


def _less(a: float, b: float) -> bool:
    return a < b - 1e-12 * max(abs(b), 1e-30) if math.isfinite(b) else math.isfinite(a)
