"""The terms of a policy's loss, as numbers the training step takes beside a rollout: it knows no algorithm."""

from __future__ import annotations

import msgspec
import numpy as np

NEVER = 1e9
"""A bound no ratio reaches: nothing is clipped, nothing masked."""


class LossTerms(msgspec.Struct, frozen=True):
    """Coefficients of the loss of one token; see `rl.program.policy_loss`.

    Attributes:
        surrogate: of -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A).
        likelihood: of -A log π.
        clip_low, clip_high: how far ρ may be below and above 1 before the gradient is cut.
        mask_gap: a token whose probability moved by more than this in the advantage's direction is left out.
        drift: of (log ρ)².
        reference: of the KL divergence from a reference policy.
    """

    surrogate: float = 0.0
    likelihood: float = 0.0
    clip_low: float = NEVER
    clip_high: float = NEVER
    mask_gap: float = NEVER
    drift: float = 0.0
    reference: float = 0.0

    def row(self) -> np.ndarray:
        """Return the coefficients as the step takes them: f32 [TERMS]."""
        return np.asarray(msgspec.structs.astuple(self), np.float32)


TERMS = len(LossTerms.__struct_fields__)
