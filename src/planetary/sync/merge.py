"""Merge rules: one contribution from several workers' end parameters, for one outer step.

A rule sees the contributions three times. First as a table of inner products of their deltas, from which it may choose
other weights than the tokens give; then tensor by tensor, in the same way; then coordinate by coordinate. Every rule
returns a single contribution bit for bit.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from planetary.core.configuration.needs import Declares, Need
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.core.extension_points import MERGE_RULES
from planetary.core.registry import Chosen
from planetary.sync.deltas import Table
from planetary.sync.radial import radial_coefficients, takes_mean

TableOf = Callable[[], Table]
"""Makes the table of inner products, for rules that need it."""

ProductsOf = Callable[[], np.ndarray]
"""Makes the inner products of one tensor's deltas, float64 [n, n], for rules that need them."""

CLIPPING_STEPS = 5  # steps of `CentredClipping`; the weights have settled to three digits by then


class MergeRule(ABC):
    """How end parameters become one set of parameters. A class is made with the keys of `[outer]` that it declares.

    `merge` is all that a rule needs: weights are shares of the tokens then, in every tensor.

    Attributes:
        keys: of `[outer]`, the class's arguments; kept as attributes of these names.
        in_ring: whether workers of a ring can merge so, who see sums only.
        own_part: whether a worker knows its own delta's part of the result before it has the others'.
        radial: whether the result is radial-directional averaging, of which sums and own parts have forms of their own.
        needs: of the configuration.
        place: the pinned name by which the class was found; "": its own name.
    """

    keys: ClassVar[tuple[str, ...]] = ()
    in_ring: ClassVar[bool] = False
    own_part: ClassVar[bool] = False
    radial: ClassVar[bool] = False
    needs: ClassVar[tuple[Need, ...]] = ()
    place: str = ""

    @staticmethod
    def objection(config: Config) -> str:
        """Return why values of the configuration do not suit the rule, naming the key; "" where they do."""
        return ""

    @property
    def chosen(self) -> Chosen:
        """The rule as it travels."""
        return Chosen(self.place or vars(type(self))["name"], {key: getattr(self, key) for key in self.keys})

    @property
    def averaging(self) -> MergeRule:
        """The rule for tensors whose values are averaged rather than trained, given the same weights."""
        return self

    def weights(self, table: TableOf, shares: Sequence[float]) -> Sequence[float]:
        """Return the weight of each contribution, given the share of the tokens; both sum to 1, in task order."""
        return shares

    def coefficients(self, name: str, products: ProductsOf, weights: Sequence[float]) -> Sequence[float]:
        """Return the coefficient of each delta in the merged delta of the tensor `name`, given `weights`."""
        return weights

    @abstractmethod
    def merge(self, values: Sequence[np.ndarray], coefficients: Sequence[float], start: np.ndarray) -> np.ndarray:
        """Return one block of the merged parameters: float64 [size].

        Args:
            values: that block of each contribution, float64 [size]; may be overwritten.
            coefficients: of the tensor, as `coefficients` gave them.
            start: that block at the start of the round, float64 [size].
        """


_NO_SPARSE = Need(
    "sync.compression", "most numbers of most workers are 0, and so would be the result", lacking="sparse"
)
_ENDS_ARE_SUMMED = Need(
    "sync.precision",
    "that precision sums end parameters, whose directions are not known",
    among=("f32",),
    when={"sync.topology": Declares("in_ring")},
)


class Mean(MergeRule):
    """The mean, weighted by tokens (DiLoCo, arXiv:2311.08105, algorithm 1). A single liar moves it without bound."""

    name, in_ring, own_part = "mean", True, True

    def merge(self, values: Sequence[np.ndarray], coefficients: Sequence[float], start: np.ndarray) -> np.ndarray:
        """The fold starts from the first product and not from zero, so one contribution (weight 1) comes back with all
        bits, the sign of a zero included.
        """
        total = None
        for block, coefficient in zip(values, coefficients, strict=True):
            product = np.multiply(block, coefficient, out=block)
            if total is None:
                total = product
            else:
                total += product
        assert total is not None
        return total


class Radial(MergeRule):
    """Radial-directional averaging (`sync.radial`): deltas keep their mean length.

    Embeddings and output head take the mean. A single liar moves it without bound, as the mean.
    """

    name, in_ring, own_part, radial = "rda", True, True, True
    needs = (_ENDS_ARE_SUMMED,)

    @property
    def averaging(self) -> MergeRule:
        return Mean()

    def coefficients(self, name: str, products: ProductsOf, weights: Sequence[float]) -> Sequence[float]:
        return weights if len(weights) == 1 or takes_mean(name) else radial_coefficients(products(), weights)

    def merge(self, values: Sequence[np.ndarray], coefficients: Sequence[float], start: np.ndarray) -> np.ndarray:
        """θ₀ − Σ c Δ, written as (1 − Σ c) θ₀ + Σ c θ."""
        merged = Mean().merge(values, coefficients, start)
        # Not `sum`: its rounding depends on the version of Python.
        return merged if len(values) == 1 else merged + (1.0 - math.fsum(coefficients)) * start


class Senders(MergeRule):
    """The mean of each coordinate over the workers that sent it (SparseLoCo, arXiv:2508.15706, algorithm 1).

    Workers that send few numbers choose different ones; dividing by all of them would shrink the update of one.
    """

    name = "senders"

    @property
    def averaging(self) -> MergeRule:
        return Mean()

    def merge(self, values: Sequence[np.ndarray], coefficients: Sequence[float], start: np.ndarray) -> np.ndarray:
        if len(values) == 1:
            return values[0]
        total, weight = np.zeros_like(start), np.zeros_like(start)
        for end, coefficient in zip(values, coefficients, strict=True):
            delta = start - end
            total += coefficient * delta
            weight += coefficient * (delta != 0)
        return start - np.divide(total, weight, out=np.zeros_like(start), where=weight > 0)


class Median(MergeRule):
    """The median of each coordinate (Yin et al. 2018, arXiv:1803.01498, definition 1). Tokens do not count."""

    name, needs = "median", (_NO_SPARSE,)

    def merge(self, values: Sequence[np.ndarray], coefficients: Sequence[float], start: np.ndarray) -> np.ndarray:
        return _mean_of_middle(values, (len(values) - 1) // 2)


class TrimmedMean(MergeRule):
    """The mean of each coordinate without the extremes (Yin et al. 2018, arXiv:1803.01498, definition 2)."""

    name, keys, needs = "trimmed_mean", ("trimmed",), (_NO_SPARSE,)

    def __init__(self, trimmed: float) -> None:
        """`trimmed`: the part of the contributions left out at each end, rounded down; in [0, 0.5)."""
        if not 0 <= trimmed < 0.5:
            raise UserError(
                f"a trimmed mean leaves out a part of at least 0 and less than 0.5 at each end, not {trimmed}"
            )
        self.trimmed = trimmed

    def merge(self, values: Sequence[np.ndarray], coefficients: Sequence[float], start: np.ndarray) -> np.ndarray:
        """Tokens do not count: which contribution is left out differs by coordinate."""
        return _mean_of_middle(values, int(self.trimmed * len(values)))


class CentredClipping(MergeRule):
    """The mean of deltas that are pulled towards a centre (Karimireddy et al. 2021, arXiv:2012.10333, equation 2).

    v ← v + Σ wᵢ (dᵢ − v) min(1, τ / ‖dᵢ − v‖)

    The paper starts from the mean of the round before and asks for τ. Here v starts at the contribution whose median
    distance to the others is least, and τ is the median distance to v: no constant has to be known. As v stays a
    combination of the deltas with coefficients of sum 1, the table of inner products suffices.
    """

    name = "centred_clipping"

    def weights(self, table: TableOf, shares: Sequence[float]) -> Sequence[float]:
        gram, by_tokens = np.array(table().products), np.array(shares)
        coefficients = np.zeros(len(shares))
        coefficients[int(np.argmin(np.median(_distances(gram, np.eye(len(shares))), axis=0)))] = 1.0
        for _ in range(CLIPPING_STEPS):
            far = _distances(gram, coefficients[None, :])[0]
            radius = float(np.median(far))
            clipped = by_tokens * np.divide(radius, far, out=np.ones_like(far), where=far > radius)
            coefficients = (1.0 - clipped.sum()) * coefficients + clipped
        return [float(value) for value in coefficients]

    def merge(self, values: Sequence[np.ndarray], coefficients: Sequence[float], start: np.ndarray) -> np.ndarray:
        return Mean().merge(values, coefficients, start)


def _mean_of_middle(values: Sequence[np.ndarray], left_out: int) -> np.ndarray:
    """Return the mean of each coordinate without the `left_out` smallest and largest values; float64 [size]."""
    ordered = np.sort(np.stack(values), axis=0)[left_out : len(values) - left_out]
    return ordered[0] if len(ordered) == 1 else np.add.reduce(ordered, axis=0) / len(ordered)


def _distances(gram: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the distance of each of the deltas [n] to each of the combinations of them [m, n], as [m, n]."""
    squares = np.einsum("mi,ij,mj->m", points, gram, points)[:, None] - 2 * points @ gram + np.diag(gram)[None, :]
    return np.sqrt(np.maximum(squares, 0.0))


def rule_of(chosen: Chosen) -> MergeRule:
    """Return the merge rule that was chosen. Raises as `Registry.make`."""
    rule = MERGE_RULES.make(chosen)
    rule.place = chosen.name
    return rule
