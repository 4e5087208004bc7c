"""Whether an expert update from elsewhere counts (PARALLAX, 4.12): pure, with the reason in words."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec
import numpy as np

from planetary.core.configuration.ranges import Fraction, Index, NotNegative, Positive, check_ranges
from planetary.core.tensors import Tensors
from planetary.runs.mixture.config import MoeConfig
from planetary.runs.mixture.methods.moments import MomentRule


class Refusal(StrEnum):
    """Why an update does not count; the names of the counters."""

    NONE = "accepted"
    WRONG_OWNER = "owner"
    FUTURE = "future"
    STALE = "stale"
    NOT_FINITE = "not finite"
    NO_GAIN = "no gain"
    TOO_LARGE = "too large"
    SPECTRAL = "spectral"
    MOMENTS = "moments"
    RESIDUAL = "residual"
    FALSE_CLAIM = "false claim"
    HARMFUL = "harmful"
    DISAGREEMENT = "disagreement"
    POOR_SURROGATE = "poor surrogate"


_KEYS = MoeConfig()


class Policy(msgspec.Struct, frozen=True):
    """The limits.

    Attributes:
        window: versions an update may lag behind the expert's.
        norm_ratio: ‖Δ‖ ≤ this times ‖θ‖, over all matrices of the expert together.
        spectral_ratio: largest singular value of each matrix's delta over that of the matrix; 0: not checked.
        need_gain: the worker's proxy must have fallen.
        redundant: part of the updates that two workers make; they must agree.
        audited: part of the updates whose effect is computed again (`audit.py`).
    """

    window: Index = _KEYS.window
    norm_ratio: Positive = _KEYS.norm_ratio
    spectral_ratio: NotNegative = _KEYS.spectral_ratio
    need_gain: bool = True
    redundant: Fraction = _KEYS.redundant
    audited: Fraction = _KEYS.audited

    def __post_init__(self) -> None:
        """Raise `UserError` for limits that nothing could meet."""
        check_ranges(self)


class ExpertState(msgspec.Struct, frozen=True):
    """One expert as the owner holds it: weights by name, version and owner.

    `steps`: optimizer steps behind an update, at most.
    """

    layer: int
    expert: int
    owner: int
    version: int
    weights: Tensors
    steps: int = 1


class Update(msgspec.Struct, frozen=True):
    """A worker's proposal: deltas to add to weights, later moments, and the proxy before and after.

    `residuals`: dropped from the deltas by a lossy form, by weight.
    """

    layer: int
    expert: int
    owner: int
    base_version: int
    deltas: Tensors
    moments: Tensors
    proxy_before: float
    proxy_after: float
    residuals: Tensors = {}


class Verdict(msgspec.Struct, frozen=True):
    """Decision and reason, in words for the journal."""

    refusal: Refusal
    why: str
    norm: float = 0.0

    @property
    def accepted(self) -> bool:
        """Whether the update counts."""
        return self.refusal is Refusal.NONE


def lag_refusal(version: int, base_version: int, window: int) -> Refusal:
    """Return why work made with version `base_version` of experts is of no use at `version`, or `NONE`."""
    if base_version > version:
        return Refusal.FUTURE
    return Refusal.STALE if version - base_version > window else Refusal.NONE


def judge(state: ExpertState, update: Update, policy: Policy, rule: MomentRule) -> Verdict:
    """Return whether an update counts; `rule`: of the moments. Used by `audit.accept_slots`."""
    where = f"layer {state.layer} expert {state.expert}"
    if (update.layer, update.expert, update.owner) != (state.layer, state.expert, state.owner):
        return Verdict(
            Refusal.WRONG_OWNER,
            f"{where} belongs to composer {state.owner}; the update is for layer {update.layer} expert "
            f"{update.expert} of composer {update.owner}",
        )
    late = lag_refusal(state.version, update.base_version, policy.window)
    if late is not Refusal.NONE:
        why = f"{where} is at version {state.version}, the update builds on {update.base_version}"
        return Verdict(late, f"{why}; it may lag behind by {policy.window}")
    numbers = [update.proxy_before, update.proxy_after]
    arrays = [*update.deltas.values(), *update.moments.values(), *update.residuals.values()]
    if not np.isfinite(numbers).all() or not all(np.isfinite(array).all() for array in arrays):
        return Verdict(Refusal.NOT_FINITE, f"{where}: the update contains NaN or infinite numbers")
    impossible = rule.impossible(update.moments, state.weights, state.steps)
    if impossible:
        return Verdict(Refusal.MOMENTS, f"{where}: {impossible}")
    if policy.need_gain and not update.proxy_after < update.proxy_before:
        return Verdict(
            Refusal.NO_GAIN, f"{where}: the proxy went from {update.proxy_before:.3g} to {update.proxy_after:.3g}"
        )
    size = _norm(state.weights)
    norm = _norm(update.deltas)
    if norm > policy.norm_ratio * size:
        return Verdict(Refusal.TOO_LARGE, f"{where}: ‖Δ‖ is {norm:.3g}, ‖θ‖ {size:.3g}", norm)
    if policy.spectral_ratio:
        for name, delta in update.deltas.items():
            largest, whole = (float(np.linalg.norm(m, 2)) for m in (delta, state.weights[name]))
            if largest > policy.spectral_ratio * whole:
                return Verdict(
                    Refusal.SPECTRAL,
                    f"{where}: the delta of {name} has spectral norm {largest:.3g} of {whole:.3g}",
                    norm,
                )
    return Verdict(Refusal.NONE, f"{where}: version {state.version + 1}", norm)


def _norm(tensors: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.sum(np.square(t, dtype=np.float64))) for t in tensors.values())))
