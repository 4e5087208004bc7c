"""Training that is a small known function; the parameters at the end of such a run, from its journal alone."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from planetary.core.tensors import Tensors, TensorSpec
from planetary.diloco.mean import Contribution
from planetary.diloco.outer import OuterState, initial_state
from planetary.diloco.ring import Held
from planetary.fabric.protocol import messages as m
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
from planetary.simulation.numerics import Trained
from planetary.simulation.outer_steps import delayed_outer, outer_of_held

PARAMS = (TensorSpec("w", "f32", (8,)),)
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
TOKENS_PER_STEP = 10


class SmallTraining:
    """Eight parameters that every lease draws towards a goal of its own; a `planetary.simulation.numerics.Numerics`."""

    specs = PARAMS
    learning_rate, momentum = OUTER_RATE, OUTER_MOMENTUM

    def initial(self) -> OuterState:
        """See `Numerics`."""
        return initial_state(PARAMS, {"w": np.linspace(-1, 1, 8, dtype=np.float32)})

    def train(self, params: Tensors, inner: Tensors | None, task: m.TrainTask) -> Trained:
        """See `Numerics`; there is no optimizer state."""
        ends = trained(params, task.lease, task.steps)
        return Trained(ends, {}, task.steps * TOKENS_PER_STEP, 1.0 / task.round, 1.0)

    def evaluate(self, params: Tensors, task: m.EvalTask) -> float:
        """See `Numerics`."""
        return float(np.square(params["w"], dtype=np.float64).sum())


def trained(params: Tensors, lease: int, steps: int) -> dict[str, np.ndarray]:
    """Return the end parameters of the training of a lease."""
    goal = np.sin(np.arange(8, dtype=np.float32) * (lease + 1))
    values = params["w"]
    for _ in range(steps):
        values = (values - np.float32(0.1) * (values - goal)).astype(np.float32)
    return {"w": values}


def replay_parameters(journal: Iterable[Record], steps: int, *, overlap: bool = False) -> dict[str, np.ndarray]:
    """Compute the final parameters from the journal alone, following resumes back to their checkpoints."""
    numerics = SmallTraining()
    states = {0: numerics.initial()}
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
                    start = states[versions[a.task]].params
                    parts.append(Held(Contribution(a.task, a.tokens, trained(start, a.lease, steps)), start))
                states[record.round] = step(numerics, states[round_], parts)
                accepted = [a for a in accepted if a.round != record.round]
            case RoundFinished():
                round_ = record.round
            case RunFinished():
                break
            case _:
                pass
    return states[round_].params


def encode_story(journal: Iterable[Record]) -> bytes:
    """Return the journal as bytes, for comparing two runs."""
    return b"\n".join(msgspec.json.encode(record) for record in journal)
