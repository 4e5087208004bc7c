"""Learning-rate schedules as functions that emit IR: inner step index (i32 scalar) to learning rate (f32
scalar).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planetary.compiler import ir, ops
from planetary.compiler.ir import Value
from planetary.core.errors import UserError

Schedule = Callable[[Value], Value]


def constant(rate: float, warmup_steps: int = 0) -> Schedule:
    """Return the schedule that is `rate` after a linear warm-up as in `warmup_cosine`."""
    if not warmup_steps:
        return lambda step: ops.scalar(ir.f32(), rate)
    return lambda step: ops.scale(_warmup(step, warmup_steps), rate)


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> Schedule:
    """Return linear warm-up, then half a cosine down to `final_fraction · peak`, then constant.

    Step s (0-based) of the warm-up has rate `peak · (s + 1) / warmup_steps`: the first step moves, and step
    `warmup_steps - 1` has the peak. The cosine is that of Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5,
    with progress `(s - warmup_steps) / (total_steps - warmup_steps)` clipped to [0, 1].

    Raises:
        UserError: the steps do not fit together.
    """
    _check_steps(warmup_steps, total_steps)

    def rate(step: Value) -> Value:
        progress = _progress(step, warmup_steps, total_steps)
        swing = ops.scale(ops.shift(ops.cosine(ops.scale(progress, math.pi)), 1.0), 0.5)
        fraction = ops.shift(ops.scale(swing, 1.0 - final_fraction), final_fraction)
        return ops.scale(ops.multiply(_warmup(step, warmup_steps), fraction), peak)

    return rate


def warmup_linear(peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> Schedule:
    """Return linear warm-up as in `warmup_cosine`, then a straight line to `final_fraction · peak`, then
    constant.
    """
    _check_steps(warmup_steps, total_steps)

    def rate(step: Value) -> Value:
        progress = _progress(step, warmup_steps, total_steps)
        fraction = ops.shift(ops.scale(progress, final_fraction - 1.0), 1.0)
        return ops.scale(ops.multiply(_warmup(step, warmup_steps), fraction), peak)

    return rate


def warmup_stable_decay(
    peak: float, warmup_steps: int, total_steps: int, final_fraction: float, cooldown_fraction: float
) -> Schedule:
    """Return linear warm-up as in `warmup_cosine`, then `peak`, and over the last `cooldown_fraction` of the
    run a straight line to `final_fraction · peak` (Hu et al. 2024, arXiv:2404.06395, section 4).

    Raises:
        UserError: the steps do not fit together, or the cool-down would start during the warm-up.
    """
    cooldown = round(cooldown_fraction * total_steps)
    _check_steps(warmup_steps, total_steps)
    if warmup_steps + cooldown > total_steps:
        raise UserError(
            f"a wsd schedule needs warm-up and cool-down to fit into the run, found {warmup_steps} and {cooldown} "
            f"of {total_steps} steps; lower warmup_steps or cooldown_fraction, or train longer"
        )

    def rate(step: Value) -> Value:
        progress = _progress(step, total_steps - cooldown, total_steps)
        fraction = ops.shift(ops.scale(progress, final_fraction - 1.0), 1.0)
        return ops.scale(ops.multiply(_warmup(step, warmup_steps), fraction), peak)

    return rate


def inverse_sqrt(peak: float, warmup_steps: int) -> Schedule:
    """Return `peak · min((s + 1) / w, sqrt(w / (s + 1)))` at step s, with w = max(1, `warmup_steps`).

    Linear warm-up, then the inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762, eq. 3,
    scaled so that the highest rate is `peak`).
    """
    warm = float(max(1, warmup_steps))

    def rate(step: Value) -> Value:
        done = ops.shift(ops.convert(step, ir.f32()), 1.0)
        fall = ops.sqrt(ops.divide(ops.full_like(done, warm), done))
        return ops.scale(ops.minimum(ops.scale(done, 1.0 / warm), fall), peak)

    return rate


def _warmup(step: Value, warmup_steps: int) -> Value:
    done = ops.scale(ops.shift(ops.convert(step, ir.f32()), 1.0), 1.0 / max(1, warmup_steps))
    return ops.minimum(done, ops.full_like(done, 1.0))


def _progress(step: Value, warmup_steps: int, total_steps: int) -> Value:
    after = ops.shift(ops.convert(step, ir.f32()), float(-warmup_steps))
    progress = ops.scale(after, 1.0 / max(1, total_steps - warmup_steps))
    return ops.minimum(ops.maximum(progress, ops.full_like(progress, 0.0)), ops.full_like(progress, 1.0))


def _check_steps(warmup_steps: int, total_steps: int) -> None:
    if warmup_steps < 0 or total_steps < 1 or warmup_steps > total_steps:
        raise UserError(
            f"a schedule needs 0 <= warmup_steps <= total_steps and total_steps >= 1, "
            f"found warmup_steps={warmup_steps}, total_steps={total_steps}"
        )
