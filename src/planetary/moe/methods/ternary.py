"""Ternary expert weights (BitNet b1.58: Ma et al. 2024, arXiv:2402.17764).

A matrix W becomes γ · clip(round(W / γ), −1, 1) with γ = mean |W|. Training keeps the float master and passes the
gradient straight through (`models/latent_experts.py`): whoever trains experts, saved states and checkpoints have
masters. What a composer gets of experts that are improved elsewhere, and an exported model, have two bits a weight
(`moe/payloads/expert_payloads.py`, `moe/results/merged_export.py`, `artifacts/ternary_matrices.py`).
"""

from __future__ import annotations

import numpy as np

from planetary.core.errors import NumericsError

_FLOOR = np.float32(1e-8)  # of γ: an all-zero matrix stays zero


def ternary(weights: np.ndarray) -> np.ndarray:
    """Return γ · trits as float32, of the shape of the float matrices `weights` [..., m, n]; ties round to even.

    A compiled program adds up γ in another order and may differ from this in its last bit.

    Raises:
        NumericsError: a weight is NaN or infinite.
    """
    wide = np.asarray(weights, np.float32)
    if not np.isfinite(wide).all():
        raise NumericsError("cannot make expert weights ternary: they contain NaN or infinite numbers")
    scale = np.maximum(np.mean(np.abs(wide), axis=(-2, -1), dtype=np.float64).astype(np.float32), _FLOOR)
    trits = np.clip(np.rint(wide / scale[..., None, None]), -1, 1)
    return trits * scale[..., None, None]
