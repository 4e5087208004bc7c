"""The arithmetic of a reduction on flat arrays. The same bits on every machine: no fused or reordered operation."""

from __future__ import annotations

import numpy as np

from planetary.collectives.protocol.options import ReduceOp
from planetary.core.quantisers import from_bfloat16, to_bfloat16

_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def combine(op: ReduceOp, dtype: str, own: np.ndarray, other: np.ndarray, out: np.ndarray) -> None:
    """Out ← own ∘ other, elementwise, [n] each; `out` may be `own`.

    16-bit floats are widened to float32 for the operation and rounded to nearest once. Integers wrap. Of NaN and a
    number, MIN and MAX give NaN.
    """
    ufunc = _UFUNCS[op]
    if dtype == "bf16":
        wide = from_bfloat16(own)
        to_bfloat16(ufunc(wide, from_bfloat16(other), out=wide), out)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            ufunc(own, other, out=out)  # numpy computes float16 in float32 and rounds


def finish(op: ReduceOp, dtype: str, values: np.ndarray, world: int) -> None:
    """Turn a sum into the result of `op`: AVG divides by the world size. Integers are truncated toward zero."""
    if op is not ReduceOp.AVG or world == 1:
        return
    if dtype == "bf16":
        to_bfloat16(from_bfloat16(values) / np.float32(world), values)
    elif values.dtype.kind == "f":
        np.divide(values, values.dtype.type(world), out=values)
    elif world > np.iinfo(values.dtype).max:
        values[...] = np.trunc(values / np.float64(world))  # 8 and 16 bit only: a float64 division is exact enough
    elif values.dtype.kind == "u":
        np.floor_divide(values, values.dtype.type(world), out=values)
    else:
        remainder = np.fmod(values, values.dtype.type(world))  # has the sign of the dividend
        np.subtract(values, remainder, out=values)  # exact: no rounding on the way
        np.floor_divide(values, values.dtype.type(world), out=values)
