"""Four-bit rows, ternary weights and update deltas."""

from __future__ import annotations

import numpy as np
import pytest

from planetary.core.errors import NumericsError, ProtocolError, UserError
from planetary.runs.mixture.methods.codec import (
    GRID,
    FourBitRows,
    block_width,
    decode_rows,
    encode_rows,
    rotate,
    rotate_back,
)
from planetary.runs.mixture.methods.delta import Delta, compress, expand, low_rank
from planetary.runs.mixture.training.participant_states import ternary

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 3, 16, 48, 64, 768, 1000])
def test_the_rotation_is_orthonormal(width: int) -> None:
    padded, block = block_width(width)
    assert padded % block == 0
    rows = normal(5, padded)
    np.testing.assert_allclose(rotate_back(rotate(rows)), rows, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(rotate(rows), axis=1), np.linalg.norm(rows, axis=1), rtol=1e-5)


@pytest.mark.parametrize(("count", "width"), [(0, 32), (1, 32), (7, 32), (7, 48)])
def test_rotation_adds_one_by_one_for_equal_bits(count: int, width: int) -> None:
    """A rotation adds and subtracts one by one so that all machines have the same bits."""
    rows = normal(count, width)
    given = rows.copy()
    expected = rows.reshape(-1, block_width(width)[1]).copy()
    half = 1
    while half < expected.shape[1]:
        before = expected.copy()
        for place in range(expected.shape[1]):
            other = before[:, place ^ half]
            expected[:, place] = other - before[:, place] if place & half else before[:, place] + other
        half *= 2
    expected *= np.float32(expected.shape[1] ** -0.5)
    found = rotate_back(rows)
    assert (np.abs(found) == np.abs(expected.reshape(count, width))).all()  # signs are drawn
    assert (rows == given).all()


def test_grid_is_symmetric_and_a_fixed_point_of_lloyd() -> None:
    assert (-GRID[::-1] == GRID).all()
    sample = np.random.default_rng(1).standard_normal(2_000_000)
    codes = np.searchsorted((GRID[1:] + GRID[:-1]) / 2, sample)
    centres = np.bincount(codes, sample) / np.bincount(codes)
    np.testing.assert_allclose(centres, GRID, atol=0.02)


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
def test_gaussian_rows_lose_about_one_percent_of_their_energy(size: float) -> None:
    rows = normal(400, 64) * np.float32(size)
    found = decode_rows(encode_rows(rows))
    error = np.sum((found.astype(np.float64) - rows) ** 2) / np.sum(rows.astype(np.float64) ** 2)
    assert 0.008 < error < 0.014


def test_a_row_with_one_spike_is_kept_as_well_as_a_gaussian_one() -> None:
    rows = np.zeros((1, 64), np.float32)
    rows[0, 5] = 3.0
    np.testing.assert_allclose(decode_rows(encode_rows(rows)), rows, atol=1e-5)


def test_zero_rows_stay_zero_at_half_a_byte_and_a_scale() -> None:
    """Zero rows come back as zeros and bytes are half a byte a number and a scale."""
    stored = encode_rows(np.zeros((3, 768), np.float32))
    assert (decode_rows(stored) == 0).all()
    assert stored.nbytes == 3 * (768 // 2 + 4)


def test_rows_that_cannot_be_compressed_or_read_are_named() -> None:
    with pytest.raises(NumericsError, match="NaN"):
        encode_rows(np.array([[np.nan, 1.0]], np.float32))
    with pytest.raises(ProtocolError, match="need codes of shape"):
        decode_rows(FourBitRows(64, np.zeros((2, 3), np.uint8), np.zeros(2, np.float32)))
    # Few bytes whose shapes would make a table of all pairs of them.
    with pytest.raises(ProtocolError, match="need codes of shape"):
        decode_rows(FourBitRows(16, np.zeros((60_000, 8), np.uint8), np.zeros((60_000, 1), np.float32)))
    with pytest.raises(ProtocolError, match="need codes of shape"):
        decode_rows(FourBitRows(16, np.zeros((2, 8), np.float32), np.zeros(2, np.float32)))
    with pytest.raises(UserError, match="at least 1"):
        block_width(0)


def test_ternary_is_the_published_formula() -> None:
    weights = normal(3, 7, 5)
    values = ternary(weights)
    for matrix, found in zip(weights, values, strict=True):
        gamma = np.abs(matrix).mean()
        np.testing.assert_allclose(found, gamma * np.clip(np.rint(matrix / gamma), -1, 1), rtol=1e-6)
    assert (ternary(np.zeros((2, 2), np.float32)) == 0).all()
    with pytest.raises(NumericsError):
        ternary(np.full((2, 2), np.inf, np.float32))


@pytest.mark.parametrize("form", ["exact", "bf16", "4bit", "topk"])
def test_error_feedback_delivers_the_whole_sum_of_many_updates(form: str) -> None:
    residual: np.ndarray | None = None
    sent, wanted = np.zeros((6, 32)), np.zeros((6, 32))
    for _ in range(40):
        update = normal(6, 32)
        message, residual = compress(update, residual, form)  # pyright: ignore[reportArgumentType]
        sent += expand(message)
        wanted += update
    assert residual is not None
    np.testing.assert_allclose(sent + residual, wanted, atol=1e-4)
    if form == "exact":
        assert (residual == 0).all()
    else:
        assert np.abs(residual).max() > 0


def test_largest_elements_meet_the_reports_bound() -> None:
    update = normal(20, 50)
    for keep in (0.1, 0.5, 1.0):
        _, residual = compress(update, None, "topk", keep=keep)
        assert np.sum(residual**2) <= (1 - keep) * np.sum(update**2) + 1e-6


def test_low_rank_delta_is_best_and_whole_where_smaller() -> None:
    update = normal(32, 8)
    message, residual = low_rank(update, None, 2)
    values = np.linalg.svd(update, compute_uv=False)
    assert message.nbytes == 4 * 2 * (32 + 8)
    assert np.linalg.norm(residual) == pytest.approx(np.sqrt(np.sum(values[2:] ** 2)), rel=1e-4)
    whole, nothing = low_rank(update, None, 7)  # 7 · 40 ≥ 256
    assert whole.form == "exact"
    assert (expand(whole) == update).all()
    assert (nothing == 0).all()


def test_updates_that_cannot_be_sent_or_read_are_named() -> None:
    with pytest.raises(NumericsError):
        compress(np.array([np.inf], np.float32), None, "bf16")
    with pytest.raises(ProtocolError, match="unknown form"):
        expand(Delta("fancy", (1,), ()))
    with pytest.raises(ProtocolError, match="does not fit"):
        expand(Delta("topk", (2,), (np.array([9], np.uint32), np.array([1], np.float32))))
    with pytest.raises(UserError, match="part of an update"):
        compress(normal(2, 2), None, "topk", keep=0)
