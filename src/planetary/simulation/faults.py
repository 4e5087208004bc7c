"""Fault plans: kinds and times of faults, drawn from a seed."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from planetary.core.configuration.ranges import Index, NotNegative, check_ranges
from planetary.simulation.lies import Lie, RolloutLie

FaultKind = Literal[
    "kill_worker",  # the process dies at once, as by SIGKILL
    "hang_worker",  # the process lives and answers the network, but the task makes no progress
    "slow_worker",  # every later step of the process takes five times as long
    "poison_worker",  # NaN in the worker's next result
    "drop_link",  # broken connections
    "partition",  # node cut off for a while
    "mute_node",  # nothing sent by the node arrives for a while; it still receives
    "deafen_node",  # nothing arrives at the node for a while; outgoing messages arrive
    "repeat_result",  # second copy of the last result
    "flip_blob",  # a bit changes in a file of the node's cache
    "stop_gateway",  # the gateway is asked to stop, as by SIGTERM, and started again with --resume
    "kill_gateway",  # the gateway dies and is started again with --resume
    "kill_gateway_writing",  # the same, before one of the next operations on the disk
    "torn_write",  # the same, in the midst of a line of the journal or the metrics
    "cut_power",  # the same, and bytes appended since the last sync are lost
    "full_disk",  # the next checkpoint cannot be written
    "no_space",  # nothing can be written for a while: the gateway fails, and is started again until it can go on
    "lie",  # it sends something else than it trained, for a while
    "forge",  # it sends forged messages beside honest ones for a while; see `planetary.simulation.forgeries`
    "flip_bit",  # ring: the next outer state it makes differs from all others
    "let_go",  # no fault: the gateway lets a worker go at the end of a task, and the worker returns
]

# Plans are drawn from these. A flipped bit and lies are left out: of two workers the run cannot decide which one is
# right. So are forgeries: their worker is banned. A worker that is let go is no fault.
KINDS: tuple[FaultKind, ...] = (
    "kill_worker",
    "hang_worker",
    "slow_worker",
    "poison_worker",
    "drop_link",
    "partition",
    "mute_node",
    "deafen_node",
    "repeat_result",
    "flip_blob",
    "stop_gateway",
    "kill_gateway",
    "kill_gateway_writing",
    "torn_write",
    "cut_power",
    "full_disk",
    "no_space",
)


class Fault(msgspec.Struct, frozen=True):
    """One fault in a simulated run.

    Attributes:
        at_s: when, in simulated seconds.
        kind: see `FaultKind`.
        worker: which one, where it applies; the first is 0.
        seconds: how long, where it applies.
        lie: forgery: "huge", "largest", "constant", "flipped", "flipped_10", "zero", "noise", "stale", "copied",
            "free_rider" or "false_loss"; see `planetary.simulation.lies`.
        rollout_lie: its forgery in reinforcement learning: "logprobs", "copied_rollouts" or "other_weights"; see there.

    Raises:
        UserError: there is no such kind, or a value is out of range.
    """

    at_s: NotNegative
    kind: FaultKind
    worker: Index = 0
    seconds: NotNegative = 2.0
    lie: Lie = "huge"
    rollout_lie: RolloutLie = "logprobs"

    def __post_init__(self) -> None:
        """Check every field: a fault of an unknown kind would strike nothing."""
        check_ranges(self)


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
