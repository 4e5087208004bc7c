"""The sizes and form of a decoder with Llama's attention, without the model: for a process that only runs a step."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from planetary.core.errors import UserError


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rope_type"):
    """One way to stretch rotary positions."""

    def stretched(self, frequency: Any, base: float) -> Any:
        """Return the frequencies in use, float32, of the original ones, `base` ** (-i / count), in radians a token."""
        raise NotImplementedError

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries and keys."""
        return 1.0

    def positions(self, published: int, texts: int) -> int:
        """Return how long a text may be, in tokens, if `published` is said to be the longest; as vLLM takes it.

        `texts`: length of the texts that the model is built for, in tokens.
        """
        return published

    def in_use(self, texts: int) -> RopeScaling:
        """Return the stretching in a model that is built for texts of this length, in tokens."""
        return self


class Llama3Scaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="llama3"):
    """As in Llama 3.1: slow frequencies are divided, fast ones are kept.

    Attributes:
        factor: by which the slow frequencies are divided.
        low_freq_factor: a wave longer than `original_max_position_embeddings` / this is slow.
        high_freq_factor: one shorter than `original_max_position_embeddings` / this keeps the frequency.
        original_max_position_embeddings: length of the texts at first, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def stretched(self, frequency: Any, base: float) -> Any:
        waves = self.original_max_position_embeddings * frequency / (2 * math.pi)  # waves in an original text
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clip(0.0, 1.0)
        return (1 - kept) * frequency / self.factor + kept * frequency


class LinearScaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="linear"):
    """All frequencies are divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def stretched(self, frequency: Any, base: float) -> Any:
        return frequency / self.factor

    def positions(self, published: int, texts: int) -> int:
        return int(published * self.factor)


class YarnScaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="yarn"):
    """Frequencies between a fast and a slow one are divided in part, and scores grow (Peng et al. 2023,
    arXiv:2309.00071, sections 3.2 to 3.4).

    Attributes:
        factor: by which slow frequencies are divided.
        original_max_position_embeddings: length of the texts at first, in tokens.
        attention_factor: the amplitude; None: 0.1 ln(factor) + 1.
        beta_fast: fewest waves in an original text of a frequency that is kept.
        beta_slow: most waves of a frequency that is divided by the whole factor.
        truncate: whether the places of these two are rounded to whole channels.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def stretched(self, frequency: Any, base: float) -> Any:
        count = frequency.shape[0]

        def place(waves: float) -> float:
            return count * math.log(self.original_max_position_embeddings / (waves * 2 * math.pi)) / math.log(base)

        low, high = place(self.beta_fast), place(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        high = high + 0.001 if low == high else high
        divided = ((np.arange(count, dtype=np.float32) - np.float32(low)) / np.float32(high - low)).clip(0.0, 1.0)
        return frequency * divided / self.factor + frequency * (1 - divided)

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def positions(self, published: int, texts: int) -> int:
        """A folder may say the length with or without the stretching."""
        return max(published, int(self.original_max_position_embeddings * self.factor))


class LongRopeScaling(RopeScaling, frozen=True, forbid_unknown_fields=True, tag="longrope"):
    """Each frequency has divisors of its own (Ding et al. 2024, arXiv:2402.13753), for short and for long texts.

    Published code changes from one to the other as a text grows. A model here has one of them, as in vLLM, by the
    length of the texts it is built for: keys in a cache are turned already.

    Attributes:
        factor: longest text of all divided by the original length; sets the amplitude.
        original_max_position_embeddings: longest text with the short divisors, in tokens.
        short_factor: divisor of each frequency.
        long_factor: divisors of a model that is built for longer texts.
        attention_factor: the amplitude; None: sqrt(1 + ln(factor) / ln(original length)).
    """

    factor: float
    original_max_position_embeddings: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float | None = None

    def positions(self, published: int, texts: int) -> int:
        return published if self._is_long(texts) else min(published, self.original_max_position_embeddings)

    def in_use(self, texts: int) -> RopeScaling:
        return _Divided(self.long_factor if self._is_long(texts) else self.short_factor, self._amplitude)

    def _is_long(self, texts: int) -> bool:
        return texts > self.original_max_position_embeddings

    @property
    def _amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        original = self.original_max_position_embeddings
        return 1.0 if self.factor <= 1 else math.sqrt(1 + math.log(self.factor) / math.log(original))


class _Divided(RopeScaling, frozen=True):
    divisors: tuple[float, ...]
    grown: float

    def stretched(self, frequency: Any, base: float) -> Any:
        if len(self.divisors) != (pairs := frequency.shape[0]):
            raise UserError(
                f"rope_scaling has {len(self.divisors)} numbers in short_factor or long_factor: expected {pairs}, one "
                "a pair of channels"
            )
        return frequency / np.asarray(self.divisors, np.float32)

    @property
    def amplitude(self) -> float:
        return self.grown


AnyScaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling


class RotaryModel(Protocol):
    """The options of a model with rotary positions that concern them."""

    @property
    def n_embd(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def head_size(self) -> int | None: ...
    @property
    def n_position(self) -> int | None: ...
    @property
    def rope_scaling(self) -> AnyScaling | None: ...
    @property
    def sequence_length(self) -> int: ...


def longest_text(config: RotaryModel) -> int | None:
    """Return the longest text a model is meant for, in tokens, with its stretched positions; None: any length."""
    if config.n_position is None:
        return None
    if config.rope_scaling is None:
        return config.n_position
    return config.rope_scaling.positions(config.n_position, config.sequence_length)


def require_heads(model: str, config: RotaryModel) -> None:
    """Raise `UserError` where channels are no pairs, or the batch is longer than the model's positions."""
    if config.head_size is None and config.n_embd % (2 * config.n_head):
        raise UserError(
            f"{model}: n_embd must be a multiple of 2 * n_head, found n_embd={config.n_embd}, n_head={config.n_head}"
        )
    if (config.head_size or 0) % 2:
        raise UserError(f"{model}: head_size must be even, found {config.head_size}")
    longest = longest_text(config)
    if longest is not None and config.sequence_length > longest:
        raise UserError(
            f"{model}: it has n_position={longest} positions (max_position_embeddings in a config.json, with "
            f"its rope_scaling), fewer than sequence_length={config.sequence_length}: lower train.sequence_length"
        )


class DecoderConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a decoder with Llama's attention and of one batch.

    Attributes:
        n_kv_head: heads of keys and values; each serves n_head / n_kv_head queries.
        tie_embeddings: the head is the embedding.
        qkv_bias: queries, keys and values have biases, as in Qwen2 (Yang et al. 2024, arXiv:2407.10671); with
            `output_bias` so has attention's output.
        qk_norm: queries and keys are normalised, each head by itself, as in Qwen3 (Yang et al. 2025, arXiv:2505.09388);
            "all": all heads at once, as in OLMo 2 (OLMo team 2025, arXiv:2501.00656).
        head_size: channels of a head; None: n_embd / n_head.
        n_position: longest text the model is meant for, as it is published with it; None: any length.
        window: how many tokens a query sees, itself included; None: all.
    """

    n_layer: int = 4
    n_head: int = 4
    n_kv_head: int = 2
    n_embd: int = 256
    rope_base: float = 10_000.0
    vocab_size: int = 256
    sequence_length: int = 128
    batch_size: int = 8
    seed: int = 0
    norm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool | Literal["all"] = False
    head_size: int | None = None
    rope_scaling: AnyScaling | None = None
    n_position: int | None = None
    window: int | None = None

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.head_size or self.n_embd // self.n_head

    @property
    def heads(self) -> dict[str, Any]:
        """Arguments of `attention` in every layer."""
        return {
            "n_head": self.n_head,
            "n_kv_head": self.n_kv_head,
            "head_size": self.head_size,
            "rope_base": self.rope_base,
            "rope_scaling": self.rope_scaling and self.rope_scaling.in_use(self.sequence_length),
        }
