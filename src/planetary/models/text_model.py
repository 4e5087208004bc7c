"""The functions by which a model of texts is trained, served and exported, made of its options and its forward pass.

A model's module has them under these names, where `model.source = "MODULE:build"` finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax
import msgspec
import numpy as np

from planetary.models.context import PackedText, WholeText
from planetary.models.initial import Params, draw
from planetary.models.layers import cross_entropy
from planetary.models.model_options import configure

ConfigT = TypeVar("ConfigT", bound=Any)


class TextModel(Generic[ConfigT]):
    """A model whose batch is tokens and targets.

    Args:
        name: of the model, in errors.
        config: struct of the options, with `batch_size`, `sequence_length` and `seed`.
        parameters: returns the initial distributions.
        forward: returns next-token logits [B, S, V] of tokens i32 [B, S] where the context wants them.
        sizes: returns the sizes of what a served text leaves behind: `CacheSizes` or `StateSizes`.
        loss: loss of parameters, tokens, targets and `config` where it is more than the cross-entropy.
        read: returns options in today's form.
    """

    def __init__(
        self,
        name: str,
        config: type[ConfigT],
        parameters: Callable[[ConfigT], Params],
        forward: Callable[[Params, jax.Array, ConfigT, Any], jax.Array],
        sizes: Callable[[ConfigT], Any],
        *,
        loss: Callable[..., jax.Array] | None = None,
        read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda options: options,
    ) -> None:
        self._name, self._config, self._read = name, config, read
        self._parameters, self._forward, self._sizes = parameters, forward, sizes
        self._loss = loss or self.loss_fn

    def configure(self, options: Mapping[str, Any]) -> ConfigT:
        """Return the config that options describe. Raises `UserError` with the name of the wrong one."""
        return configure(self._name, self._config, self._read(options))

    def apply(self, params: Params, tokens: jax.Array, config: ConfigT) -> jax.Array:
        """Return next-token logits [B, T, V] for `tokens` i32 [B, T]."""
        return self._forward(params, tokens, config, WholeText(tokens))

    def loss_fn(self, params: Params, tokens: jax.Array, targets: jax.Array, *, config: ConfigT) -> jax.Array:
        """Return the mean cross-entropy in nats of `targets` i32 [B, T] given `tokens` i32 [B, T]."""
        return cross_entropy(self.apply(params, tokens, config), targets)

    def packed_loss_fn(
        self,
        params: Params,
        tokens: jax.Array,
        segment_ids: jax.Array,
        positions: jax.Array,
        targets: jax.Array,
        *,
        config: ConfigT,
    ) -> jax.Array:
        """Return the mean cross-entropy in nats of packed texts, all i32 [B, T], each read without the others."""
        return cross_entropy(self._forward(params, tokens, config, PackedText(segment_ids, positions)), targets)

    def logits(self, params: Params, tokens: jax.Array, **options: Any) -> jax.Array:
        """Return next-token logits [B, T, V] of the model that `build(**options)` makes."""
        return self.apply(params, tokens, self.configure(options))

    def served_sizes(self, **options: Any) -> Any:
        """Return the sizes of what a served text leaves behind, of the model that `build(**options)` makes."""
        return self._sizes(self.configure(options))

    def decode(self, params: Params, tokens: jax.Array, context: Any, **options: Any) -> jax.Array:
        """Return the logits that a context wants, of the model that `build(**options)` makes."""
        return self._forward(params, tokens, self.configure(options), context)

    def all_options(self, **options: Any) -> dict[str, Any]:
        """Return the options with those that are not given, as `build(**options)` takes them."""
        return msgspec.to_builtins(self.configure(options))

    def build(self, **options: Any) -> tuple[Callable[..., jax.Array], Params, tuple[np.ndarray, ...]]:
        """Return `(loss_fn(params, tokens, targets), params, (tokens, targets))` for the options.

        With the option `segments`, of models that have it, the loss is `packed_loss_fn`.
        """
        config = self.configure(options)
        example = np.zeros((config.batch_size, config.sequence_length), np.int32)
        loss, arrays = (self.packed_loss_fn, 4) if getattr(config, "segments", False) else (self._loss, 2)
        return functools.partial(loss, config=config), draw(self._parameters(config), config.seed), (example,) * arrays
