"""The bigram model of tokens a trained network has to beat: the next token given the one before it.

Counts are smoothed by interpolation with the unigram model after Witten and Bell (1991, IEEE Transactions on
Information Theory 37(4), method C): the weight of the unigram model behind token a is the share that new
successors had among a's occurrences,

    P(b | a) = (c(a, b) + t(a) · P(b)) / (c(a) + t(a)),    P(b) = (c(b) + 1) / (N + V),

with c(a, b) how often b followed a, t(a) how many different tokens followed a, N all tokens and V the
vocabulary. It has no parameter to tune and is a stronger baseline than adding one to every count.
"""

from __future__ import annotations

import msgspec
import numpy as np

from planetary.core.errors import ResourceError, UserError
from planetary.core.tensors import host_dtype
from planetary.core.token_slice import Slice
from planetary.data.prepared_data import PreparedData
from planetary.data.reader import read_slice, split

LARGEST_VOCABULARY = 4096  # counts are a dense V × V table: 128 MiB at this size
BLOCKS_AT_A_TIME = 1 << 14


class BigramModel(msgspec.Struct, frozen=True):
    """Log probabilities in nats, float64 [V, V]: row = the token before, column = the token itself."""

    log_probability: np.ndarray

    def loss(self, blocks: np.ndarray) -> float:
        """Return the mean of -log P(next | token) in nats over the pairs within each row of `blocks` [n, S +
        1].
        """
        before, after = _pairs(blocks)
        return -float(self.log_probability[before, after].mean())


class BigramBaseline(msgspec.Struct, frozen=True):
    """The baseline's held-out loss in nats per token, or why there is none."""

    loss: float | None
    reason: str = ""


def count_pairs(blocks: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return how often each token follows each other one within the rows of `blocks` [n, S + 1]: int64 [V,
    V].
    """
    before, after = _pairs(blocks)
    pairs = before.astype(np.int64) * vocab_size + after
    return np.bincount(pairs.ravel(), minlength=vocab_size**2).reshape(vocab_size, vocab_size)


def _pairs(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the targets that count, after the token before each: `(before, targets)`."""
    ids, targets = split(blocks)
    before, after = ids[:, :-1], targets[:, 1:]
    return (before, after) if targets is ids else (before[after >= 0], after[after >= 0])


def fit_bigram(counts: np.ndarray) -> BigramModel:
    """Return the smoothed model for pair counts int64 [V, V]; every probability is above zero."""
    vocab_size = counts.shape[0]
    unigram = (counts.sum(axis=0) + 1.0) / (counts.sum() + vocab_size)
    new = np.count_nonzero(counts, axis=1).astype(np.float64)[:, None]
    total = counts.sum(axis=1).astype(np.float64)[:, None]
    seen = total > 0
    mixed = (counts + new * unigram) / np.where(seen, total + new, 1.0)
    return BigramModel(np.log(np.where(seen, mixed, unigram)))


def bigram_baseline(data: PreparedData, held_out: list[tuple[Slice, int]]) -> BigramBaseline:
    """Fit on all training tokens and return the loss on the given held-out slices, in nats per token.

    Args:
        data: prepared data on a local path.
        held_out: the network's evaluation chunks (`PreparedData.eval_chunks`), so the losses compare.
    """
    if data.vocab_size > LARGEST_VOCABULARY:
        return BigramBaseline(
            None,
            f"a table of {data.vocab_size} × {data.vocab_size} pairs is too large "
            f"(limit {LARGEST_VOCABULARY}), and most of it would be empty",
        )
    counts = np.zeros((data.vocab_size, data.vocab_size), np.int64)
    blocks = _map_blocks(data)
    for first in range(0, len(blocks), BLOCKS_AT_A_TIME):
        counts += count_pairs(blocks[first : first + BLOCKS_AT_A_TIME], data.vocab_size)
    held = np.concatenate([read_slice(piece).reshape(-1, data.block_tokens) for piece, _ in held_out])
    return BigramBaseline(fit_bigram(counts).loss(held))


def _map_blocks(data: PreparedData) -> np.ndarray:
    try:
        tokens = np.memmap(data.train.url, host_dtype(data.train.dtype), mode="r")
    except FileNotFoundError:
        raise UserError(f"the prepared training data {data.train.url} is gone; prepare it again") from None
    except OSError as error:
        raise ResourceError(f"reading {data.train.url} failed: {error}") from error
    return tokens.reshape(-1, data.block_tokens)
