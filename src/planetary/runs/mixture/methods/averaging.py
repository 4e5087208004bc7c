"""How the syncer merges composers' publications (PARALLAX, 4.4).

The pseudo-gradients Δ_m = θ_prev − θ_m, with weights w_m = tokens · tokens / steps, are merged by radial-directional
averaging (`sync.radial`); embeddings, whose rows only some composers touched, by their weighted mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from planetary.core.errors import LocalProtocolError, NumericsError
from planetary.core.tensors import Tensors
from planetary.sync.radial import CANCELLED, radial_average, takes_mean, weighted_mean

EMBEDDING_LIKE = ("*embedding*", "*wte*", "*wpe*")


class PublishedParameters(msgspec.Struct, frozen=True):
    """One composer's parameters at a synchronisation.

    Attributes:
        composer: number; the order of the sum, so results do not depend on the order of arrival.
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


class FragmentMergeRule(msgspec.Struct, frozen=True):
    """How deltas become one.

    Attributes:
        radial: radial-directional; False: weighted mean throughout.
        mean_for: name patterns that take the weighted mean all the same.
        cancelled: directions cancel when their weighted mean is shorter than this (1: all equal).
        rate, momentum: of the outer Nesterov step.
    """

    radial: bool = True
    mean_for: tuple[str, ...] = EMBEDDING_LIKE
    cancelled: float = CANCELLED
    rate: float = 1.0
    momentum: float = 0.0


def merge(
    previous: Tensors,
    velocity: Tensors,
    published: Sequence[PublishedParameters],
    rule: FragmentMergeRule | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the tier's parameters after an outer step, and the outer velocity, both float32 by name.

    v ← μ v + Δ, θ ← θ_prev − η (Δ + μ v), as `planetary.sync.outer`. A composer alone, at rate 1 and without momentum,
    gets the same parameters back bit for bit.

    Args:
        previous: the composers' start, float32 by name.
        velocity: of the last outer step, float32 by name; not read without momentum.
        published: at least one, each with all of these names.
        rule: default `MergeRule()`.

    Raises:
        LocalProtocolError: nothing was published, a composer twice, or without tokens or steps.
        NumericsError: a result is not finite; the tensor is named.
    """
    rule = rule or FragmentMergeRule()
    ordered = sorted(published, key=lambda one: one.composer)
    _check(ordered)
    weights = [one.weight for one in ordered]
    merged: dict[str, np.ndarray] = {}
    speed: dict[str, np.ndarray] = {}
    for name, before in previous.items():
        ends = [np.asarray(one.tensors[name], np.float64) for one in ordered]
        start = before.astype(np.float64)
        if len(ordered) == 1 or not rule.radial or takes_mean(name, rule.mean_for):
            end = weighted_mean(ends, weights)
        else:
            end = start - radial_average([start - e for e in ends], weights, cancelled=rule.cancelled)
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


def _check(ordered: Sequence[PublishedParameters]) -> None:
    if not ordered:
        raise LocalProtocolError("cannot merge a tier: no composer published anything")
    numbers = [one.composer for one in ordered]
    if len(set(numbers)) != len(numbers):
        raise LocalProtocolError(f"cannot merge a tier: a composer published twice ({numbers})")
    for one in ordered:
        if one.tokens < 1 or one.steps < 1:
            raise LocalProtocolError(f"composer {one.composer} published {one.tokens} tokens in {one.steps} steps")
