"""Ternary expert weights (BitNet b1.58: Ma et al. 2024, arXiv:2402.17764) and their two-bit form.

A matrix W becomes γ · clip(round(W / γ), −1, 1) with γ = mean |W|. Training keeps the float master and passes the
gradient straight through (`models/latent_moe.py`); checkpoints and messages carry two bits a weight.
"""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core.errors import NumericsError, ProtocolError

_FLOOR = np.float32(1e-8)  # of γ: an all-zero matrix stays zero


class TernaryMatrices(msgspec.Struct, frozen=True):
    """Matrices [..., m, n] in two bits a weight.

    Attributes:
        shape: of the matrices.
        packed: uint8 [..., ceil(m n / 4)], four weights a byte, the first in the lowest bits; weight + 1 is stored.
        scale: float32 [...], γ of each matrix.
    """

    shape: tuple[int, ...]
    packed: np.ndarray
    scale: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return self.packed.nbytes + self.scale.nbytes


def ternary_parts(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the trits int8 [..., m, n] and γ float32 [...] of float matrices [..., m, n]; ties round to even."""
    wide = np.asarray(weights, np.float32)
    if not np.isfinite(wide).all():
        raise NumericsError("cannot make expert weights ternary: they contain NaN or infinite numbers")
    scale = np.maximum(np.mean(np.abs(wide), axis=(-2, -1), dtype=np.float64).astype(np.float32), _FLOOR)
    trits = np.clip(np.rint(wide / scale[..., None, None]), -1, 1).astype(np.int8)
    return trits, scale


def ternary(weights: np.ndarray) -> np.ndarray:
    """Return γ · trits as float32, of the shape of `weights` [..., m, n]."""
    trits, scale = ternary_parts(weights)
    return trits.astype(np.float32) * scale[..., None, None]


def pack_ternary(weights: np.ndarray) -> TernaryMatrices:
    """Return the two-bit form of float matrices [..., m, n]. Unpacking it gives `ternary(weights)` exactly."""
    trits, scale = ternary_parts(weights)
    codes = (trits + 1).astype(np.uint8).reshape(*trits.shape[:-2], -1)
    spare = -codes.shape[-1] % 4
    codes = np.concatenate([codes, np.ones((*codes.shape[:-1], spare), np.uint8)], axis=-1)
    quads = codes.reshape(*codes.shape[:-1], -1, 4)
    packed = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
    return TernaryMatrices(tuple(trits.shape), packed.astype(np.uint8), scale)


def unpack_ternary(stored: TernaryMatrices) -> np.ndarray:
    """Return the float32 matrices; raise `ProtocolError` where a code is none of the three or a size is wrong."""
    size = stored.shape[-2] * stored.shape[-1]
    expected = (*stored.shape[:-2], -(-size // 4))
    if stored.packed.shape != expected or stored.scale.shape != stored.shape[:-2]:
        raise ProtocolError(
            f"ternary weights of shape {stored.shape} need {expected} packed bytes, found {stored.packed.shape}"
        )
    codes = np.stack([stored.packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    codes = codes.reshape(*stored.shape[:-2], -1)[..., :size]
    if (codes == 3).any():
        raise ProtocolError("ternary weights contain the code 3, which means no weight: the bytes are damaged")
    trits = codes.reshape(stored.shape).astype(np.float32) - np.float32(1)
    return trits * stored.scale[..., None, None]
