"""Between a parameter's own element type on the host and the float32 master copy.

numpy has no bfloat16, so one is held as its raw bits in uint16: the upper half of the float32 with the same
value.
"""

from __future__ import annotations

import numpy as np

from planetary.core.errors import UserError

FLOATS = ("f32", "bf16", "f16", "f64")


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """Return the values of bfloat16 `bits` (uint16, any shape) as float32; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 `values` to the nearest bfloat16, ties to even; returns its bits as uint16 of the same
    shape.

    The lower half of the bits is cut off. Adding 0x7FFF, plus one when the kept part is odd, carries
    into the kept part exactly when the cut-off part is above a half, or is a half and the kept part odd; a
    carry out of the largest finite value gives infinity, as IEEE 754 asks. A NaN stays a NaN (quiet, sign
    kept), which the carry alone would not guarantee.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def to_master(dtype: str, values: np.ndarray) -> np.ndarray:
    """Return host values of element type `dtype` as a new float32 array of the same shape.

    Exact for f32, bf16 and f16; f64 is rounded to nearest.

    Raises:
        UserError: `dtype` is no floating-point type that can be trained.
    """
    if dtype == "bf16":
        return bf16_to_f32(values)
    _check_float(dtype)
    return values.astype(np.float32)


def from_master(dtype: str, values: np.ndarray) -> np.ndarray:
    """Round float32 master `values` to the nearest of element type `dtype`, ties to even; f32 is returned as
    it is.

    Raises:
        UserError: `dtype` is no floating-point type that can be trained.
    """
    if dtype == "bf16":
        return f32_to_bf16(values)
    _check_float(dtype)
    return values.astype({"f32": np.float32, "f16": np.float16, "f64": np.float64}[dtype], copy=False)


def in_float32(dtype: str, values: np.ndarray) -> np.ndarray:
    """Return host values of element type `dtype` as float32, as `to_master`, but no copy of those that are.

    Raises:
        UserError: `dtype` is no floating-point type that can be trained.
    """
    return values if dtype == "f32" else to_master(dtype, values)


def to_float64(dtype: str, values: np.ndarray) -> np.ndarray:
    """Return host values of element type `dtype` as float64; exact."""
    if dtype == "bf16":
        values = bf16_to_f32(values)
    return values.astype(np.float64)


def all_finite(dtype: str, values: np.ndarray) -> bool:
    """Whether host values of floating-point element type `dtype` contain neither NaN nor infinity."""
    if dtype == "bf16":
        return not bool(((values & np.uint16(0x7F80)) == np.uint16(0x7F80)).any())
    return bool(np.isfinite(values).all())


def _check_float(dtype: str) -> None:
    if dtype not in FLOATS:
        raise UserError(f"a parameter of element type {dtype} cannot be trained; expected one of {', '.join(FLOATS)}")
