"""How far two executions of one training step may be apart."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from planetary.core.quantisers import from_bfloat16
from planetary.core.step import StepSpec

CHANGE_TOLERANCE = 2e-3
"""Largest accepted error of a tensor's change, relative to the largest change in that tensor.

Two compilers add the same float32 terms in different orders. Over the depth of a transformer that leaves
about 1e-5 (measured: under 3e-5 for the default model); a hundred times as much still catches every wrong
term, sign or index, which are errors of the order of one.
"""

ROUNDING = {"f64": 2.0**-52, "f32": 2.0**-23, "bf16": 2.0**-8, "f16": 2.0**-10}
ROUNDINGS = 4  # accepted on top, in units of the largest value: storing the result rounds it
LOSS_TOLERANCE = 1e-4  # relative; a loss is a mean over thousands of terms

FACTOR_ROUNDINGS = 4
"""Where factors are rounded to 16 bits, accepted errors are at least so many roundings of a factor, and the loss's an
eighth of one: a float32 factor with another last bit may be rounded to the other neighbour (measured: a change off by
0.7 roundings, for bf16).
"""

NOISE_FACTOR = 4.0
"""Accepted errors are at least so many times the measured noise, of 16-bit arithmetic or of float32: two
executions that round in different places are up to two noises apart, and the noise is the largest of one sample."""
MOST_NOISE = 0.25
"""But no more than this share of a tensor's change or of the loss: else a wrong gradient would pass for rounded."""

SCALARS = ("loss", "eval_loss", "grad_norm")
"""Results of a trial beside tensors, in the order in which a worst one is named."""


def worst_of(errors: Mapping[str, float]) -> tuple[str, float]:
    """Return the largest error and the tensor's name."""
    return max(errors.items(), key=lambda item: item[1])


class Accepted(msgspec.Struct, frozen=True):
    """Tolerance of one result: largest error of an element, and how many elements may exceed it."""

    error: float
    spared: int = 0


def accepted_of(
    spec: StepSpec,
    before: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    factor_rounding: float = ROUNDING["f32"],
    *,
    noise: Mapping[str, float] | None = None,
) -> dict[str, Accepted]:
    """Return, by name, the accepted error of all results.

    Where an update is a sign (Lion), an argument near zero has either sign: as large a share of a tensor's elements as
    is accepted for changes is spared there. The momentum, from which the next sign is taken, is compared in full.

    Args:
        spec: signature of the step.
        before: parameters and optimizer state the step was given.
        expected: results of the reference.
        factor_rounding: relative spacing of the factors of the model's contractions.
        noise: by name, the measured change from rounding; default: none.
    """
    noise = noise or {}
    change_tolerance = max(CHANGE_TOLERANCE, FACTOR_ROUNDINGS * factor_rounding)
    loss_tolerance = max(LOSS_TOLERANCE, factor_rounding / 8)
    accepted: dict[str, Accepted] = {}
    for name in SCALARS:
        tolerance = loss_tolerance if name != "grad_norm" else change_tolerance
        size = float(np.abs(expected[name]))
        accepted[name] = Accepted(max(tolerance * size, _accepted_noise(noise, name, size)))
    moved_by_sign = {t.name.removeprefix("lion.mean.") for t in spec.opt_state if t.name.startswith("lion.mean.")}
    for tensor in (*spec.params, *spec.opt_state):
        want = as_float(expected[tensor.name], tensor.dtype)
        change = change_of(spec, tensor.name, before, expected)
        rounding = ROUNDINGS * ROUNDING.get(tensor.dtype, 0.0) * np.max(np.abs(want), initial=0.0)
        spared = int(change_tolerance * want.size) if tensor.name.removeprefix("average.") in moved_by_sign else 0
        error = max(change_tolerance * change, _accepted_noise(noise, tensor.name, change))
        accepted[tensor.name] = Accepted(error + float(rounding), spared)
    return accepted


def change_of(spec: StepSpec, name: str, before: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Return the largest change of a tensor, or the size of a scalar of a trial."""
    if name in SCALARS:
        return float(np.abs(expected[name]))
    dtype = next(tensor.dtype for tensor in (*spec.params, *spec.opt_state) if tensor.name == name)
    want, old = as_float(expected[name], dtype), as_float(before[name], dtype)
    return float(np.max(np.abs(want - old), initial=0.0))


def errors_of(
    spec: StepSpec,
    before: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    factor_rounding: float = ROUNDING["f32"],
    *,
    noise: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return, by name, the errors of all results as fractions of the errors that `accepted_of` returns; see `error_of`.

    `found` are the results of the artifact; the other arguments are those of `accepted_of`.
    """
    accepted = accepted_of(spec, before, expected, factor_rounding, noise=noise)
    errors = {name: error_of(expected[name], found[name], accepted[name]) for name in SCALARS}
    for tensor in (*spec.params, *spec.opt_state):
        want = as_float(expected[tensor.name], tensor.dtype)
        have = as_float(found[tensor.name], tensor.dtype)
        errors[tensor.name] = error_of(want, have, accepted[tensor.name])
    return errors


def noise_between(
    spec: StepSpec, rounded: Mapping[str, np.ndarray], wide: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Return, by name, the largest distance between the results of a step and of the same step without rounding."""
    kinds = {tensor.name: tensor.dtype for tensor in (*spec.params, *spec.opt_state)}
    found = {}
    for name, values in rounded.items():
        dtype = kinds.get(name, "f32")
        distance = np.abs(np.asarray(as_float(values, dtype) - as_float(wide[name], dtype), np.float64))
        found[name] = float(np.max(distance, initial=0.0))
    return found


def _accepted_noise(noise: Mapping[str, float], name: str, change: float) -> float:
    return min(NOISE_FACTOR * noise.get(name, 0.0), MOST_NOISE * change)


def error_of(want: np.ndarray, have: np.ndarray, accepted: Accepted) -> float:
    """Return the largest difference, except for `accepted.spared` elements, as a fraction of `accepted.error`.

    A non-finite result counts as infinitely wrong unless the reference has the same one in the same place.
    """
    if np.array_equal(want, have, equal_nan=True):
        return 0.0
    differences = np.abs(np.asarray(want, np.float64) - np.asarray(have, np.float64)).reshape(-1)
    if not np.all(np.isfinite(differences)) or accepted.error <= 0 or not np.isfinite(accepted.error):
        return float("inf")
    spared = min(accepted.spared, differences.size - 1)
    largest = np.max(differences) if spared == 0 else np.partition(differences, -1 - spared)[-1 - spared]
    return float(largest) / accepted.error


def as_float(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return the numbers a host array stands for; the array itself where they are the same."""
    if dtype == "bf16":
        return from_bfloat16(array)
    return array if dtype == "f64" else array.astype(np.float32 if dtype in ROUNDING else np.int64, copy=False)
