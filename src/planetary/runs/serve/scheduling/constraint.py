"""Limits of a text's next token, beside the model's probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """A rule that generated tokens obey: a pure function of them, so a text obeys it on any worker."""

    def allowed(self, generated: Sequence[int]) -> np.ndarray:
        """Return which tokens may follow, bool [vocabulary]; none where the text is complete."""
        ...

    def is_complete(self, generated: Sequence[int]) -> bool:
        """Whether nothing may follow."""
        ...
