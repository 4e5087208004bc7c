"""A vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929), an image classifier.

Patches as tokens, a class token, learned positions, pre-norm blocks, GELU. Parameter names and layouts are those of
timm's checkpoints. A batch is `images` and `labels`, columns of the data.

Shapes are written with B = batch, S = pixels of a side, P = pixels of a patch's side, T = 1 + (S / P)²,
C = width, V = classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.models import layers
from planetary.models.initial import Params, draw, normal, ones, zeros
from planetary.models.layers import cross_entropy, layer_norm, linear
from planetary.models.model_options import configure, refuse_tokens, require_counts, require_multiple

NORM_EPSILON = 1e-6


class VitConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch."""

    n_layer: int = 6
    n_head: int = 4
    n_embd: int = 192
    image_size: int = 32  # pixels of a side
    patch_size: int = 4
    n_channel: int = 3
    n_class: int = 10
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_counts("vit", self)
        require_multiple("vit", self, "image_size", "patch_size")
        require_multiple("vit", self, "n_embd", "n_head")


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n_layer": 1,
        "n_head": 2,
        "n_embd": 16,
        "image_size": 8,
        "patch_size": 4,
        "n_class": 5,
        "batch_size": 2,
    },
    "default": {},
    "base": {  # ViT-B/16
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "image_size": 224,
        "patch_size": 16,
        "n_class": 1000,
    },
}


def parameters(config: VitConfig) -> Params:
    """Return the initial distributions: deviation 0.02, biases and the head 0."""
    width, patch = config.n_embd, config.patch_size

    def dense(inputs: int, outputs: int) -> Params:
        return {"weight": normal(outputs, inputs, deviation=0.02), "bias": zeros(outputs)}

    def norm() -> Params:
        return {"weight": ones(width), "bias": zeros(width)}

    block = {
        "norm1": norm(),
        "attn": {"qkv": dense(width, 3 * width), "proj": dense(width, width)},
        "norm2": norm(),
        "mlp": {"fc1": dense(width, 4 * width), "fc2": dense(4 * width, width)},
    }
    length = 1 + (config.image_size // patch) ** 2
    kernel = normal(width, config.n_channel, patch, patch, deviation=0.02)
    return {
        "cls_token": normal(1, 1, width, deviation=0.02),
        "pos_embed": normal(1, length, width, deviation=0.02),
        "patch_embed": {"proj": {"weight": kernel, "bias": zeros(width)}},
        "blocks": [block] * config.n_layer,
        "norm": norm(),
        "head": {"weight": zeros(config.n_class, width), "bias": zeros(config.n_class)},
    }


def patches(images: jax.Array, size: int) -> jax.Array:
    """Cut `images` [B, S, S, channels] into [B, (S / size)², channels · size²], row by row."""
    batch, side, _, channels = images.shape
    count = side // size
    grid = images.reshape(batch, count, size, count, size, channels).transpose(0, 1, 3, 5, 2, 4)
    return grid.reshape(batch, count * count, channels * size * size)


def attention(params: Params, x: jax.Array, n_head: int) -> jax.Array:
    """Self-attention among all positions of `x` [B, T, C]."""
    batch, length, width = x.shape
    parts = jnp.split(linear(params["qkv"], x), 3, axis=-1)
    query, key, value = (part.reshape(batch, length, n_head, width // n_head) for part in parts)
    return linear(params["proj"], layers.attention(query, key, value))


def mlp(params: Params, x: jax.Array) -> jax.Array:
    """Two layers with the exact GELU over `x` [B, T, C]."""
    return linear(params["fc2"], jax.nn.gelu(linear(params["fc1"], x), approximate=False))


def apply(params: Params, images: jax.Array, config: VitConfig) -> jax.Array:
    """Return class logits [B, V] for `images` f32 [B, S, S, channels]."""
    proj = params["patch_embed"]["proj"]
    kernel = {"weight": proj["weight"].reshape(config.n_embd, -1), "bias": proj["bias"]}
    x = linear(kernel, patches(images, config.patch_size))
    first = jnp.broadcast_to(params["cls_token"], (x.shape[0], 1, config.n_embd))
    x = jnp.concatenate([first, x], axis=1) + params["pos_embed"]
    for block in params["blocks"]:
        x = x + attention(block["attn"], layer_norm(block["norm1"], x, NORM_EPSILON), config.n_head)
        x = x + mlp(block["mlp"], layer_norm(block["norm2"], x, NORM_EPSILON))
    return linear(params["head"], layer_norm(params["norm"], x[:, 0], NORM_EPSILON))


def loss_fn(params: Params, images: jax.Array, labels: jax.Array, *, config: VitConfig) -> jax.Array:
    """Return the mean cross-entropy in nats of `labels` i32 [B] given `images` f32 [B, S, S, channels]."""
    return cross_entropy(apply(params, images, config), labels)


def logits(params: Params, images: jax.Array, **options: Any) -> jax.Array:
    """Return `apply(params, images)` for the model that `build(**options)` makes."""
    return apply(params, images, configure("vit", VitConfig, options))


def build(**options: Any) -> tuple[Callable[..., jax.Array], Params, tuple[np.ndarray, np.ndarray]]:
    """Return `(loss_fn(params, images, labels), params, (images, labels))` for the options of `VitConfig`."""
    refuse_tokens("vit", options)
    config = configure("vit", VitConfig, options)
    side = config.image_size
    images = np.zeros((config.batch_size, side, side, config.n_channel), np.float32)
    labels = np.zeros(config.batch_size, np.int32)
    return functools.partial(loss_fn, config=config), draw(parameters(config), config.seed), (images, labels)
