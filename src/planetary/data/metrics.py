"""Metrics of held-out tokens: the interface, the built-in ones, and the standard error of any of them. Pure.

A metric turns rows of scored tokens into sums, which are added over all rows, and the sums into one number. So a value
does not depend on how rows are divided into batches and among workers.
"""

from __future__ import annotations

import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np

from planetary.core.errors import UserError
from planetary.core.extension_points import METRICS
from planetary.core.registry import Chosen
from planetary.data.tokenizer import Tokenizer

OWN_SET = "held_out"
"""Name of the held-out part of a run's own data, among sets."""
MOST_GROUPS = 1000
"""Groups of rows for the standard error; with more rows than that a group has several."""


@dataclass(frozen=True)
class ScoredRows:
    """Rows of held-out tokens as a model scores them: R sequences, or, in a run, the share of each worker.

    Attributes:
        nats: float64 [R], the sum of −ln p over the row's targets.
        targets: int64 [R], how many tokens of the row count.
        nbytes: int64 [R], bytes of text that the targets stand for.
        tokens: int64 [R, T], the targets, -100 where one does not count; empty for a metric that reads no logits.
        logits: float32 [R, T, V], the scores of each target's place; empty as `tokens`.
    """

    nats: np.ndarray
    targets: np.ndarray
    nbytes: np.ndarray
    tokens: np.ndarray
    logits: np.ndarray


class Metric(ABC):
    """One figure of held-out tokens.

    Attributes:
        reads_logits: whether `sums` reads `tokens` and `logits`. Workers of a run send losses alone, so only
            `planetary evaluate` computes such a metric.
        reads_bytes: whether it reads `nbytes`, which needs the tokenizer.
    """

    reads_logits: ClassVar[bool] = False
    reads_bytes: ClassVar[bool] = False

    @abstractmethod
    def sums(self, rows: ScoredRows) -> np.ndarray:
        """Return the sums of each row, float64 [R, K] with any K."""

    def value(self, sums: np.ndarray) -> float:
        """Return the figure for sums over all rows, float64 [K]: the ratio of the first two, unless overridden."""
        return float(sums[0] / sums[1])

    @classmethod
    def of_function(cls, function: Callable[[ScoredRows], np.ndarray]) -> type[Metric]:
        """Return the metric of a function from rows to a value for each target, [R, T]: the mean of those that count.

        A function reads logits.
        """

        def sums(self: Metric, rows: ScoredRows) -> np.ndarray:
            values, counts = np.asarray(function(rows), np.float64), rows.tokens >= 0
            if values.shape != counts.shape:
                raise ValueError(f"it returned {list(values.shape)}, expected [R, T] = {list(counts.shape)}")
            return np.stack([np.where(counts, values, 0.0).sum(1), counts.sum(1)], axis=1)

        return type(function.__name__, (cls,), {"reads_logits": True, "sums": sums})


class Loss(Metric):
    """Mean of −ln p of the targets, nats per token: the cross-entropy of the logits."""

    name = "loss"

    def sums(self, rows: ScoredRows) -> np.ndarray:
        """Return nats and targets."""
        return np.stack([rows.nats, rows.targets], axis=1)


class Perplexity(Loss):
    """The exponential of the loss."""

    name = "perplexity"

    def value(self, sums: np.ndarray) -> float:
        """Return e to the loss; infinite beyond the range of a float."""
        return float(np.exp(np.float64(sums[0] / sums[1])))


class BitsPerByte(Metric):
    """Bits for each byte of text, which compares models with different tokenizers.

    Special tokens cost bits and stand for no byte.
    """

    name = "bits_per_byte"
    reads_bytes = True

    def sums(self, rows: ScoredRows) -> np.ndarray:
        """Return bits and bytes."""
        return np.stack([rows.nats / math.log(2), rows.nbytes], axis=1)


class Accuracy(Metric):
    """Part of the targets that are the likeliest token of their place."""

    name = "accuracy"
    reads_logits = True

    def sums(self, rows: ScoredRows) -> np.ndarray:
        """Return right answers and targets; targets of -100 are right nowhere."""
        return np.stack([(rows.logits.argmax(-1) == rows.tokens).sum(1), rows.targets], axis=1).astype(np.float64)


def metrics_of(names: Iterable[str]) -> dict[str, Metric]:
    """Return the objects of metrics by the names that displays have: of `file.py:Name` the last part.

    Raises:
        UserError: there is no such metric, or two have one name.
    """
    found: dict[str, Metric] = {}
    for name in names:
        label = name.rpartition(":")[2]
        if label in found:
            raise UserError(f"metric {name}: there is another {label} already; name each metric once")
        found[label] = METRICS.make(Chosen(name))
    return found


class Measured(msgspec.Struct, frozen=True):
    """The value of a metric.

    Attributes:
        value: over all rows.
        error: standard error of it; None: there is one row only, or the metric has no finite value without some rows.
    """

    value: float
    error: float | None


def row_sums(name: str, metric: Metric, rows: ScoredRows) -> np.ndarray:
    """Return the sums of a metric, float64 [R, K]. Raises `UserError` for a metric that fails, or returns no such."""
    try:
        sums = np.asarray(metric.sums(rows), np.float64)
    except Exception as error:
        raise UserError(f"metric {name} fails: {_said(error)}") from error
    if sums.ndim != 2 or len(sums) != len(rows.targets):
        wanted = f"[{len(rows.targets)}, K]: one row of sums for each row"
        raise UserError(f"metric {name}: sums() returned an array {list(sums.shape)}, expected {wanted}")
    return sums


def measured(name: str, metric: Metric, sums: np.ndarray) -> Measured:
    """Return value and standard error of a metric.

    The error is the jackknife's over rows, whose tokens depend on each other (Efron and Stein 1981, Annals of
    Statistics 9): √((n − 1) / n Σ (θ₋ᵢ − θ̄)²), with θ₋ᵢ the value without row i. For a mean of equal rows it is the
    usual one, s / √n.

    Args:
        name: of the metric, for error texts.
        metric: whose sums they are.
        sums: of all rows, float64 [n, K].

    Raises:
        UserError: the metric fails, or its value is no finite number.
    """
    total = sums.sum(0)
    value = _value(name, metric, total)
    if not math.isfinite(value):
        raise UserError(f"metric {name}: the value is {value}, of the sums {total.tolist()}")
    groups = np.add.reduceat(sums, np.unique(np.linspace(0, len(sums), MOST_GROUPS, endpoint=False).astype(int)))
    if len(groups) < 2:
        return Measured(value, None)
    without = np.array([_value(name, metric, total - one) for one in groups])
    spread = math.sqrt((len(groups) - 1) / len(groups) * float(np.square(without - without.mean()).sum()))
    return Measured(value, spread if math.isfinite(spread) else None)


def _value(name: str, metric: Metric, sums: np.ndarray) -> float:
    try:
        with np.errstate(all="ignore"):  # a value that is not finite is told by name
            return float(metric.value(sums))
    except Exception as error:
        raise UserError(f"metric {name} fails: {_said(error)}") from error


def _said(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def bytes_of_tokens(tokenizer: Tokenizer, vocabulary: int) -> np.ndarray:
    """Return how many bytes of text each token stands for, int64 [vocabulary]; 0 for special tokens."""
    special = set(tokenizer.special)
    known = min(vocabulary, tokenizer.vocab_size)
    found = [0 if token in special else len(tokenizer.token_bytes(token)) for token in range(known)]
    return np.array([*found, *[0] * (vocabulary - known)], np.int64)
