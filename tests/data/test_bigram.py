from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from planetary.core.config import apply_overrides
from planetary.core.configuration.schema import Config
from planetary.core.errors import UserError
from planetary.data.bigram import LARGEST_VOCABULARY, bigram_baseline, count_pairs, fit_bigram
from planetary.data.prepare import prepare
from planetary.data.prepared_data import PreparedData


def test_pairs_are_counted_within_rows_only() -> None:
    counts = count_pairs(np.array([[0, 1, 1], [2, 0, 1]], np.uint8), 3)
    assert counts.tolist() == [[0, 2, 0], [0, 1, 0], [1, 0, 0]]


def test_probabilities_follow_the_formula_and_sum_to_one() -> None:
    counts = np.array([[0, 2, 0], [0, 1, 0], [1, 0, 0]])
    probability = np.exp(fit_bigram(counts).log_probability)
    np.testing.assert_allclose(probability.sum(axis=1), 1.0)
    unigram = np.array([2, 4, 1]) / 7
    np.testing.assert_allclose(probability[0], (np.array([0, 2, 0]) + 1 * unigram) / 3)
    unseen = np.exp(fit_bigram(np.array([[3, 0], [0, 0]])).log_probability)
    np.testing.assert_allclose(unseen[1], [4 / 5, 1 / 5])  # nothing follows token 1: the unigram model


def test_markov_entropy_is_found_and_add_one_beaten() -> None:
    rng = np.random.default_rng(0)
    vocabulary = 64
    chain = rng.dirichlet(np.full(vocabulary, 0.05), size=vocabulary)
    cumulative = chain.cumsum(axis=1)

    def walk(rows: int) -> np.ndarray:
        out = np.zeros((rows, 9), np.int64)
        out[:, 0] = rng.integers(0, vocabulary, rows)
        for t in range(1, 9):
            out[:, t] = np.minimum((cumulative[out[:, t - 1]] < rng.random((rows, 1))).sum(axis=1), vocabulary - 1)
        return out

    train, held = walk(3000), walk(3000)
    counts = count_pairs(train, vocabulary)
    loss = fit_bigram(counts).loss(held)
    truth = -np.log(chain[held[:, :-1], held[:, 1:]]).mean()
    add_one = -np.log(((counts + 1) / (counts.sum(1, keepdims=True) + vocabulary))[held[:, :-1], held[:, 1:]]).mean()
    assert truth < loss < truth + 0.08
    assert loss < add_one


def prepared(tmp_path: Path, text: bytes) -> tuple[Config, PreparedData]:
    (tmp_path / "t.txt").write_bytes(text)
    config = apply_overrides(
        Config(),
        [
            f"data.source={tmp_path}/t.txt",
            "train.inner_steps=2",
            "train.batch_size=2",
            "train.sequence_length=7",
            "eval.batches=2",
            "optimizer.warmup_steps=1",
        ],
    )
    return config, prepare(config, tmp_path / "cache")


def test_a_text_of_certainties_costs_almost_nothing(tmp_path: Path) -> None:
    config, data = prepared(tmp_path, b"ab" * 4000)
    baseline = bigram_baseline(data, data.eval_chunks(config))
    assert baseline.loss is not None
    assert 0 < baseline.loss < 0.01
    assert baseline.reason == ""


def test_random_bytes_cost_the_logarithm_of_their_number(tmp_path: Path) -> None:
    text = bytes(np.random.default_rng(1).choice(np.frombuffer(b"abcd", np.uint8), 20_000))
    config, data = prepared(tmp_path, text)
    loss = bigram_baseline(data, data.eval_chunks(config, 1)).loss
    assert loss == pytest.approx(np.log(4), abs=0.05)
    assert loss == pytest.approx(bigram_baseline(data, data.eval_chunks(config)).loss)


def test_large_vocabularies_are_skipped_with_a_reason(tmp_path: Path) -> None:
    config, data = prepared(tmp_path, b"ab" * 4000)
    large = msgspec.structs.replace(data, vocab_size=LARGEST_VOCABULARY + 1)
    baseline = bigram_baseline(large, data.eval_chunks(config))
    assert baseline.loss is None
    assert "4097 × 4097 pairs is too large" in baseline.reason


def test_data_that_is_gone_is_named(tmp_path: Path) -> None:
    config, data = prepared(tmp_path, b"ab" * 4000)
    Path(data.train.url).unlink()
    with pytest.raises(UserError, match="is gone; prepare it again"):
        bigram_baseline(data, data.eval_chunks(config))
