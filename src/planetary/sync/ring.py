"""The outer step where the workers reduce among themselves: each adds a share, and all compute the same sum.

All parameters travel as one flat array, in the order of their specs. The summands depend on `precision`:

- "f32": Σ wᵢ (θ₀ − θᵢ), the deltas weighted by tokens, each worker's share rounded to float32 once.
- "f64": Σ wᵢ θᵢ, the mean of the end parameters the gateway's outer step forms. Twice the bytes; with two workers the
  same bits as there, since adding two numbers is commutative.

A worker that is alone has the exact float64 mean in both.

With radial-directional averaging (`sync.radial`) the shares are Σ wᵢ φ(θ₀ − θᵢ) per tensor, followed by
Σ wᵢ ‖θ₀ − θᵢ‖ and by Σ wᵢ of the deltas that are not zero. All workers get equal sums, and so equal bits. Where
directions cancel the star takes the weighted mean, which these sums do not give: here the mean of the directions times
the mean length is taken, which is that where all lengths are equal. A single contribution is the exact mean of the end
parameters.

With overlap (the one-step-delayed pipeline of the PCCL report, section 3.3) a contribution was trained from an older
state than the one the step is taken from: round r from version r − 2, while r − 1 was reduced. The summands are always
the deltas, each against the parameters it was trained from, and the step is the usual one with their mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from planetary.core.configuration.ranges import RingPrecision
from planetary.core.tensors import Tensors, TensorSpec
from planetary.sync.bfloat16 import to_float64
from planetary.sync.contributions import Contribution, blocks
from planetary.sync.outer import OuterStep, outer_step_to
from planetary.sync.outer_optimizers import AVERAGING, OuterOptimizer, OuterState
from planetary.sync.radial import CANCELLED, takes_mean

Precision = RingPrecision
Form = Literal["delta", "mean", "directions"]
"""delta: the flat array holds Σ wᵢ (θ₀ − θᵢ); mean: it holds Σ wᵢ θᵢ; directions: as the module says, [parameters +
2 · tensors]."""

VELOCITY = "velocity:"
"""In front of a parameter's name: the tensor with the velocity."""


def form_of(
    precision: Precision, peers: int, *, overlap: bool = False, radial: bool = False, contributions: int = 0
) -> Form:
    """Return the form of the summands, for so many contributions."""
    if radial:
        return "mean" if not overlap and contributions == 1 else "directions"
    return "mean" if not overlap and (precision == "f64" or peers == 1) else "delta"


class HeldContribution(msgspec.Struct, frozen=True):
    """A contribution, and the master parameters it was trained from, float32 by name; of deltas none."""

    contribution: Contribution
    start: Tensors


def share(
    specs: Sequence[TensorSpec],
    own: Sequence[HeldContribution],
    tokens: int,
    form: Form,
    statistics: Collection[str] = (),
) -> np.ndarray:
    """Return this worker's share of the sum: float32 [parameters] for deltas, float64 for the mean.

    Args:
        specs: the parameters' names, element types and shapes.
        own: this worker's contributions; may be empty, and the share is zero then.
        tokens: behind the contributions of all workers.
        form: of the summands.
        statistics: as of `outer_step`; they have no direction.
    """
    size = sum(spec.size for spec in specs)
    tail = 2 * len(specs) if form == "directions" else 0
    out = np.zeros(size + tail, np.float64 if form == "mean" else np.float32)
    ordered = sorted(own, key=lambda held: held.contribution.task)
    start = 0
    for number, spec in enumerate(specs):
        weights = [held.contribution.tokens / tokens for held in ordered]
        if form == "directions" and not takes_mean(spec.name) and spec.name not in statistics:
            lengths = [_length(spec, held) for held in ordered]
            out[size + 2 * number] = sum(w * length for w, length in zip(weights, lengths, strict=True))
            out[size + 2 * number + 1] = sum(w for w, length in zip(weights, lengths, strict=True) if length > 0)
            weights = [w / length if length > 0 else 0.0 for w, length in zip(weights, lengths, strict=True)]
        for block in blocks(spec.size):
            total = None
            for held, weight in zip(ordered, weights, strict=True):
                values = _ends(spec, held, block) if form == "mean" else _delta(spec, held, block)
                values *= weight
                total = values if total is None else total + values
            if total is not None:
                out[start + block.start : start + block.stop] = total
        start += spec.size
    return out


def _ends(spec: TensorSpec, held: HeldContribution, block: slice) -> np.ndarray:
    return to_float64(spec.dtype, np.ascontiguousarray(held.contribution.tensors[spec.name]).reshape(-1)[block])


def _delta(spec: TensorSpec, held: HeldContribution, block: slice) -> np.ndarray:
    if held.contribution.form == "deltas":
        return held.contribution.delta(spec, block, np.empty(0))
    return held.start[spec.name].reshape(-1)[block].astype(np.float64) - _ends(spec, held, block)


def _length(spec: TensorSpec, held: HeldContribution) -> float:
    return sum(float(np.add.reduce(np.square(_delta(spec, held, block)))) for block in blocks(spec.size)) ** 0.5


def eager_start(
    specs: Sequence[TensorSpec],
    params: Tensors,
    own: Sequence[HeldContribution],
    tokens: int,
    rate: float,
    *,
    radial: bool = False,
) -> dict[str, np.ndarray]:
    """Return where a worker begins while the round it contributed to is reduced (arXiv:2502.12996, algorithm 2).

    The paper feeds the outer optimizer with Δ(t−1) + (Δₘ(t) − Δₘ(t−1)) / M: the own fresh delta, the others' stale
    ones. The sum over rounds telescopes, so without momentum a worker stands at the newest shared parameters less the
    own part of the round under way, θ − η Σ w Δ. That needs no further state, and a worker without a contribution
    begins at θ. With momentum only the step of that part itself is taken; the velocity of earlier own deltas is left to
    the aggregate.

    Radial-directional averaging has no part known before the others' deltas. The coefficient of one of M orthogonal
    deltas of equal length and weight is 1 / √M there (`sync.radial`), the root of its share, and deltas of different
    data are nearly orthogonal. The guess moves the start of one lease alone: the delta counts from there, and the next
    start has the aggregate in place of the guess.

    Args:
        specs: the parameters' names, element types and shapes.
        params: the newest shared master parameters, float32 by name.
        own: the worker's contributions to the round under way.
        tokens: behind all contributions to it.
        rate: of `OuterOptimizer.eager_rate`.
        radial: the round is merged by radial-directional averaging, and not by the mean.
    """
    out = {spec.name: params[spec.name].astype(np.float32).reshape(-1) for spec in specs}
    ordered = sorted(own, key=lambda one: one.contribution.task)
    for spec in specs:
        shares = [held.contribution.tokens / tokens for held in ordered]
        if radial and not takes_mean(spec.name):
            shares = [math.sqrt(share) for share in shares]
        for block in blocks(spec.size):
            values = out[spec.name][block].astype(np.float64)
            for held, share in zip(ordered, shares, strict=True):
                values -= rate * share * _delta(spec, held, block)
            out[spec.name][block] = values
    return {spec.name: out[spec.name].reshape(spec.shape) for spec in specs}


def outer_step_of_sum(
    specs: Sequence[TensorSpec],
    state: OuterState,
    summed: tuple[np.ndarray, Form],
    optimizer: OuterOptimizer,
    statistics: Collection[str] = (),
) -> OuterStep:
    """Return the whole state after the outer step from `state`, given the sum over all workers' `share` and the share's
    form.

    See `outer_step`.

    Raises:
        NumericsError: a result is not finite; the tensor is named.
    """
    flat, form = summed
    starts: dict[str, int] = {}
    factors: dict[str, float] = {}
    size, params = 0, sum(spec.size for spec in specs)
    for number, spec in enumerate(specs):
        starts[spec.name] = size
        size += spec.size
        if form == "directions" and not takes_mean(spec.name) and spec.name not in statistics:
            radius, moving = (float(flat[params + 2 * number + place]) for place in (0, 1))
            factors[spec.name] = _factor(flat[size - spec.size : size], radius, moving)

    def mean(spec: TensorSpec, block: slice, before: np.ndarray) -> np.ndarray:
        start = starts[spec.name]
        values = flat[start + block.start : start + block.stop].astype(np.float64)
        if form == "mean":
            return values
        return before - factors.get(spec.name, 1.0) * values

    step = outer_step_to([spec for spec in specs if spec.name not in statistics], state, mean, optimizer)
    averaged = [spec for spec in specs if spec.name in statistics]
    if not averaged:
        return step
    means = outer_step_to(averaged, state, mean, AVERAGING).state.params
    return replace(step, state=state.updated(step.state).updated(OuterState(means, {})))


def _factor(directions: np.ndarray, radius: float, moving: float) -> float:
    """Return the factor that makes a sum of directions as long as the mean length `radius`; see the module."""
    squares = sum(
        float(np.add.reduce(np.square(directions[block].astype(np.float64)))) for block in blocks(directions.size)
    )
    length = squares**0.5
    if length < CANCELLED * moving:
        return radius / moving
    return radius / length if length > 0 else 0.0


def state_specs(specs: Sequence[TensorSpec], optimizer: OuterOptimizer) -> tuple[TensorSpec, ...]:
    """Return name, type and shape of the tensors that `state_tensors` gives for an optimizer."""
    masters = [TensorSpec(spec.name, "f32", spec.shape) for spec in specs]
    velocities = [TensorSpec(VELOCITY + spec.name, "f32", spec.shape) for spec in specs]
    return (*masters, *velocities, *optimizer.moment_specs(specs))


def state_tensors(state: OuterState) -> dict[str, np.ndarray]:
    """Return an outer state as it travels: master parameters, moments, and velocity under other names. No copy."""
    return {**state.params, **{VELOCITY + name: array for name, array in state.velocity.items()}, **state.moments}


def state_of(specs: Sequence[TensorSpec], tensors: Mapping[str, np.ndarray]) -> OuterState:
    """Reverse `state_tensors`. No copy."""
    params = {spec.name: tensors[spec.name] for spec in specs}
    velocity = {spec.name: tensors[VELOCITY + spec.name] for spec in specs}
    others = tensors.keys() - params.keys() - {VELOCITY + name for name in velocity}
    return OuterState(params, velocity, {name: tensors[name] for name in others})


def state_digest(specs: Sequence[TensorSpec], state: OuterState) -> str:
    """Return the digest of an outer state's bits: BLAKE2b with 128 bits, in hex."""
    digest = hashlib.blake2b(digest_size=16)
    tables = [table[spec.name] for table in (state.params, state.velocity) for spec in specs]
    for tensor in (*tables, *(state.moments[name] for name in sorted(state.moments))):
        digest.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def check_state(
    specs: Sequence[TensorSpec], tensors: Mapping[str, np.ndarray], digest: str, optimizer: OuterOptimizer
) -> str:
    """Return why `tensors` are not the outer state of `optimizer` that `digest` names, or "" when they are."""
    wanted = state_specs(specs, optimizer)
    if set(tensors) != {spec.name for spec in wanted}:
        return f"expected {len(wanted)} tensors of an outer state, found {len(tensors)}"
    for spec in wanted:
        array = tensors[spec.name]
        if tuple(array.shape) != spec.shape or array.dtype != np.float32:
            return f"tensor {spec.name!r}: expected float32{list(spec.shape)}, found {array.dtype}{list(array.shape)}"
    found = state_digest(specs, state_of(specs, tensors))
    return "" if found == digest else f"its digest is {found}, expected {digest}"
