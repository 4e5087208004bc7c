"""A residual convolutional network for images, in the pre-activation order (He et al. 2016, arXiv:1603.05027).

Group normalisation (Wu and He 2018, arXiv:1803.08494) in place of batch normalisation: there is no state beside the
parameters, and an example's result does not depend on the batch. A batch is `images` and `labels`, columns of the data.

Shapes are written with B = batch, S = pixels of a side, V = classes; images are [B, rows, columns, channels].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.models.initial import Draw, Params, draw, normal, ones, zeros
from planetary.models.layers import cross_entropy
from planetary.models.model_options import configure, refuse_tokens, require_counts, require_multiple

NORM_EPSILON = 1e-5


class ConvNetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and of one batch. Stage i has `width · 2^i` channels at `image_size / 2^i` pixels."""

    n_stage: int = 3
    n_block: int = 2  # residual blocks of a stage
    width: int = 64
    n_group: int = 8  # channel groups in each normalisation
    image_size: int = 32
    n_channel: int = 3
    n_class: int = 10
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `UserError` where the sizes do not fit together."""
        require_counts("convnet", self)
        require_multiple("convnet", self, "width", "n_group")
        if self.image_size % 2 ** (self.n_stage - 1):
            raise UserError(
                f"convnet: image_size must be a multiple of 2^(n_stage - 1), found image_size={self.image_size}, "
                f"n_stage={self.n_stage}"
            )


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "n_stage": 2,
        "n_block": 1,
        "width": 4,
        "n_group": 2,
        "image_size": 8,
        "n_class": 5,
        "batch_size": 2,
    },
    "default": {},
}


def parameters(config: ConvNetConfig) -> Params:
    """Return the initial distributions: He et al. 2015, arXiv:1502.01852, eq. 10; each block's last kernel is 0."""

    def kernel(size: int, inputs: int, outputs: int) -> Draw:
        return normal(size, size, inputs, outputs, deviation=(2.0 / (size * size * inputs)) ** 0.5)

    def norm(channels: int) -> Params:
        return {"weight": ones(channels), "bias": zeros(channels)}

    def block(inputs: int, outputs: int) -> Params:
        made = {
            "norm1": norm(inputs),
            "conv1": kernel(3, inputs, outputs),
            "norm2": norm(outputs),
            "conv2": zeros(3, 3, outputs, outputs),
        }
        return made if inputs == outputs else made | {"shortcut": kernel(1, inputs, outputs)}

    stages, channels = [], config.width
    for stage in range(config.n_stage):
        outputs = config.width * 2**stage
        stages.append([block(channels if i == 0 else outputs, outputs) for i in range(config.n_block)])
        channels = outputs
    return {
        "stem": kernel(3, config.n_channel, config.width),
        "stages": stages,
        "norm": norm(channels),
        "head": {"weight": zeros(channels, config.n_class), "bias": zeros(config.n_class)},
    }


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution of `x` [B, rows, columns, in] with `kernel` [k, k, in, out], padded to S / stride pixels."""
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def group_norm(params: Params, x: jax.Array, groups: int) -> jax.Array:
    """Mean 0 and variance 1 over all pixels and the channels of one group, then `weight` and `bias`."""
    batch, rows, columns, channels = x.shape
    grouped = x.reshape(batch, rows, columns, groups, channels // groups)
    centred = grouped - jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(centred * centred, axis=(1, 2, 4), keepdims=True)
    return (centred * jax.lax.rsqrt(variance + NORM_EPSILON)).reshape(x.shape) * params["weight"] + params["bias"]


def residual(params: Params, x: jax.Array, stride: int, groups: int) -> jax.Array:
    """One block; with `stride` 2 it halves the pixels."""
    active = jax.nn.relu(group_norm(params["norm1"], x, groups))
    skipped = convolve(active, params["shortcut"], stride) if "shortcut" in params else x
    hidden = convolve(active, params["conv1"], stride)
    return skipped + convolve(jax.nn.relu(group_norm(params["norm2"], hidden, groups)), params["conv2"])


def apply(params: Params, images: jax.Array, config: ConvNetConfig) -> jax.Array:
    """Return class logits [B, V] for `images` f32 [B, S, S, channels]."""
    x = convolve(images, params["stem"])
    for i, stage in enumerate(params["stages"]):
        for j, block in enumerate(stage):
            x = residual(block, x, 2 if i > 0 and j == 0 else 1, config.n_group)
    pooled = jnp.mean(jax.nn.relu(group_norm(params["norm"], x, config.n_group)), axis=(1, 2))
    return pooled @ params["head"]["weight"] + params["head"]["bias"]


def loss_fn(params: Params, images: jax.Array, labels: jax.Array, *, config: ConvNetConfig) -> jax.Array:
    """Return the mean cross-entropy in nats of `labels` i32 [B] given `images` f32 [B, S, S, channels]."""
    return cross_entropy(apply(params, images, config), labels)


def logits(params: Params, images: jax.Array, **options: Any) -> jax.Array:
    """Return `apply(params, images)` for the model that `build(**options)` makes."""
    return apply(params, images, configure("convnet", ConvNetConfig, options))


def build(**options: Any) -> tuple[Callable[..., jax.Array], Params, tuple[np.ndarray, np.ndarray]]:
    """Return `(loss_fn(params, images, labels), params, (images, labels))` for the options of `ConvNetConfig`."""
    refuse_tokens("convnet", options)
    config = configure("convnet", ConvNetConfig, options)
    side = config.image_size
    images = np.zeros((config.batch_size, side, side, config.n_channel), np.float32)
    labels = np.zeros(config.batch_size, np.int32)
    return functools.partial(loss_fn, config=config), draw(parameters(config), config.seed), (images, labels)
