from __future__ import annotations

import numpy as np
import pytest

from planetary.core.errors import UserError
from planetary.runs.serve.scheduling.sampling import Candidates, SamplingOptions, choice_seed, draw

ROW = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2], np.float32))
ORDER = np.argsort(-ROW).astype(np.int32)
FOUND = Candidates(ORDER, ROW[ORDER], ROW)


def shares(options: SamplingOptions, count: int = 4000, found: Candidates = FOUND) -> np.ndarray:
    drawn = [draw(found, options, position).token for position in range(count)]
    return np.bincount(drawn, minlength=5) / count


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    np.testing.assert_allclose(shares(SamplingOptions()), np.exp(ROW), atol=0.025)


def test_the_temperature_sharpens() -> None:
    sharp = np.exp(ROW / 0.5)
    np.testing.assert_allclose(shares(SamplingOptions(temperature=0.5)), sharp / sharp.sum(), atol=0.025)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        (SamplingOptions(temperature=0), {1}),
        (SamplingOptions(top_k=1), {1}),
        (SamplingOptions(top_k=2), {1, 3}),
        (SamplingOptions(top_p=0.6), {1, 3}),
        (SamplingOptions(top_p=0.0), {1}),
        (SamplingOptions(min_p=0.45), {1, 3, 4}),
        (SamplingOptions(logit_bias={1: -100, 3: -100}), {0, 2, 4}),
        (SamplingOptions(logit_bias={0: 100}, temperature=0), {0}),
    ],
)
def test_only_these_tokens_can_be_drawn(options: SamplingOptions, allowed: set[int]) -> None:
    assert set(np.flatnonzero(shares(options, 800))) == allowed


def test_the_likeliest_alone_are_enough_where_they_say_so() -> None:
    few = Candidates(ORDER[:3], ROW[ORDER[:3]], None)
    for options in (SamplingOptions(temperature=0), SamplingOptions(top_k=3, temperature=1.3, seed=9)):
        assert not options.needs_row(3)
        assert [draw(few, options, i) for i in range(200)] == [draw(FOUND, options, i) for i in range(200)]
    assert SamplingOptions().needs_row(3)
    assert SamplingOptions(top_k=4).needs_row(3)
    assert SamplingOptions(temperature=0, presence_penalty=0.1).needs_row(3)


def test_a_seed_and_a_position_determine_the_token() -> None:
    options = SamplingOptions(seed=3)
    first = [draw(FOUND, options, i).token for i in range(100)]
    assert first == [draw(FOUND, options, i).token for i in range(100)]
    assert first != [draw(FOUND, SamplingOptions(seed=4), i).token for i in range(100)]


def test_penalties_count_what_was_generated() -> None:
    options = SamplingOptions(temperature=0, frequency_penalty=0.3)
    assert draw(FOUND, options, 0, generated=[1]).token == 1
    assert draw(FOUND, options, 0, generated=[1, 1]).token == 3
    assert draw(FOUND, SamplingOptions(temperature=0, presence_penalty=0.6), 0, generated=[1, 1]).token == 3


def test_the_log_probability_is_the_models_own() -> None:
    drawn = draw(FOUND, SamplingOptions(temperature=0, logit_bias={2: 50.0}), 0)
    assert drawn.token == 2
    assert drawn.logprob == pytest.approx(float(ROW[2]))


def test_tokens_without_text_are_not_drawn() -> None:
    assert set(np.flatnonzero([draw(FOUND, SamplingOptions(), i, most=2).token for i in range(200)])) >= {0}
    assert {draw(FOUND, SamplingOptions(), i, most=2).token for i in range(200)} == {0, 1}


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_p": 1.5}, {"top_k": -2}, {"logit_bias": {1: 101.0}}, {"min_p": 2.0}]
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        SamplingOptions(**wrong)  # type: ignore[arg-type]


def test_choices_of_different_seeds_share_no_noise() -> None:
    """Choice i of seed s is not choice 0 of seed s + i, nor that of any other seed or choice."""
    seeds = [choice_seed(seed, choice) for seed in (*range(1000), 2**63 - 5, 2**63 - 1) for choice in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert not {choice_seed(7, choice) for choice in range(1, 1000)} & set(range(100_000))
