"""Metrics of held-out tokens: values, standard errors, and metrics that misbehave."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from planetary.core.errors import UserError
from planetary.core.extension_points import METRICS
from planetary.core.registry import Chosen
from planetary.data.evaluation_sets import cut_into_rows
from planetary.data.metrics import Metric, ScoredRows, bytes_of_tokens, measured, row_sums
from planetary.data.tokenizer import ByteTokenizer, CharTokenizer


def scored(seed: int = 0, rows: int = 7, length: int = 5, vocabulary: int = 11) -> ScoredRows:
    """Return random logits, and targets of which about a third do not count."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, length, vocabulary)).astype(np.float32)
    tokens = np.where(rng.random((rows, length)) < 0.3, -100, rng.integers(0, vocabulary, (rows, length)))
    tokens[:, 0] = 1
    logps = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    nats = -np.take_along_axis(logps, np.maximum(tokens, 0)[..., None], -1)[..., 0]
    counts = tokens >= 0
    return ScoredRows(np.where(counts, nats, 0).sum(1), counts.sum(1), 3 * counts.sum(1), tokens, logits)


def value_of(name: str, rows: ScoredRows) -> float:
    metric = METRICS.make(Chosen(name))
    return measured(name, metric, row_sums(name, metric, rows)).value


def test_built_in_metrics_have_their_definitions() -> None:
    rows = scored()
    loss = rows.nats.sum() / rows.targets.sum()
    right = [int(row.argmax()) == token for row, token in each_target(rows)]
    assert value_of("loss", rows) == pytest.approx(loss)
    assert value_of("perplexity", rows) == pytest.approx(math.exp(loss))
    assert value_of("bits_per_byte", rows) == pytest.approx(loss / math.log(2) / 3)
    assert value_of("accuracy", rows) == pytest.approx(np.mean(right))


def each_target(rows: ScoredRows) -> list[tuple[np.ndarray, int]]:
    places = np.argwhere(rows.tokens >= 0)
    return [(rows.logits[r, t], int(rows.tokens[r, t])) for r, t in places]


def test_error_of_a_mean_of_equal_rows_is_the_usual_one() -> None:
    rng = np.random.default_rng(3)
    nats, targets = rng.gamma(3.0, size=40) * 8, np.full(40, 8)
    found = measured("loss", METRICS.make(Chosen("loss")), np.stack([nats, targets], axis=1))
    assert found.error == pytest.approx(np.std(nats / 8, ddof=1) / math.sqrt(40))


def test_error_covers_the_spread_of_repeated_samples() -> None:
    """Perplexity is no mean; its error is that of as many fresh samples, within a few percent."""
    rng, metric = np.random.default_rng(5), METRICS.make(Chosen("perplexity"))
    found = [measured("p", metric, np.stack([rng.gamma(2.0, size=200), np.ones(200)], axis=1)) for _ in range(300)]
    spread = np.std([one.value for one in found])
    assert np.mean([one.error for one in found if one.error]) == pytest.approx(spread, rel=0.15)


def test_one_row_has_no_error() -> None:
    metric = METRICS.make(Chosen("loss"))
    assert measured("loss", metric, np.array([[3.0, 2.0]])).error is None


def test_value_does_not_depend_on_batches() -> None:
    rows, metric = scored(rows=6), METRICS.make(Chosen("accuracy"))
    parts = [
        ScoredRows(*(getattr(rows, name)[cut] for name in ("nats", "targets", "nbytes", "tokens", "logits")))
        for cut in (slice(0, 1), slice(1, 6))
    ]
    whole = row_sums("accuracy", metric, rows)
    np.testing.assert_array_equal(whole, np.concatenate([row_sums("accuracy", metric, part) for part in parts]))


def test_a_function_is_averaged_over_targets() -> None:
    def margin(rows: ScoredRows) -> np.ndarray:
        return rows.logits.max(-1)

    rows, metric = scored(), Metric.of_function(margin)()
    expected = np.mean([row.max() for row, _ in each_target(rows)])
    assert measured("margin", metric, row_sums("margin", metric, rows)).value == pytest.approx(expected)


class Misbehaving(Metric):
    def __init__(self, sums: Any, value: Any = 1.0) -> None:
        self.found, self.result = sums, value

    def sums(self, rows: ScoredRows) -> np.ndarray:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def value(self, sums: np.ndarray) -> float:
        return self.result


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (Misbehaving(KeyError("logit")), r"metric mine fails: KeyError: 'logit' \(.*test_metrics.py:\d+\)"),
        (Misbehaving(np.zeros(7)), r"metric mine: sums\(\) returned an array \[7\], expected \[7, K\]"),
        (Misbehaving(np.zeros((3, 2))), r"an array \[3, 2\], expected \[7, K\]: one row of sums for each row"),
        (Misbehaving(np.zeros((7, 1)), float("nan")), r"metric mine: the value is nan, of the sums \[0.0\]"),
        (Misbehaving(np.zeros((7, 1)), "many"), "metric mine fails: ValueError: could not convert"),
        (Metric.of_function(lambda rows: rows.logits)(), r"it returned \[7, 5, 11\], expected \[R, T\] = \[7, 5\]"),
    ],
)
def test_a_bad_metric_is_told_by_name_and_line(metric: Metric, words: str) -> None:
    with pytest.raises(UserError, match=words):
        measured("mine", metric, row_sums("mine", metric, scored()))


def test_bytes_of_characters_are_those_of_utf8() -> None:
    tokenizer = CharTokenizer("aé€")
    assert bytes_of_tokens(tokenizer, 4).tolist() == [1, 2, 3, 0]
    assert bytes_of_tokens(ByteTokenizer(), 256).tolist() == [0] + [1] * 255


def test_rows_keep_every_target_once() -> None:
    rows = cut_into_rows(np.arange(1, 12), 3)
    assert rows.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, -1]]
    assert cut_into_rows(np.array([1, ~2, ~3, ~4, 5, 6]), 3).tolist() == [[5, 6, -1, -1]]
