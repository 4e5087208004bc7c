"""The numbers in workers' messages: which of them no worker can have measured.

What a number may be for the task it is about is known to the kind of run (`RunController._beyond_task`). Here are the
limits that hold for every message: a sum of such numbers is finite, and has a form in the journal.
"""

from __future__ import annotations

from functools import cache

import msgspec

from planetary.wire.message import Message

LARGEST = 3.5e38
"""Workers compute in float32 or narrower types; above its largest number."""
MOST = 2**53
"""Counts are exact in float64."""
MEASURED = frozenset({"seconds", "grad_norm", "compute_s", "composer_s", "progress"})
"""Times, norms and positions in a run: never negative."""
NUMBERED = frozenset({"id", "task", "call"})
"""Numbers that are compared with those that were given out."""


def impossible_value(message: Message) -> str:
    """Return which number of a worker's message no worker can have measured, for people; "" for none."""
    for name in _names(type(message)):
        value = getattr(message, name)
        if isinstance(value, float):
            least = 0.0 if name in MEASURED else -LARGEST
            if not least <= value <= LARGEST:
                return f"{type(message).__name__} with {name} {value:g}"
        elif isinstance(value, int) and not -1 <= value <= MOST:
            return f"{type(message).__name__} with {name} {value:.6g}"
    return ""


@cache
def _names(kind: type[Message]) -> tuple[str, ...]:
    return tuple(one.name for one in msgspec.structs.fields(kind) if one.name not in NUMBERED)
