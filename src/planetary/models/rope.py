"""Rotary positions (Su et al. 2021, arXiv:2104.09864), plain and stretched."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from planetary.models.decoder_config import RopeScaling


def rotate(
    x: jax.Array, positions: jax.Array, base: float, scaling: RopeScaling | None = None, fraction: float = 1.0
) -> jax.Array:
    """Apply rotary `positions` to the first `fraction` of the channels of `x` [B, S, H, D] (eq. 34).

    Channel i pairs with channel i + R / 2 of the R that turn, as in the published checkpoints.
    """
    turning = int(x.shape[3] * fraction)
    if turning < x.shape[3]:
        turned = rotate(x[..., :turning], positions, base, scaling)
        return jnp.concatenate([turned, x[..., turning:]], axis=-1)
    half = x.shape[3] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        frequency = scaling.stretched(frequency, base)
    angle = positions[..., None] * frequency
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    if scaling is not None and scaling.amplitude != 1.0:
        cos, sin = scaling.amplitude * cos, scaling.amplitude * sin
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
