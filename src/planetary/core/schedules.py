"""Learning-rate schedules: the rate of every inner step, on the host, from the index of the step.

The rate is an argument of the compiled step, so neither the peak nor the length of a run is compiled into it. A run's
`Schedule` is a warm-up and the curve after it, which is an object found by name.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from planetary.core.configuration.needs import Need
from planetary.core.configuration.ranges import Count, Fraction, Index, Positive, ScheduleName, check_ranges
from planetary.core.configuration.schema import OptimizerConfig
from planetary.core.errors import UserError
from planetary.core.extension_points import SCHEDULES
from planetary.core.registry import Chosen

if TYPE_CHECKING:
    from planetary.core.configuration.schema import Config

_KEYS = OptimizerConfig()
COOLDOWN = 0.2
"""Last part of a run in which "wsd" falls (Hu et al. 2024, section 4.3: 10 % suffice in long runs, and 20 % in short
ones)."""


class Curve(ABC):
    """The curve of the learning rate after the warm-up. Called at the gateway and on workers, for every inner step.

    Attributes:
        keys: of `[optimizer]`, the class's arguments; `final_fraction`, or none.
    """

    keys: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[Need, ...]] = ()

    @staticmethod
    def objection(config: Config) -> str:
        """Return why values of the configuration do not suit the curve, naming the key; "" where they do."""
        return ""

    def misfit(self, warmup_steps: int, total_steps: int) -> str:
        """Return why the curve does not fit into a run of so many steps; "" where it does."""
        return ""

    @abstractmethod
    def fraction(self, step: int, warmup_steps: int, total_steps: int) -> float:
        """Return the part of the peak that a step (0-based index in the run) has, apart from the warm-up.

        The result must be a function of the arguments, equal on all machines once it is rounded to float32. A resumed
        run may be longer, and a step may come after `total_steps`.
        """


class Constant(Curve):
    """The peak."""

    name = "constant"

    def fraction(self, step: int, warmup_steps: int, total_steps: int) -> float:
        return 1.0


class InverseSqrt(Curve):
    """sqrt(w / (s + 1)) with w = max(1, `warmup_steps`) (Vaswani et al. 2017, arXiv:1706.03762, eq. 3, scaled so that
    the highest rate is the peak).
    """

    name = "inverse-sqrt"

    def fraction(self, step: int, warmup_steps: int, total_steps: int) -> float:
        return min(1.0, math.sqrt(max(1, warmup_steps) / (step + 1)))


class _Falling(Curve):
    """From the peak down to `final_fraction` of it, by the progress since the step `first`."""

    keys = ("final_fraction",)

    def __init__(self, final_fraction: float) -> None:
        self.final_fraction = final_fraction

    def misfit(self, warmup_steps: int, total_steps: int) -> str:
        if warmup_steps <= total_steps:
            return ""
        return f"needs warmup_steps <= total_steps, found warmup_steps={warmup_steps}, total_steps={total_steps}"

    def fallen(self, part: float) -> float:
        """Return the fraction where a part of the way down has been gone."""
        return 1.0 - (1.0 - self.final_fraction) * part


class Cosine(_Falling):
    """Half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5), with the progress
    `(s - warmup_steps) / (total_steps - warmup_steps)` clipped to [0, 1].
    """

    name = "cosine"

    def fraction(self, step: int, warmup_steps: int, total_steps: int) -> float:
        swing = 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup_steps, total_steps)))
        return self.final_fraction + (1.0 - self.final_fraction) * swing


class Linear(_Falling):
    """A straight line, with the cosine's progress."""

    name = "linear"

    def fraction(self, step: int, warmup_steps: int, total_steps: int) -> float:
        return self.fallen(_progress(step, warmup_steps, total_steps))


class WarmupStableDecay(_Falling):
    """The peak, and over the last `COOLDOWN` of the run a straight line (Hu et al. 2024, arXiv:2404.06395, sec. 4)."""

    name = "wsd"

    def misfit(self, warmup_steps: int, total_steps: int) -> str:
        if super().misfit(warmup_steps, total_steps) or warmup_steps + _cooldown(total_steps) <= total_steps:
            return super().misfit(warmup_steps, total_steps)
        return (
            f"needs warm-up and cool-down to fit into the run, found {warmup_steps} and {_cooldown(total_steps)} of "
            f"{total_steps} steps; lower warmup_steps, or train longer"
        )

    def fraction(self, step: int, warmup_steps: int, total_steps: int) -> float:
        return self.fallen(_progress(step, total_steps - _cooldown(total_steps), total_steps))


def _cooldown(total_steps: int) -> int:
    return round(COOLDOWN * total_steps)


def _progress(step: int, first: int, total_steps: int) -> float:
    """Return how much of the way from step `first` to the end of the run has been gone, in [0, 1]."""
    return min(1.0, max(0.0, (step - first) / max(1, total_steps - first)))


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A learning-rate schedule: linear warm-up to `peak`, then the curve `kind`.

    Step s (0-based) of the warm-up has rate `peak · (s + 1) / warmup_steps`: the first step moves, and step
    `warmup_steps - 1` has the peak.

    Attributes:
        kind: name of the curve; a user's is pinned.
        peak: the highest rate.
        warmup_steps: inner steps of the warm-up.
        total_steps: inner steps of the whole run.
        final_fraction: part of the peak at the end, for curves that have it among their keys.

    Raises:
        UserError: the steps do not fit together, or a value is out of range.
    """

    kind: ScheduleName = _KEYS.schedule
    peak: Positive = _KEYS.learning_rate
    warmup_steps: Index = 0
    total_steps: Count = 1000
    final_fraction: Fraction = _KEYS.final_fraction

    def __post_init__(self) -> None:
        """Check the values; a curve in a user's file may not be loaded yet."""
        check_ranges(self)
        if self.kind in SCHEDULES.built_in:
            self.check()

    def check(self) -> None:
        """Raise `UserError` for a schedule that cannot be. A user's file is run."""
        if misfit := _curve(self.kind, self.final_fraction).misfit(self.warmup_steps, self.total_steps):
            raise UserError(f"a {self.kind} schedule {misfit}")

    def rate(self, step: int) -> float:
        """Return the rate of a step (0-based index since the start of the run), rounded to float32.

        Computed in float64, so all machines agree on the float32.
        """
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        fraction = _curve(self.kind, self.final_fraction).fraction(step, self.warmup_steps, self.total_steps)
        return float(np.float32(self.peak * (rise * fraction)))


@functools.lru_cache(maxsize=64)
def _curve(kind: str, final_fraction: float) -> Curve:
    keys = SCHEDULES.find(kind).keys
    if set(keys) - {"final_fraction"}:
        raise UserError(f"schedule {kind}: expected no keys but final_fraction, found {', '.join(keys)}")
    return SCHEDULES.make(Chosen(kind, dict.fromkeys(keys, final_fraction)))
