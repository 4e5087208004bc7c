from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planetary.core.errors import UserError
from planetary.core.quantisers import from_bfloat16, to_bfloat16
from planetary.sync.bfloat16 import from_master, to_float64, to_master


def test_every_bfloat16_survives_the_way_there_and_back() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = from_bfloat16(bits)
    back = to_bfloat16(values)
    nan = np.isnan(values)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert np.isnan(from_bfloat16(back[nan])).all()
    np.testing.assert_array_equal(back[nan] >> 15, bits[nan] >> 15)


def test_rounding_agrees_with_ml_dtypes_next_to_every_boundary() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    near = (upper + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).view(np.float32)
    near = near[np.isfinite(near)]
    with np.errstate(over="ignore"):
        wanted = near.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(to_bfloat16(near), wanted)


@given(st.floats(width=32, allow_nan=False))
def test_rounding_picks_the_nearest(value: float) -> None:
    got = float(from_bfloat16(to_bfloat16(np.array([value], np.float32)))[0])
    if np.isinf(got):
        assert abs(value) >= 3.3961775292304957e38  # halfway between the largest bfloat16 and 2¹²⁸
        return
    bits = int(to_bfloat16(np.array([value], np.float32))[0])
    for neighbour in (bits - 1, bits + 1):
        other = float(from_bfloat16(np.array([neighbour & 0xFFFF], np.uint16))[0])
        if np.isfinite(other):
            assert abs(got - value) <= abs(other - value)


def test_master_conversions() -> None:
    half = np.array([1.5, -2.0], np.float16)
    assert to_master("f16", half).dtype == np.float32
    assert from_master("f16", to_master("f16", half)).tobytes() == half.tobytes()
    single = np.array([1.1], np.float32)
    assert from_master("f32", single) is single
    assert to_master("f32", single) is not single
    assert to_float64("bf16", np.array([0x3F80], np.uint16)).tolist() == [1.0]
    for convert in (to_master, from_master):
        with pytest.raises(UserError, match="i32 cannot be trained"):
            convert("i32", single)
