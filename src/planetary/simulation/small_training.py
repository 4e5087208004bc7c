"""The simulation's training and outer steps; the parameters at the end of a run, from its journal alone."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from planetary.diloco.mean import Contribution
from planetary.diloco.outer import OuterState, outer_step
from planetary.diloco.ring import Held, outer_step_of_sum, share
from planetary.fabric.protocol.records import (
    DeltaAccepted,
    DeltaWithdrawn,
    LeaseAssigned,
    Record,
    RolledBack,
    RoundClosed,
    RoundFinished,
    RunFinished,
    RunResumed,
)
from planetary.simulation.ring import PARAMS

OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


def train(params: np.ndarray, lease: int, steps: int) -> np.ndarray:
    """Return the end parameters of the simulated training of a lease: float32 [8] -> float32 [8]."""
    goal = np.sin(np.arange(8, dtype=np.float32) * (lease + 1))
    for _ in range(steps):
        params = (params - np.float32(0.1) * (params - goal)).astype(np.float32)
    return params


def outer(theta: np.ndarray, velocity: np.ndarray, parts: list[Contribution]) -> tuple[np.ndarray, np.ndarray]:
    """The real outer step, on the simulation's one tensor."""
    before = OuterState({"w": theta}, {"w": velocity})
    after = outer_step(PARAMS, before, parts, OUTER_RATE, OUTER_MOMENTUM).state
    return after.params["w"], after.velocity["w"]


def outer_of_held(theta: np.ndarray, velocity: np.ndarray, parts: list[Held]) -> tuple[np.ndarray, np.ndarray]:
    """`outer`, for results that were trained from `theta`."""
    for part in parts:
        np.testing.assert_array_equal(part.start["w"], theta, "a result was trained from other parameters")
    return outer(theta, velocity, [part.contribution for part in parts])


def delayed_outer(theta: np.ndarray, velocity: np.ndarray, parts: list[Held]) -> tuple[np.ndarray, np.ndarray]:
    """The real outer step with overlap: from `theta`, with deltas from wherever they began."""
    summed = share(PARAMS, parts, sum(part.contribution.tokens for part in parts), "delta")
    before = OuterState({"w": theta}, {"w": velocity})
    after = outer_step_of_sum(PARAMS, before, (summed, "delta"), OUTER_RATE, OUTER_MOMENTUM).state
    return after.params["w"], after.velocity["w"]


def replay_parameters(journal: Iterable[Record], steps: int, *, overlap: bool = False) -> np.ndarray:
    """Compute the final parameters from the journal alone, following resumes back to their checkpoints."""
    theta = {0: np.linspace(-1, 1, 8, dtype=np.float32)}
    velocity = {0: np.zeros(8, np.float32)}
    accepted: list[DeltaAccepted] = []
    versions: dict[int, int] = {}  # task -> the version that it was trained from
    round_ = 0
    step = delayed_outer if overlap else outer_of_held
    for record in journal:
        match record:
            case RunResumed() | RolledBack():
                round_ = record.mark.round
                accepted = []
            case LeaseAssigned():
                versions[record.task] = record.version
            case DeltaAccepted():
                accepted.append(record)
            case DeltaWithdrawn():
                accepted = [a for a in accepted if a.task != record.task]
            case RoundClosed():
                parts = []
                for a in (a for a in accepted if a.round == record.round):
                    start = theta[versions[a.task]]
                    end = Contribution(a.task, a.tokens, {"w": train(start, a.lease, steps)})
                    parts.append(Held(end, {"w": start}))
                theta[record.round], velocity[record.round] = step(theta[round_], velocity[round_], parts)
                accepted = [a for a in accepted if a.round != record.round]
            case RoundFinished():
                round_ = record.round
            case RunFinished():
                break
            case _:
                pass
    return theta[round_]


def encode_story(journal: Iterable[Record]) -> bytes:
    """The journal as bytes, for comparing two runs."""
    return b"\n".join(msgspec.json.encode(record) for record in journal)
