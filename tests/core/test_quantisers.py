"""Error bounds and exact cases of every quantiser; users' formats have tests of their own."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.quantisers import (
    absmax_codes,
    affine_codes,
    affine_is_finite,
    affine_values,
    from_bfloat16,
    pack,
    ternary_codes,
    ternary_scales,
    to_bfloat16,
    unpack,
    weight_codes,
    weight_values,
)


def random_bits(count: int) -> np.ndarray:
    """float32 of random bits: numbers of all sizes, infinities and NaN."""
    return np.random.default_rng(1).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)


def test_bfloat16_is_the_nearest_of_its_neighbours() -> None:
    values = random_bits(100_000)
    bits = to_bfloat16(values)
    assert (np.isnan(from_bfloat16(bits)) == np.isnan(values)).all()
    finite = np.abs(values) < 3e38
    exact, found = values[finite].astype(np.float64), from_bfloat16(bits[finite]).astype(np.float64)
    for step in (-1, 1):
        other = from_bfloat16((bits[finite] + np.uint16(step % 2**16)).astype(np.uint16)).astype(np.float64)
        error = np.abs(other - exact)
        assert not (error < np.abs(found - exact)).any()


def test_bfloat16_ties_go_to_the_even_one() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7F8000], np.uint32).view(np.float32)
    assert to_bfloat16(ties).tolist() == [0x3F80, 0x3F82, 0x7F80]
    out = np.empty(3, np.uint16)
    assert to_bfloat16(ties, out) is out
    assert to_bfloat16(np.float32(1.5)).shape == ()
    assert to_bfloat16(np.full((2, 3), 1.5, np.float32).T).shape == (3, 2)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (3, 5), (2, 3, 4)])
def test_packed_codes_come_back(bits: int, shape: tuple[int, ...]) -> None:
    codes = np.random.default_rng(2).integers(0, 2**bits, shape).astype(np.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (*shape[:-1], -(-shape[-1] * bits // 8))
    np.testing.assert_array_equal(unpack(packed, bits, shape[-1]), codes)


def test_the_first_code_has_the_lowest_bits() -> None:
    assert pack(np.array([1, 2, 3], np.uint8), 4).tolist() == [0x21, 0x03]
    assert pack(np.array([1, 2, 3, 0, 1], np.uint8), 2).tolist() == [0b00111001, 1]


@pytest.mark.parametrize("levels", [7, 127])
def test_absmax_errors_are_half_a_scale_at_most(levels: int) -> None:
    values = np.random.default_rng(3).normal(size=(4, 96)).astype(np.float32)
    values[1, :32] = 0
    codes, scales = absmax_codes(values, 32, levels)
    assert scales[1, 0] == 0
    assert np.abs(codes).max() == levels
    wide = np.repeat(scales, 32, axis=1)
    assert (np.abs(codes * wide - values) <= 0.5001 * wide).all()


def test_peak_codes_have_every_q4_0_block_exactly() -> None:
    """A block whose largest magnitude has the code −8 comes back bit by bit, and lies as in GGUF."""
    rng = np.random.default_rng(6)
    codes = rng.integers(-7, 8, size=(3, 4, 32)).astype(np.int8)
    codes[..., 5] = -8
    scales = rng.normal(size=(3, 4)).astype(np.float16).astype(np.float32)
    values = (codes * scales[..., None]).reshape(3, 128)
    for bits in (4, 8):
        made = weight_codes(values, bits)
        assert made[0].shape == (3, 16 * bits)
        np.testing.assert_allclose(weight_values(*made, bits), values, rtol=0 if bits == 4 else 0.1)
    np.testing.assert_array_equal(weight_codes(values, 4)[1], scales)
    np.testing.assert_array_equal(weight_codes(values, 4)[0][0, :2] & 15, codes[0, 0, :2] & 15)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_affine_errors_are_half_a_step_at_most(bits: int) -> None:
    values = np.random.default_rng(4).normal(size=(6, 50)).astype(np.float32)
    values[5] *= np.float32(3e38) / np.abs(values[5]).max()  # wider than float32 can hold
    heads, codes = affine_codes(values, bits)
    out = np.empty_like(values)
    affine_values(codes.astype(np.uint16), heads, out)
    step = np.abs(heads[:, 1:]).astype(np.float64) * np.where(heads[:, 1:] < 0, 16, 1)
    assert affine_is_finite(heads, bits)
    assert (np.abs(out.astype(np.float64) - values) <= 0.51 * step).all()


def test_centred_steps_have_a_code_for_zero() -> None:
    values = np.random.default_rng(5).normal(1.0, 2.0, size=(3, 500)).astype(np.float32)
    heads, _ = affine_codes(values, 8, centred=True)
    zero = np.rint(-heads[:, :1] / heads[:, 1:])
    out = np.full((3, 1), np.nan, np.float32)
    affine_values(zero.astype(np.uint8), heads, out)
    assert not out.any()


def test_a_block_with_a_nan_stands_for_nan() -> None:
    heads, codes = affine_codes(np.array([[1, np.nan], [1, np.inf], [1, 2]], np.float32), 8)
    out = np.empty((3, 2), np.float32)
    affine_values(codes.astype(np.uint8), heads, out)
    assert np.isnan(out[:2]).all()
    np.testing.assert_array_equal(out[2], [1, 2])
    assert not affine_is_finite(heads, 8)


def test_ternary_codes_are_three() -> None:
    matrices = np.random.default_rng(6).normal(size=(2, 5, 4)).astype(np.float32)
    matrices[1] = 0
    scales = ternary_scales(matrices, np.float32(1e-8))
    np.testing.assert_allclose(scales, [np.abs(matrices[0]).mean(), 1e-8], rtol=1e-6)
    codes = ternary_codes(matrices, scales)
    assert set(codes[0].reshape(-1).tolist()) == {-1.0, 0.0, 1.0}
    assert not codes[1].any()
