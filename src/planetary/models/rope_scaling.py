"""How rotary positions are stretched to longer texts than a model was first trained on, as `transformers` names it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import msgspec


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rope_type"):
    """One way to stretch them."""

    def stretched(self, frequency: jax.Array, base: float) -> jax.Array:
        """Return the frequencies in use, float32, of the original ones, `base` ** (-i / count), in radians a token."""
        raise NotImplementedError

    @property
    def amplitude(self) -> float:
        """By what rotated queries and keys are multiplied."""
        return 1.0


class Llama3Scaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="llama3"):
    """As in Llama 3.1: slow frequencies are divided, fast ones are kept.

    Attributes:
        factor: by which the slow frequencies are divided.
        low_freq_factor: a wave longer than `original_max_position_embeddings` / this is slow.
        high_freq_factor: one shorter than `original_max_position_embeddings` / this keeps its frequency.
        original_max_position_embeddings: length of the texts at first, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def stretched(self, frequency: jax.Array, base: float) -> jax.Array:
        """See `RopeScaling`."""
        waves = self.original_max_position_embeddings * frequency / (2 * math.pi)  # waves in an original text
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency


class LinearScaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """All frequencies are divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def stretched(self, frequency: jax.Array, base: float) -> jax.Array:
        """See `RopeScaling`."""
        return frequency / self.factor


class YarnScaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="yarn"):
    """Frequencies between a fast and a slow one are divided in part, and scores grow (Peng et al. 2023,
    arXiv:2309.00071, sections 3.2 to 3.4).

    Attributes:
        factor: by which slow frequencies are divided.
        original_max_position_embeddings: length of the texts at first, in tokens.
        attention_factor: the amplitude; None: 0.1 ln(factor) + 1.
        beta_fast: a frequency with so many waves in an original text, or more, is kept.
        beta_slow: one with so many, or fewer, is divided.
        truncate: whether the places of these two are rounded to whole channels.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def stretched(self, frequency: jax.Array, base: float) -> jax.Array:
        """See `RopeScaling`."""
        count = frequency.shape[0]

        def place(waves: float) -> float:
            return count * math.log(self.original_max_position_embeddings / (waves * 2 * math.pi)) / math.log(base)

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        high = high + 0.001 if low == high else high
        divided = jnp.clip((jnp.arange(count, dtype=jnp.float32) - low) / (high - low), 0.0, 1.0)
        return divided * frequency / self.factor + (1 - divided) * frequency

    @property
    def amplitude(self) -> float:
        """See `RopeScaling`."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0


AnyScaling = Llama3Scaling | LinearScaling | YarnScaling
