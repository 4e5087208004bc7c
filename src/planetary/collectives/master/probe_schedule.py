"""When which pair of peers measures its link: in rounds in which nobody is part of two measurements."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

Pair = tuple[str, str]


@dataclass
class ProbeRound:
    """Progress of the measurements: what is left, and what is under way."""

    rounds: list[list[Pair]]
    seq: int = 0
    deadline: float = 0.0
    outstanding: set[Pair] = field(default_factory=set)


def schedule(peers: Sequence[str], known: Collection[Pair]) -> list[list[Pair]]:
    """Return rounds of (from, to) for every ordered pair that is not known (the circle method of tournaments)."""
    places: list[str | None] = [*peers]
    if len(places) % 2:
        places.append(None)  # whoever meets nobody rests
    rounds: list[list[Pair]] = []
    for _ in range(len(places) - 1):
        pairs = [(places[i], places[-1 - i]) for i in range(len(places) // 2)]
        for backward in (False, True):
            directed = [(b, a) if backward else (a, b) for a, b in pairs if a is not None and b is not None]
            left = [(a, b) for a, b in directed if a is not None and b is not None and (a, b) not in known]
            if left:
                rounds.append(left)
        places = [places[0], places[-1], *places[1:-1]]
    return rounds
