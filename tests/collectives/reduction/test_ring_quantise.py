"""Quantisation: error bounds, no bias, hard inputs."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.collectives.protocol.options import Quantization, QuantizationAlgorithm, ReduceOp
from planetary.collectives.reduction.quantise import BLOCK, check, decode, encode, encoded_bytes
from planetary.core.errors import UserError

BOTH = list(QuantizationAlgorithm)


def there_and_back(values: np.ndarray, bits: int, algorithm: QuantizationAlgorithm) -> np.ndarray:
    data = memoryview(bytearray(encoded_bytes(len(values), bits)))
    encode(values, bits, algorithm, data)
    out = np.empty_like(values)
    decode(data, bits, out)
    return out


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize("count", [0, 1, 2, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
def test_the_error_is_half_a_step_at_most(bits: int, algorithm: QuantizationAlgorithm, count: int) -> None:
    values = np.random.default_rng(1).uniform(-1, 1, count).astype(np.float32)  # uniform: nothing beyond 6 sigma
    found = there_and_back(values, bits, algorithm)
    for start in range(0, count, BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        width = np.ptp(block) if algorithm == "min_max" else 12 * block.std()
        tolerance = 0.5001 * width / (2**bits - 1) + 4e-7
        assert np.abs(found[start : start + BLOCK] - block).max() <= tolerance


@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 0), (-1, 1), (5, 6), (-100, -99)])
def test_rounding_is_unbiased_and_negative_data_keep_resolution(
    algorithm: QuantizationAlgorithm, low: float, high: float
) -> None:
    values = np.random.default_rng(2).uniform(low, high, 200 * BLOCK).astype(np.float32)
    error = there_and_back(values, 8, algorithm).astype(np.float64) - values
    step = (high - low) / 255 * (1.0 if algorithm == "min_max" else 12 / np.sqrt(12))
    assert abs(error.mean()) < step / 300  # truncation would show as half a step
    assert np.sqrt((error**2).mean()) < 1.02 * step / np.sqrt(12)


@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize("value", [0.0, 3.25, -1e-30, 1e30])
def test_a_constant_block_is_exact(algorithm: QuantizationAlgorithm, value: float) -> None:
    values = np.full(BLOCK + 3, value, np.float32)
    np.testing.assert_array_equal(there_and_back(values, 4, algorithm), values)


def test_zero_is_exact_with_zero_point_scale() -> None:
    values = np.random.default_rng(3).normal(0.3, 1, BLOCK).astype(np.float32)
    values[::7] = 0.0
    assert not there_and_back(values, 8, QuantizationAlgorithm.ZERO_POINT_SCALE)[::7].any()


@pytest.mark.parametrize("algorithm", BOTH)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_fault_stays_visible_in_its_block_alone(algorithm: QuantizationAlgorithm, bad: float) -> None:
    values = np.ones(2 * BLOCK, np.float32)
    values[5] = bad
    found = there_and_back(values, 8, algorithm)
    assert np.isnan(found[:BLOCK]).all()
    assert (found[BLOCK:] == 1).all()


@pytest.mark.parametrize("algorithm", list(QuantizationAlgorithm))
@pytest.mark.parametrize("bits", [8, 16])
def test_a_block_may_span_more_than_float32_holds(bits: int, algorithm: QuantizationAlgorithm) -> None:
    top = np.finfo(np.float32).max
    for ends in ([0, top / 3, top * 0.99], [-top, top], [-3e38, 0, 1e30, 3e38], [3e38] * 5 + [-3e38]):
        values = np.array(ends, np.float32)
        wide = values.astype(np.float64)
        span = wide.max() - wide.min() if algorithm is QuantizationAlgorithm.MIN_MAX else 12 * wide.std()
        found = there_and_back(values, bits, algorithm)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found.astype(np.float64), wide, rtol=0, atol=span / (2**bits - 1))


def test_bytes_are_a_quarter_and_an_eighth() -> None:
    assert encoded_bytes(1 << 20, 8) / (4 << 20) < 0.2515
    assert encoded_bytes(1 << 20, 4) / (4 << 20) < 0.1265


@pytest.mark.parametrize(
    ("quantization", "dtype", "op", "text"),
    [
        (Quantization(5), "f32", ReduceOp.SUM, "4, 8 or 16 bits, found 5"),
        (Quantization(8), "i32", ReduceOp.SUM, "integers would lose"),
        (Quantization(8, QuantizationAlgorithm.ZERO_POINT_SCALE), "f32", ReduceOp.MAX, "use MIN_MAX"),
    ],
)
def test_combinations_without_sense_are_errors(quantization: Quantization, dtype: str, op: ReduceOp, text: str) -> None:
    with pytest.raises(UserError, match=text):
        check(quantization, dtype, op)
