"""Models of batches other than tokens, as a user's file has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 6


def _dense(seed: int, inputs: int, outputs: int) -> dict[str, Any]:
    weight = np.random.default_rng(seed).standard_normal((inputs, outputs)).astype(np.float32) * inputs**-0.5
    return {"weight": weight, "bias": np.zeros(outputs, np.float32)}


def _apply(params: Any, x: Any) -> Any:
    return x @ params["weight"] + params["bias"]


def regression(batch_size: int) -> tuple[Any, Any, Any]:
    """Weighted least squares: `x` f32 [B, 6], `y` f32 [B], `weight` f32 [B]."""
    params = {"first": _dense(0, WIDTH, 16), "second": _dense(1, 16, 1)}

    def loss_fn(params: Any, x: Any, y: Any, weight: Any) -> Any:
        found = _apply(params["second"], jnp.tanh(_apply(params["first"], x)))[:, 0]
        return jnp.sum(weight * (found - y) ** 2) / jnp.sum(weight)

    one = np.zeros(batch_size, np.float32)
    return loss_fn, params, (np.zeros((batch_size, WIDTH), np.float32), one, one)


def diffusion(batch_size: int) -> tuple[Any, Any, Any]:
    """Noise prediction (Ho et al. 2020, arXiv:2006.11239) on `{"image": ui8 [B, 4, 4], "label": i32 [B]}`."""
    params = {"label": 0.1 * np.random.default_rng(2).standard_normal((3, 16)).astype(np.float32)}
    params |= {"first": _dense(3, 16 + 16 + 1, 32), "second": _dense(4, 32, 16)}

    def loss_fn(params: Any, batch: Any, *, key: Any = None) -> Any:
        image = batch["image"].reshape(-1, 16).astype(jnp.float32) / 127.5 - 1
        times, noise = jax.random.split(jax.random.key(0) if key is None else key)
        time = jax.random.uniform(times, (image.shape[0], 1))
        noise = jax.random.normal(noise, image.shape)
        noisy = jnp.cos(time * jnp.pi / 2) * image + jnp.sin(time * jnp.pi / 2) * noise
        inputs = jnp.concatenate([noisy, params["label"][batch["label"]], time], axis=1)
        found = _apply(params["second"], jax.nn.silu(_apply(params["first"], inputs)))
        return jnp.mean((found - noise) ** 2)

    return loss_fn, params, {"image": np.zeros((batch_size, 4, 4), np.uint8), "label": np.zeros(batch_size, np.int32)}


def masked(batch_size: int, length: int = 8, vocabulary: int = 20) -> tuple[Any, Any, Any]:
    """A masked language model: 3 of 20 tokens are drawn from the key, and the loss is of these. `mask`: no padding."""
    rng = np.random.default_rng(5)
    params = {
        "embed": rng.standard_normal((vocabulary + 1, 16)).astype(np.float32) * 0.3,
        "place": rng.standard_normal((length, 16)).astype(np.float32) * 0.3,
        "mix": _dense(6, 16, 16),
    }

    def loss_fn(params: Any, tokens: Any, mask: Any, *, key: Any = None) -> Any:
        hidden = jax.random.bernoulli(jax.random.key(0) if key is None else key, 0.15, tokens.shape) & mask
        x = params["embed"][jnp.where(hidden, vocabulary, tokens)] + params["place"]
        scores = jnp.where(mask[:, None, :], jnp.einsum("btc,bsc->bts", x, x) / 4, -1e30)
        x = x + _apply(params["mix"], jnp.einsum("bts,bsc->btc", jax.nn.softmax(scores), x))
        log_probs = jax.nn.log_softmax(x @ params["embed"].T)
        losses = -jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(hidden, losses, 0)) / jnp.maximum(jnp.sum(hidden), 1)

    tokens = np.zeros((batch_size, length), np.int32)
    return loss_fn, params, (tokens, tokens.astype(bool))


class Points:
    """A map-style data set of `regression`."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        x = rng.standard_normal(WIDTH)
        return {"x": x, "y": np.sin(x).sum(), "weight": rng.uniform(0.5, 1.5)}
