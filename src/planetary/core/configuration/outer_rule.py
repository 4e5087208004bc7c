"""The outer step of a run that names none: chosen by the number of outer steps.

Nesterov's 0.7 and 0.9 have an effective rate of 1.5 to 1.9 over tens of outer steps, which is too long a memory for a
run of few. A LoRA study of 43 outer steps measured +9.9 % ± 1.5 for it, and +0.56 % ± 1.3 for radial-directional
averaging at rate 1 without momentum.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

FEW_OUTER_STEPS = 1000
RULE_KEYS = frozenset({"optimizer", "learning_rate", "momentum", "merge"})
"""Keys of `[outer]` each of which fixes the rule."""

FEW: dict[str, Any] = {"optimizer": "nesterov", "learning_rate": 1.0, "momentum": 0.0, "merge": "rda"}
ADAM_RATE = 0.03
"""Of Adam, where the configuration has none: the steps are about as long in every coordinate, whatever the delta is."""
MOST_ADAM_RATE = 0.5
"""More is Nesterov's rate, in a file to which Adam was added: all parameters would move by as much in every round."""


def chosen_rule(rounds: int) -> dict[str, Any]:
    """Return the keys of `[outer]` for a run of so many rounds; empty: the defaults, Nesterov's 0.7 and 0.9."""
    return dict(FEW) if rounds < FEW_OUTER_STEPS else {}


def chosen_adam(rounds: int, given: Collection[str]) -> dict[str, Any]:
    """Return the keys of `[outer]` for a run of so many rounds with Adam, but those that are `given`.

    A short run has no momentum, as with Nesterov: 0.9 costs 10 % of the loss of 20 rounds (bench/results/sync.md).
    """
    chosen = {"learning_rate": ADAM_RATE, **({"momentum": 0.0} if rounds < FEW_OUTER_STEPS else {})}
    return {key: value for key, value in chosen.items() if key not in given}


def why_chosen(outer: Any, rounds: int) -> str:
    """Return why a run has its outer step, for people; "" when it is not `chosen_rule` of a short run."""
    if any(getattr(outer, key) != value for key, value in FEW.items()) or rounds >= FEW_OUTER_STEPS:
        return ""
    return (
        "outer step: radial-directional averaging at rate 1 without momentum, which suits runs of fewer than "
        f"{FEW_OUTER_STEPS:,} outer steps (this one has {rounds:,}); outer.optimizer, outer.learning_rate, "
        "outer.momentum or outer.merge fix another"
    )
