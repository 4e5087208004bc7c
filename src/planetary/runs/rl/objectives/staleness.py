"""The weights of tokens that older versions of a policy have drawn: pure functions of log-probabilities."""

from __future__ import annotations

import msgspec
import numpy as np


class StalenessBounds(msgspec.Struct, frozen=True):
    """Bounds between which the ratio q = π₀(y) / μ(y) of a token weighs the advantage.

    π₀ is the policy with which a task of training begins, μ the one that drew the token. Without a lag q is 1, and the
    weight is 1 within all bounds that have it.

    Attributes:
        low_above, high_above: for advantages above 0.
        low_below, high_below: for those below 0.
    """

    low_above: float
    high_above: float
    low_below: float
    high_below: float

    def weigh(self, advantages: np.ndarray, begun: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """Return advantages f32 [...], each times the bounded q.

        Args:
            advantages: f32 [...].
            begun: f32 [...], log π₀ of each token.
            sampled: f32 [...], log μ of each token.
        """
        # Past the bounds exp may overflow to infinity, which they cut; of 0 · infinity nothing is left either.
        with np.errstate(over="ignore"):
            ratio = np.exp(begun - sampled)
        above = np.clip(ratio, self.low_above, self.high_above)
        below = np.clip(ratio, self.low_below, self.high_below)
        return np.where(advantages > 0, above, below).astype(np.float32) * advantages


TAPERED = StalenessBounds(low_above=1.0, high_above=1.0, low_below=0.0, high_below=1.0)
"""A token with an advantage above 0 counts in full however unlikely it has become; below 0 it counts by at most q, so a
token that is hardly drawn any more is not pushed down further (Le Roux et al. 2025, arXiv:2503.14286: TOPR, where q is
of whole rollouts).
"""
