"""Objectives: how the rewards of a group become advantages, how tokens are weighted, and which terms the loss has.

A group is all completions of one prompt. Rewards are f64 [G], lengths i64 [N] count each rollout's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from planetary.runs.rl.objectives.staleness import TAPERED, StalenessBounds
from planetary.runs.rl.objectives.terms import LossTerms

Equal = Literal["drop", "keep", "replace"]
"""The use of a group whose rewards are all equal, of which nothing can be learned."""

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, so equal rewards have the advantage 0."""


def centred(rewards: np.ndarray) -> np.ndarray:
    """Return r - mean(r)."""
    return rewards - rewards.mean()


def standardised(rewards: np.ndarray) -> np.ndarray:
    """Return (r - mean(r)) / (std(r) + `STD_FLOOR`), with the deviation of the population (Shao et al. 2024,
    arXiv:2402.03300, section 4.1.2).
    """
    return centred(rewards) / (rewards.std() + STD_FLOOR)


def constant(rewards: np.ndarray) -> np.ndarray:
    """Return 1 for every rollout, whatever the reward: it is imitated."""
    return np.ones_like(rewards)


def zero(rewards: np.ndarray) -> np.ndarray:
    """Return 0: advantages come from a teacher's log-probabilities, token by token."""
    return np.zeros_like(rewards)


def per_token(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Return the weight of each rollout's tokens: one over the tokens of all rollouts."""
    return np.full(len(lengths), 1.0 / max(1, int(lengths.sum())))


def per_rollout(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Return the weight of each rollout's tokens: the mean over the rollout's tokens, then over rollouts."""
    return 1.0 / (len(lengths) * np.maximum(lengths, 1))


def per_longest(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Return the weight of each rollout's tokens: one over rollouts and the longest completion that may be (Liu et al.
    2025, arXiv:2503.20783, section 3.2).
    """
    return np.full(len(lengths), 1.0 / (max(1, len(lengths)) * longest))


@dataclass(frozen=True)
class Objective:
    """An objective.

    Attributes:
        advantages: of a group's rewards.
        weights: of each rollout's tokens, by (lengths, longest).
        terms: of the loss.
        teacher: whether each token's advantage is a teacher's log-probability minus the policy's.
        equal: use of groups with equal rewards, unless the configuration names another.
        staleness: how tokens of older versions are weighed. Their ratio is then that to the policy with which a task of
            training begins (Hilton et al. 2022, arXiv:2110.00641), so no bound counts how old they are; None: the ratio
            is to the sampling policy.
    """

    advantages: Callable[[np.ndarray], np.ndarray]
    weights: Callable[[np.ndarray, int], np.ndarray]
    terms: LossTerms
    teacher: bool = False
    equal: Equal = "drop"
    staleness: StalenessBounds | None = None

    def with_terms(self, **values: float) -> Objective:
        """Return the objective with other coefficients; those that are 0 stay as they are."""
        chosen = {name: value for name, value in values.items() if value}
        return replace(self, terms=msgspec.structs.replace(self.terms, **chosen))


OBJECTIVES: Mapping[str, Objective] = {
    # Importance-weighted, without tokens that have moved far already; the default of prime-rl.
    "importance": Objective(centred, per_token, LossTerms(surrogate=1.0, mask_gap=0.2, drift=1e-3)),
    # Shao et al. 2024, arXiv:2402.03300, equation 3.
    "grpo": Objective(standardised, per_rollout, LossTerms(surrogate=1.0, clip_low=0.2, clip_high=0.2), equal="keep"),
    # Liu et al. 2025, arXiv:2503.20783: without the deviation, and with a constant for the length.
    "dr-grpo": Objective(centred, per_longest, LossTerms(surrogate=1.0, clip_low=0.2, clip_high=0.2), equal="keep"),
    # Yu et al. 2025, arXiv:2503.14476: a higher upper bound, the mean over tokens, groups with equal rewards replaced.
    "dapo": Objective(standardised, per_token, LossTerms(surrogate=1.0, clip_low=0.2, clip_high=0.28), equal="replace"),
    # As "dapo", with tokens of older versions weighed as TOPR does (Le Roux et al. 2025, arXiv:2503.14286).
    "topr": Objective(
        standardised,
        per_token,
        LossTerms(surrogate=1.0, clip_low=0.2, clip_high=0.28),
        equal="replace",
        staleness=TAPERED,
    ),
    # Reverse KL to a teacher on the policy's own rollouts (Agarwal et al. 2024, arXiv:2306.13649).
    "distillation": Objective(zero, per_token, LossTerms(surrogate=1.0), teacher=True, equal="keep"),
}

IMITATION = Objective(constant, per_token, LossTerms(likelihood=1.0), equal="keep")
"""Supervised: the mean negative log-likelihood of the answers' tokens."""


def advantages_of(objective: Objective, rewards: np.ndarray) -> np.ndarray:
    """Return the advantages of one group, f64 [G]. A completion without a reward (NaN) has 0 and does not count."""
    found = np.zeros(len(rewards))
    known = np.isfinite(rewards)
    if known.any():
        found[known] = objective.advantages(rewards[known])
    return found
