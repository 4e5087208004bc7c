"""Learning-rate schedules: the rate of every inner step, on the host, from the index of the step.

The rate is an argument of the compiled step, so neither the peak nor the length of a run is compiled into it.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from planetary.core.configuration.ranges import (
    Count,
    Fraction,
    Index,
    Positive,
    ProperFraction,
    ScheduleKind,
    check_ranges,
)
from planetary.core.configuration.schema import OptimizerConfig
from planetary.core.errors import UserError

_KEYS = OptimizerConfig()


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A learning-rate schedule: linear warm-up to `peak`, then the curve `kind`.

    Step s (0-based) of the warm-up has rate `peak · (s + 1) / warmup_steps`: the first step moves, and step
    `warmup_steps - 1` has the peak.

    Attributes:
        kind: "constant": the peak. "cosine": half a cosine down to `final_fraction · peak` (Loshchilov & Hutter 2017,
            arXiv:1608.03983, eq. 5), with progress `(s - warmup_steps) / (total_steps - warmup_steps)` clipped to
            [0, 1]. "linear": a straight line there, with the same progress. "wsd": the peak, and over the last
            `cooldown_fraction` of the run a straight line to `final_fraction · peak` (Hu et al. 2024,
            arXiv:2404.06395, section 4). "inverse-sqrt": `peak · sqrt(w / (s + 1))` with w = max(1, `warmup_steps`)
            (Vaswani et al. 2017, arXiv:1706.03762, eq. 3, scaled so that the highest rate is `peak`).
        peak: the highest rate.
        warmup_steps: inner steps of the warm-up.
        total_steps: inner steps of the whole run.
        final_fraction: of the peak, at the end.
        cooldown_fraction: of the run, at the end; "wsd" only.

    Raises:
        UserError: the steps do not fit together, or a value is out of range.
    """

    kind: ScheduleKind = _KEYS.schedule
    peak: Positive = _KEYS.learning_rate
    warmup_steps: Index = 0
    total_steps: Count = 1000
    final_fraction: Fraction = _KEYS.final_fraction
    cooldown_fraction: ProperFraction = _KEYS.cooldown_fraction

    def __post_init__(self) -> None:
        """Raise `UserError` for a schedule that cannot be."""
        check_ranges(self)
        if self.kind in {"cosine", "linear", "wsd"} and self.warmup_steps > self.total_steps:
            raise UserError(
                f"a {self.kind} schedule needs warmup_steps <= total_steps, found warmup_steps={self.warmup_steps}, "
                f"total_steps={self.total_steps}"
            )
        if self.kind == "wsd" and self.warmup_steps + self._cooldown > self.total_steps:
            raise UserError(
                f"a wsd schedule needs warm-up and cool-down to fit into the run, found {self.warmup_steps} and "
                f"{self._cooldown} of {self.total_steps} steps; lower warmup_steps or cooldown_fraction, or train "
                "longer"
            )

    def rate(self, step: int) -> float:
        """Return the rate of a step (0-based index since the start of the run), rounded to float32.

        Computed in float64, so all machines agree on the float32.
        """
        warm = max(1, self.warmup_steps)
        rise = min(1.0, (step + 1) / warm)
        match self.kind:
            case "constant":
                fraction = rise
            case "inverse-sqrt":
                fraction = min((step + 1) / warm, math.sqrt(warm / (step + 1)))
            case "cosine":
                swing = 0.5 * (1.0 + math.cos(math.pi * self._progress(step, self.warmup_steps)))
                fraction = rise * (self.final_fraction + (1.0 - self.final_fraction) * swing)
            case "linear" | "wsd":
                first = self.warmup_steps if self.kind == "linear" else self.total_steps - self._cooldown
                fraction = rise * (1.0 - (1.0 - self.final_fraction) * self._progress(step, first))
        return float(np.float32(self.peak * fraction))

    @property
    def _cooldown(self) -> int:
        return round(self.cooldown_fraction * self.total_steps)

    def _progress(self, step: int, first: int) -> float:
        """How much of the way from step `first` to the end of the run has been gone, in [0, 1]."""
        return min(1.0, max(0.0, (step - first) / max(1, self.total_steps - first)))
