"""Which activations to recompute in the backward pass: a pure decision from sizes and costs.

A *tape* is the forward pass in order. Kept values stay in memory from the forward to the backward pass; the tape is cut
into *segments*, and the values of a segment the backward pass needs are recomputed from kept values, once, just before
the backward pass reaches it (Chen et al. 2016, arXiv:1604.06174). So memory is that of kept values plus the largest
segment. Cuts go where little crosses them, which in a transformer is between blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planetary.compiler.step.step_module import Plan


@dataclass(frozen=True)
class TapeStep:
    """One operation of a tape.

    Attributes:
        inputs: positions of the steps whose results it reads.
        nbytes: of the results; 0 for an operation without memory, such as a reshape.
        cost: of computing it again, in scalar operations.
        needed: whether the backward pass reads the results.
    """

    inputs: tuple[int, ...]
    nbytes: int
    cost: float
    needed: bool


_TRIALS = 24  # segment sizes that are tried


def plan(tape: Sequence[TapeStep], budget: int) -> Plan:
    """Return the cheapest plan found whose `bytes_after` is at most `budget`, or the smallest one.

    The time is linear in the tape, but for one sort. Steps are kept, beyond those that cross a cut, in the order
    of cost per byte: products of matrices first.
    """
    before = sum(step.nbytes for step in tape if step.needed)
    last_use = _last_uses(tape)
    crossing = _crossing(tape, last_use)
    best: tuple[int, ...] = ()
    least = before
    size = before
    for _ in range(_TRIALS):
        size = size * 3 // 4
        cuts = _cuts(tape, crossing, size)
        found = _peak(tape, cuts, _across(cuts, last_use))
        if found < least:
            best, least = cuts, found
    if not best or before <= budget:
        return Plan((), frozenset(), (), before, before, 0.0)
    kept = _across(best, last_use)
    kept = _keep_more(tape, best, kept, budget)
    recomputed = _recomputed(tape, best, kept)
    again = sum(tape[i].cost for segment in recomputed for i in segment)
    total = sum(step.cost for step in tape)
    return Plan(best, frozenset(kept), recomputed, before, _peak(tape, best, kept), again / max(total, 1.0))


def _last_uses(tape: Sequence[TapeStep]) -> list[int]:
    """Position of the last step that reads each step; the step itself where none does."""
    last = list(range(len(tape)))
    for position, step in enumerate(tape):
        for source in step.inputs:
            last[source] = position
    return last


def _crossing(tape: Sequence[TapeStep], last_use: Sequence[int]) -> list[int]:
    """Bytes read across a cut after each position."""
    change = [0] * (len(tape) + 1)
    for position, step in enumerate(tape):
        change[position] += step.nbytes
        change[last_use[position]] -= step.nbytes
    total, found = 0, []
    for amount in change[:-1]:
        total += amount
        found.append(total)
    return found


def _cuts(tape: Sequence[TapeStep], crossing: Sequence[int], size: int) -> tuple[int, ...]:
    """Cut wherever the needed bytes since the last cut would exceed `size`, at the cheapest place in the later half
    of that stretch.
    """
    cuts: list[int] = []
    start, held = 0, 0
    sums: list[int] = []  # needed bytes since the last cut, by position
    position = 0
    while position < len(tape):
        held += tape[position].nbytes if tape[position].needed else 0
        sums.append(held)
        if held > size and position > start:
            half = next(i for i, total in enumerate(sums) if 2 * total >= size)
            window = range(start + min(half, len(sums) - 2), position)
            cut = min(window, key=lambda i: (crossing[i], -i))
            cuts.append(cut)
            position = start = cut + 1
            held, sums = 0, []
            continue
        position += 1
    return tuple(cuts)


def _across(cuts: Sequence[int], last_use: Sequence[int]) -> set[int]:
    """Positions whose results are read in a later segment."""
    kept: set[int] = set()
    segment = _segments(cuts, len(last_use))
    for position, last in enumerate(last_use):
        if segment[position] != segment[last]:
            kept.add(position)
    return kept


def _segments(cuts: Sequence[int], length: int) -> list[int]:
    """Segment of each position."""
    found, start = [], 0
    for number, cut in enumerate([*cuts, length - 1]):
        found += [number] * (cut + 1 - start)
        start = cut + 1
    return found


def _peak(tape: Sequence[TapeStep], cuts: Sequence[int], kept: set[int]) -> int:
    held = sum(tape[i].nbytes for i in kept)
    segment = _segments(cuts, len(tape))
    again = [0] * (len(cuts) + 1)
    for position, step in enumerate(tape):
        if step.needed and position not in kept:
            again[segment[position]] += step.nbytes
    return held + max(again)


def _keep_more(tape: Sequence[TapeStep], cuts: Sequence[int], kept: set[int], budget: int) -> set[int]:
    """Add needed steps to the kept ones, those that cost most per byte first, while the budget allows."""
    segment = _segments(cuts, len(tape))
    again = [0] * (len(cuts) + 1)
    for position, step in enumerate(tape):
        if step.needed and position not in kept:
            again[segment[position]] += step.nbytes
    held = sum(tape[i].nbytes for i in kept)
    largest = max(again)  # an upper bound from here on: a kept value makes the segment smaller
    wanted = [
        i for i, step in enumerate(tape) if step.needed and step.nbytes and i not in kept and segment[i] < len(cuts)
    ]
    found = set(kept)
    for position in sorted(wanted, key=lambda i: (-tape[i].cost / tape[i].nbytes, i)):
        if held + tape[position].nbytes + largest <= budget:
            found.add(position)
            held += tape[position].nbytes
    return found


def _recomputed(tape: Sequence[TapeStep], cuts: Sequence[int], kept: set[int]) -> tuple[tuple[int, ...], ...]:
    segment = _segments(cuts, len(tape))
    wanted = [step.needed and i not in kept and segment[i] < len(cuts) for i, step in enumerate(tape)]
    for position in range(len(tape) - 1, -1, -1):
        if wanted[position]:
            for source in tape[position].inputs:
                if source not in kept:
                    wanted[source] = True
    found: list[list[int]] = [[] for _ in cuts]
    for position, again in enumerate(wanted):
        if again:
            found[segment[position]].append(position)
    return tuple(tuple(part) for part in found)
