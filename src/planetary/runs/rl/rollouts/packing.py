"""Rollouts with rewards become the arrays of training batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planetary.runs.rl.objectives.objective import Objective, advantages_of
from planetary.runs.rl.program.shape import (
    ADVANTAGES,
    SAMPLED,
    TERM_ROWS,
    TOKENS,
    WEIGHTS,
    PolicyShape,
)


@dataclass(frozen=True)
class TrainedRollout:
    """A rollout to train on.

    Attributes:
        tokens: the whole rollout, two at least.
        own: whether each token is the policy's: the loss counts. As long as `tokens`; never the first.
        sampled: with which log-probability each own token was drawn; 0 elsewhere.
        reward: NaN: there is none, and the rollout does not count.
    """

    tokens: Sequence[int]
    own: Sequence[bool]
    sampled: Sequence[float]
    reward: float = 0.0


@dataclass(frozen=True)
class Batch:
    """One training step's data.

    Attributes:
        arrays: by name, as the step takes them, but for the reference.
        tokens: how many count.
    """

    arrays: dict[str, np.ndarray]
    tokens: int


def pack(
    groups: Sequence[Sequence[TrainedRollout]], objective: Objective, shape: PolicyShape, longest: int
) -> list[Batch]:
    """Return the batches of all rollouts of the groups, in order and of nearly equal size.

    Args:
        groups: a group's advantages are of the group's rewards.
        objective: of all of them.
        shape: of the training step.
        longest: tokens a completion may have at most, for objectives whose weights have it.
    """
    rows: list[tuple[TrainedRollout, float]] = []
    for group in groups:
        advantages = advantages_of(objective, np.array([rollout.reward for rollout in group], np.float64))
        rows += [
            (rollout, float(advantage))
            for rollout, advantage in zip(group, advantages, strict=True)
            if np.isfinite(rollout.reward)
        ]
    if not rows:
        return []
    parts = np.array_split(np.arange(len(rows)), -(-len(rows) // shape.rows))
    return [_batch([rows[i] for i in part], objective, shape, longest) for part in parts]


def _batch(
    rows: Sequence[tuple[TrainedRollout, float]], objective: Objective, shape: PolicyShape, longest: int
) -> Batch:
    arrays = {spec.name: spec.zeros() for spec in shape.batch}
    lengths = np.array([sum(rollout.own) for rollout, _ in rows])
    # Loss and gradient are the means over micro-batches, and an objective's weights are of the whole batch.
    weights = objective.weights(lengths, longest) * shape.micro_batches
    for i, ((rollout, advantage), weight) in enumerate(zip(rows, weights, strict=True)):
        end = len(rollout.tokens)
        own = np.asarray(rollout.own[1:], bool)
        arrays[TOKENS][i, :end] = rollout.tokens
        arrays[WEIGHTS][i, : end - 1] = np.where(own, weight, 0.0)
        arrays[ADVANTAGES][i, : end - 1] = np.where(own, advantage, 0.0)
        arrays[SAMPLED][i, : end - 1] = np.where(own, rollout.sampled[1:], 0.0)
    arrays[TERM_ROWS][:] = objective.terms.row()
    return Batch(arrays, int(lengths.sum()))
