"""Between a parameter's own element type on the host and the float32 master copy.

numpy has no bfloat16, so its bits are held in uint16.
"""

from __future__ import annotations

import numpy as np

from planetary.core.errors import UserError
from planetary.core.quantisers import from_bfloat16, to_bfloat16

FLOATS = ("f32", "bf16", "f16", "f64")


def to_master(dtype: str, values: np.ndarray) -> np.ndarray:
    """Return host values of element type `dtype` as a new float32 array of the same shape.

    Exact for f32, bf16 and f16; f64 is rounded to nearest.

    Raises:
        UserError: `dtype` is no floating-point type that can be trained.
    """
    if dtype == "bf16":
        return from_bfloat16(values)
    _check_float(dtype)
    return values.astype(np.float32)


def from_master(dtype: str, values: np.ndarray) -> np.ndarray:
    """Round float32 master `values` to the nearest of element type `dtype`, ties to even; f32 is returned as
    it is.

    Raises:
        UserError: `dtype` is no floating-point type that can be trained.
    """
    if dtype == "bf16":
        return to_bfloat16(values)
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
        values = from_bfloat16(values)
    return values.astype(np.float64)


def all_finite(dtype: str, values: np.ndarray) -> bool:
    """Whether host values of floating-point element type `dtype` contain neither NaN nor infinity."""
    if dtype == "bf16":
        return not bool(((values & np.uint16(0x7F80)) == np.uint16(0x7F80)).any())
    return bool(np.isfinite(values).all())


def _check_float(dtype: str) -> None:
    if dtype not in FLOATS:
        raise UserError(f"a parameter of element type {dtype} cannot be trained; expected one of {', '.join(FLOATS)}")
