"""How the syncer merges what composers publish (PARALLAX, 4.4; radial-directional averaging of Decoupled DiLoCo).

With the pseudo-gradients Δ_m = θ_prev − θ_m and weights w_m = tokens · tokens / steps, each tensor's merged
pseudo-gradient has the mean length and the mean direction:

    RDA = (Σ w ‖Δ‖ / Σ w) · φ(Σ w φ(Δ) / Σ w),   φ(x) = x / ‖x‖

A plain mean of M directions that differ is shorter than each of them. Two exceptions take the plain mean: directions
that cancel, whose mean says nothing, and tensors like embeddings, whose rows only some composers touched.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from planetary.core.configuration.schema import MoeConfig
from planetary.core.errors import LocalProtocolError, NumericsError
from planetary.core.tensors import Tensors

EMBEDDING_LIKE = ("*embedding*", "*wte*", "*wpe*")


class Published(msgspec.Struct, frozen=True):
    """One composer's parameters at a synchronisation.

    Attributes:
        composer: its number; the order of the sum, so that results do not depend on the order of arrival.
        tensors: float32 by name.
        tokens: trained since the last synchronisation.
        steps: taken since then.
    """

    composer: int
    tensors: Tensors
    tokens: int
    steps: int

    @property
    def weight(self) -> float:
        """Tokens · tokens / steps."""
        return self.tokens * self.tokens / self.steps


_KEYS = MoeConfig()


class MergeRule(msgspec.Struct, frozen=True):
    """How deltas become one.

    Attributes:
        radial: radial-directional; False: weighted mean throughout.
        mean_for: name patterns that take the weighted mean all the same.
        cancelled: directions cancel when their weighted mean is shorter than this (1: all equal).
        rate, momentum: of the outer Nesterov step.
    """

    radial: bool = _KEYS.radial
    mean_for: tuple[str, ...] = EMBEDDING_LIKE
    cancelled: float = 0.05
    rate: float = _KEYS.outer_rate
    momentum: float = _KEYS.outer_momentum


def merged_delta(deltas: Sequence[np.ndarray], weights: Sequence[float], *, cancelled: float = 0.05) -> np.ndarray:
    """Return the radial-directional average of float64 arrays of one shape; see the file's docstring.

    Deltas of length 0 count in the mean length and have no direction.
    """
    total = float(sum(weights))
    norms = [float(np.sqrt(np.sum(delta * delta))) for delta in deltas]
    direction = np.zeros_like(deltas[0])
    moving = 0.0
    for delta, weight, norm in zip(deltas, weights, norms, strict=True):
        if norm > 0:
            direction += (weight / norm) * delta
            moving += weight
    length = float(np.sqrt(np.sum(direction * direction)))
    if moving == 0 or length < cancelled * moving:
        return weighted_mean(deltas, weights)
    radius = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / total
    return direction * (radius / length)


def weighted_mean(arrays: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return Σ w x / Σ w in float64; a single array comes back with all its bits."""
    total = float(sum(weights))
    result = arrays[0].astype(np.float64) * (weights[0] / total)
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        result += array.astype(np.float64) * (weight / total)
    return result


def merge(
    previous: Tensors, velocity: Tensors, published: Sequence[Published], rule: MergeRule | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the tier's parameters after an outer step, and the outer velocity, both float32 by name.

    v ← μ v + Δ, θ ← θ_prev − η (Δ + μ v), as `planetary.diloco.outer`. A composer alone, at rate 1 and without
    momentum, gets its own parameters back bit for bit.

    Args:
        previous: what the composers started from, float32 by name.
        velocity: of the last outer step, float32 by name; not read without momentum.
        published: at least one, each with all of these names.
        rule: default `MergeRule()`.

    Raises:
        LocalProtocolError: nothing was published, a composer twice, or without tokens or steps.
        NumericsError: a result is not finite; the tensor is named.
    """
    rule = rule or MergeRule()
    ordered = sorted(published, key=lambda one: one.composer)
    _check(ordered)
    weights = [one.weight for one in ordered]
    merged: dict[str, np.ndarray] = {}
    speed: dict[str, np.ndarray] = {}
    for name, before in previous.items():
        ends = [np.asarray(one.tensors[name], np.float64) for one in ordered]
        start = before.astype(np.float64)
        if len(ordered) == 1 or not rule.radial or any(fnmatch.fnmatchcase(name, p) for p in rule.mean_for):
            end = weighted_mean(ends, weights)
        else:
            end = start - merged_delta([start - e for e in ends], weights, cancelled=rule.cancelled)
        if rule.momentum:
            new = rule.momentum * velocity[name].astype(np.float64) + (start - end)
            end = (1 - rule.rate) * start + rule.rate * end - rule.rate * rule.momentum * new
            speed[name] = new.astype(np.float32)
        else:
            if rule.rate != 1.0:
                end = (1 - rule.rate) * start + rule.rate * end
            speed[name] = np.zeros(before.shape, np.float32)
        if not np.isfinite(end).all():
            raise NumericsError(f"merging {len(ordered)} composers made {name!r} NaN or infinite")
        merged[name] = end.astype(np.float32)
    return merged, speed


def mean_gradients(gradients: Sequence[Mapping[str, np.ndarray]], tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the token-weighted mean of the composers' gradients by name, float32: what H = 1 averages."""
    if not gradients:
        raise LocalProtocolError("the mean of no gradients does not exist")
    weights = [float(count) for count in tokens]
    return {
        name: weighted_mean([np.asarray(g[name], np.float64) for g in gradients], weights).astype(np.float32)
        for name in gradients[0]
    }


def _check(ordered: Sequence[Published]) -> None:
    if not ordered:
        raise LocalProtocolError("cannot merge a tier: no composer published anything")
    numbers = [one.composer for one in ordered]
    if len(set(numbers)) != len(numbers):
        raise LocalProtocolError(f"cannot merge a tier: a composer published twice ({numbers})")
    for one in ordered:
        if one.tokens < 1 or one.steps < 1:
            raise LocalProtocolError(f"composer {one.composer} published {one.tokens} tokens in {one.steps} steps")
