"""Whether a run has stopped improving: a function of its held-out losses alone, so a restarted gateway agrees. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping


def has_stopped_improving(evals: Mapping[int, float], patience: int, least_gain: float) -> bool:
    """Whether `patience` evaluations in a row had no loss at least `least_gain` below the best before them.

    Args:
        evals: version -> held-out loss, nats per token.
        patience: evaluations; 0: runs never stop early.
        least_gain: in nats per token; 0: any lower loss is an improvement.
    """
    best, without = math.inf, 0
    for _, loss in sorted(evals.items()):
        if loss < best and loss <= best - least_gain:
            best, without = loss, 0
        else:
            without += 1
            if 0 < patience <= without:
                return True
    return False


def why_stopped(evals: Mapping[int, float], patience: int, least_gain: float) -> str:
    """Say for people why the run ends, and which version is the best."""
    best, last = min(evals, key=lambda version: (evals[version], version)), max(evals)
    gain = f"no gain of {least_gain:g}" if least_gain else "no gain"
    return (
        f"eval.patience is spent: {patience} evaluations in a row with {gain}. The held-out loss is {evals[last]:.4f} "
        f"after round {last}; the best is {evals[best]:.4f} after round {best}, whose checkpoint is kept"
    )
