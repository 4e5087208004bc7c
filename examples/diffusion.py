"""A diffusion model of small pictures (Ho et al. 2020, arXiv:2006.11239), and the pictures: discs, squares and crosses.

    planetary train examples/diffusion.toml

A batch is a mapping of images and labels. The noise of each step is drawn from the key of the step, so that a lease
trained again draws the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIDE = 8  # pixels
SHAPES = 3


class Pictures:
    """The data set: `image` ui8 [8, 8] and `label` i32, one of three shapes in any place."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        label, size = index % SHAPES, rng.uniform(1.5, 3)
        row, column = np.indices((SIDE, SIDE)) - rng.uniform(2, SIDE - 3, (2, 1, 1))
        distance = {
            0: np.hypot(row, column),
            1: np.maximum(abs(row), abs(column)),
            2: np.minimum(abs(row), abs(column)) + size - 0.8,
        }[label]
        return {"image": (255 * np.clip(size - distance, 0, 1)).astype(np.uint8), "label": np.int32(label)}


def denoise(params: Any, noisy: jax.Array, label: jax.Array, time: jax.Array) -> jax.Array:
    """Return the noise in `noisy` f32 [B, 64], pictures of shape `label` i32 [B] at `time` f32 [B, 1] from 0 to 1."""
    waves = time * jnp.pi * 2.0 ** jnp.arange(4)
    x = jnp.concatenate([noisy, params["label"][label], jnp.sin(waves), jnp.cos(waves)], axis=1)
    for layer in params["hidden"]:
        x = jax.nn.silu(x @ layer["weight"] + layer["bias"])
    return x @ params["out"]


def build(batch_size: int, width: int = 128, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return the model that planetary trains: `(loss_fn(params, batch, *, key), params, batch)`."""
    keys = jax.random.split(jax.random.key(seed), 4)
    sizes = (SIDE * SIDE + 16 + 8, width, width)

    def dense(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
        return jax.random.normal(key, (inputs, outputs)) * inputs**-0.5

    params = {
        "label": dense(keys[0], SHAPES, 16),
        "hidden": [
            {"weight": dense(key, inputs, outputs), "bias": jnp.zeros(outputs)}
            for key, inputs, outputs in zip(keys[1:], sizes[:-1], sizes[1:], strict=False)
        ],
        "out": dense(keys[3], width, SIDE * SIDE),
    }

    def loss_fn(params: Any, batch: Any, *, key: jax.Array | None = None) -> jax.Array:
        clean = batch["image"].reshape(-1, SIDE * SIDE).astype(jnp.float32) / 127.5 - 1
        of_time, of_noise = jax.random.split(jax.random.key(0) if key is None else key)  # None: an evaluation
        time = jax.random.uniform(of_time, (clean.shape[0], 1))
        noise = jax.random.normal(of_noise, clean.shape)
        noisy = jnp.cos(time * jnp.pi / 2) * clean + jnp.sin(time * jnp.pi / 2) * noise
        return jnp.mean((denoise(params, noisy, batch["label"], time) - noise) ** 2)

    image = np.zeros((batch_size, SIDE, SIDE), np.uint8)
    return loss_fn, params, {"image": image, "label": np.zeros(batch_size, np.int32)}
