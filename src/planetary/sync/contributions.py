"""Contributions of workers to a round: their end parameters, and the tokens behind them.

Workers send their parameters after the last inner step, not differences: subtracting in float32 and adding
back would round twice. They are merged in float64 in the order of the task numbers, so the bits do not
depend on the order of arrival. Work goes in blocks, so the temporary memory does not grow with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec
import numpy as np

from planetary.core.configuration.ranges import Weighting
from planetary.core.errors import LocalProtocolError
from planetary.core.tensors import Tensors, TensorSpec, host_dtype
from planetary.sync.bfloat16 import FLOATS, all_finite, to_float64

BLOCK = 1 << 14  # elements at a time: 128 KiB in float64, which stays in a core's cache


class Contribution(msgspec.Struct, frozen=True):
    """The parameters at the end of one trained lease, or how far they had moved from the start."""

    task: int
    tokens: int  # target tokens behind it
    tensors: Tensors  # tensors by parameter name: ends in the parameters' own element types, deltas in float32
    steps: int = 1  # inner steps behind it
    form: Literal["ends", "deltas"] = "ends"

    def ends(self, spec: TensorSpec, block: slice, start: np.ndarray) -> np.ndarray:
        """Return a block of a tensor's end parameters, a new float64 array; `start` is where it began, float64."""
        values = flat(self.tensors[spec.name])[block]
        return to_float64(spec.dtype, values) if self.form == "ends" else start - values.astype(np.float64)

    def delta(self, spec: TensorSpec, block: slice, start: np.ndarray) -> np.ndarray:
        """Return a block of a tensor's delta, a new float64 array; `start` is where it began, float64."""
        values = flat(self.tensors[spec.name])[block]
        return start - to_float64(spec.dtype, values) if self.form == "ends" else values.astype(np.float64)


def check_contribution(specs: Sequence[TensorSpec], tensors: Tensors) -> str:
    """Return why `tensors` cannot be the parameters that `specs` describe, or "" when they can.

    Names, shapes and host types must match, and every number must be finite; the reason names the tensor.
    """
    wanted = {spec.name for spec in specs}
    missing = sorted(wanted - set(tensors))
    if missing:
        return f"tensor {missing[0]!r} is missing ({len(missing)} of {len(wanted)} are)"
    surplus = sorted(set(tensors) - wanted)
    if surplus:
        return f"tensor {surplus[0]!r} is no parameter of the model"
    for spec in specs:
        array = tensors[spec.name]
        if tuple(array.shape) != spec.shape:
            return f"tensor {spec.name!r}: expected shape {list(spec.shape)}, found {list(array.shape)}"
        if array.dtype != host_dtype(spec.dtype):
            return (
                f"tensor {spec.name!r}: expected element type {spec.dtype} ({host_dtype(spec.dtype)} on the "
                f"host), found {array.dtype}"
            )
    for spec in specs:
        if spec.dtype not in FLOATS:
            return f"tensor {spec.name!r}: element type {spec.dtype} cannot be averaged"
        values = flat(tensors[spec.name])
        for block in blocks(values.size):
            if not all_finite(spec.dtype, values[block]):
                return f"tensor {spec.name!r} contains NaN or infinite numbers"
    return ""


def weight_of(contribution: Contribution, weighting: Weighting) -> float:
    """Return the weight of a contribution; see `Weighting`."""
    tokens = contribution.tokens
    return float(tokens) if weighting == "tokens" else tokens * tokens / max(contribution.steps, 1)


def normalised(
    contributions: Sequence[Contribution], weighting: Weighting = "tokens"
) -> list[tuple[float, Contribution]]:
    """Return `(weight, contribution)` in task order; the weights are shares of their sum, as float64.

    Raises:
        LocalProtocolError: there are none, a task counts twice, or one has no tokens.
    """
    if not contributions:
        raise LocalProtocolError("the mean of no contributions does not exist")
    ordered = sorted(contributions, key=lambda contribution: contribution.task)
    for before, after in pairwise(ordered):
        if before.task == after.task:
            raise LocalProtocolError(f"task {before.task} contributed twice")
    for contribution in ordered:
        if contribution.tokens < 1:
            raise LocalProtocolError(f"task {contribution.task} contributed {contribution.tokens} tokens")
    weights = [weight_of(contribution, weighting) for contribution in ordered]
    total = sum(weights)
    return [(weight / total, contribution) for weight, contribution in zip(weights, ordered, strict=True)]


def blocks(size: int) -> Iterator[slice]:
    """Yield slices that cover `range(size)` in blocks of at most `BLOCK`."""
    for start in range(0, size, BLOCK):
        yield slice(start, min(start + BLOCK, size))


def flat(array: np.ndarray) -> np.ndarray:
    """Return an array as one dimension; a copy only where it is not contiguous."""
    return np.ascontiguousarray(array).reshape(-1)


def rebase(version: Tensors, base: Tensors, newest: Tensors) -> dict[str, np.ndarray]:
    """Return a displacement on top of another version: `version` + (`newest` − `base`), in float64, rounded once.

    With θ_b the parameters the displacement begins at, θ the newest ones and P the version a site goes on from, θ' = P
    + (θ − θ_b). In a merge with the site's contribution θ' the delta is then P − θ' = θ_b − θ, as if that had been
    trained from P.

    Args:
        version: float32 masters by name, from which training goes on.
        base: float32, where the displacement begins.
        newest: float32, where it ends.
    """
    moved: dict[str, np.ndarray] = {}
    for name, start in version.items():
        result = np.empty(start.size, np.float32)
        flat, begins, ends = (array.reshape(-1) for array in (start, base[name], newest[name]))
        for block in blocks(start.size):
            result[block] = flat[block].astype(np.float64) + (ends[block].astype(np.float64) - begins[block])
        moved[name] = result.reshape(start.shape)
    return moved


def capped(tokens: Mapping[str, int], most_share: Mapping[str, float]) -> dict[str, int]:
    """Return the weight of each contributor: tokens, or the weight of exactly the largest share.

    Those above their share are lowered until none is; the others' weights among each other stay as their tokens are.
    Where the caps of all contributors sum to less than 1 they cannot all hold, and one that contributes alone has the
    whole weight: then the shares are in proportion to the caps.

    Args:
        tokens: by contributor, each at least 1.
        most_share: in (0, 1], by contributor; those that are missing have 1.
    """
    caps = {name: most_share.get(name, 1.0) for name in tokens}
    if all(count <= caps[name] * sum(tokens.values()) for name, count in tokens.items()):
        return dict(tokens)
    scale = sum(tokens.values())
    if sum(caps.values()) <= 1.0:
        return {name: max(1, round(cap * scale)) for name, cap in caps.items()}
    lowered: set[str] = set()
    while True:
        free = sum(count for name, count in tokens.items() if name not in lowered)
        left = 1.0 - sum(caps[name] for name in lowered)
        kept = tokens.keys() - lowered
        over = {name for name in kept if tokens[name] * left > caps[name] * free * (1 + 1e-12)}
        if not over:
            break
        lowered |= over
    return {name: max(1, int(caps[name] / left * free)) if name in lowered else count for name, count in tokens.items()}
