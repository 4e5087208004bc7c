"""Fault plans: what goes wrong and when, drawn from a seed."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

FaultKind = Literal[
    "kill_worker",  # the process dies at once, as by SIGKILL
    "hang_worker",  # the process lives and answers the network, but its task makes no progress
    "slow_worker",  # every later step of the process takes five times as long
    "poison_worker",  # its next result contains a NaN
    "drop_link",  # its connections break
    "partition",  # its node is cut off for a while
    "repeat_result",  # its last result is sent again
    "kill_gateway",  # the gateway dies and is started again with --resume
    "full_disk",  # the next checkpoint cannot be written
    "flip_bit",  # ring: the next outer state that it makes is another than everybody's
]

# What plans are drawn from. A flipped bit is left out: of two workers nobody can say which one is right.
KINDS: tuple[FaultKind, ...] = (
    "kill_worker",
    "hang_worker",
    "slow_worker",
    "poison_worker",
    "drop_link",
    "partition",
    "repeat_result",
    "kill_gateway",
    "full_disk",
)


class Fault(msgspec.Struct, frozen=True):
    """One thing that goes wrong in a simulated run.

    Attributes:
        at_s: when, in simulated seconds.
        kind: "kill_worker" (as by SIGKILL), "hang_worker", "slow_worker" (steps take five times as long),
            "poison_worker" (its next result contains NaN), "drop_link", "partition" (its node is cut off for
            `seconds`), "repeat_result", "kill_gateway" (it is resumed), "full_disk" (the next checkpoint is not
            written), or "flip_bit" (ring: its next outer state differs).
        worker: which one, where it applies; the first is 0.
        seconds: how long, where it applies.
    """

    at_s: float
    kind: FaultKind
    worker: int = 0
    seconds: float = 2.0


def draw_plan(seed: int, *, workers: int, horizon_s: float, most: int) -> list[Fault]:
    """Draw up to `most` faults within `horizon_s` seconds, in order of time."""
    source = random.Random(f"faults {seed}")
    faults = [
        Fault(
            at_s=source.uniform(0.0, horizon_s),
            kind=source.choice(KINDS),
            worker=source.randrange(workers),
            seconds=source.choice((0.5, 2.0, 8.0)),
        )
        for _ in range(source.randint(0, most))
    ]
    return sorted(faults, key=lambda fault: fault.at_s)
