"""Rounds of drawn deltas, some of them lies: what is refused, and that honest work never is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from planetary.sync.deltas import Table
from planetary.sync.judgement import AcceptAll, Claim, Judgement, judge

SIZE = 4000


def honest(seed: int, count: int, noise: float = 3.0) -> list[np.ndarray]:
    """Deltas of a shared direction, each with noise of its own that is `noise` times as long."""
    random = np.random.default_rng(seed)
    shared = random.standard_normal(SIZE)
    return [shared + noise * random.standard_normal(SIZE) for _ in range(count)]


def judged(
    deltas: Sequence[np.ndarray],
    losses: Sequence[float] | None = None,
    history: Sequence[float] = (),
    *,
    scale: float = 1.0,
    start_norm: float = 1e3,
    shares: Sequence[float] = (),
) -> Judgement:
    stacked = np.stack(deltas)
    gram = stacked @ stacked.T
    table = Table(tuple(range(len(deltas))), tuple(map(tuple, gram.tolist())), start_norm, SIZE)
    reported = losses or [3.0] * len(deltas)
    parts = shares or [1.0] * len(deltas)
    claims = [Claim(task, f"n{task}/0", loss, parts[task]) for task, loss in enumerate(reported)]
    return judge(claims, table, history, scale)


@pytest.mark.parametrize("noise", [0.1, 1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 30])
def test_honest_deltas_count_however_noisy_they_are(count: int, noise: float) -> None:
    for seed in range(10):
        deltas = honest(seed, count, noise)
        found = judged(deltas, history=[float(np.linalg.norm(deltas[0]))])
        assert found.refused == {}
        assert found.length == pytest.approx(np.median([np.linalg.norm(d) for d in deltas]))


def test_a_delta_without_a_step_behind_it_may_have_any_length() -> None:
    deltas = honest(0, 4)
    deltas[3] = 0.0 * deltas[3]
    found = judged(deltas, shares=[1.0, 1.0, 1.0, 0.0])
    assert found.refused == {}
    assert found.length == pytest.approx(np.median([np.linalg.norm(delta) for delta in deltas[:3]]))
    assert judged(deltas).refused


SHARES = [1.0] * 4 + [1 / 30, 0.1, 0.25, 0.5, 2.0, 4.0]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("shares", [SHARES, SHARES[3:8], SHARES[:5], [1 / 30] * 6 + [1.0]])
def test_honest_deltas_of_any_length_count(shares: list[float], power: float) -> None:
    """Honest deltas of any length count however they grow with their steps."""
    for seed in range(10):
        deltas = [share**power * delta for share, delta in zip(shares, honest(seed, len(shares)), strict=True)]
        assert judged(deltas, shares=shares).refused == {}


@pytest.mark.parametrize(("share", "most"), [(0.25, 9.0), (1.0, 4.5), (4.0, 17.0)])
def test_short_delta_may_not_exceed_a_whole_leases_length(share: float, most: float) -> None:
    """A short delta may not be longer than that of a whole lease by more than others."""
    deltas = honest(0, 6)
    found = judged([*deltas[:5], most * deltas[5]], shares=[1.0] * 5 + [share])
    assert list(found.refused) == [5]
    assert "times as long" in found.refused[5]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_many_small_parts_do_not_let_a_whole_delta_be_longer(power: float) -> None:
    shares = [1.0] * 6 + [1 / 30] * 7
    deltas = [share**power * delta for share, delta in zip(shares, honest(1, len(shares)), strict=True)]
    assert judged(deltas, shares=shares).refused == {}
    deltas[5] = 4.5 * deltas[5]
    assert list(judged(deltas, shares=shares).refused) == [5]


LIES = {
    "huge": (lambda d, r: 1e6 * d, "times as long as those of the others"),
    "largest": (lambda d, r: np.full(SIZE, 6e38), "times as long as those of the others"),
    "flipped": (lambda d, r: -d, "cosine"),
    "flipped_10": (lambda d, r: -10 * d, "times as long"),
    "zero": (lambda d, r: 0 * d, "0 times as long"),
    "noise": (lambda d, r: r.standard_normal(SIZE) * np.linalg.norm(d) / SIZE**0.5, "cosine"),
}


@pytest.mark.parametrize("kind", LIES)
def test_three_liars_of_ten_are_refused_and_nobody_else(kind: str) -> None:
    tell, why = LIES[kind]
    for seed in range(10):
        random = np.random.default_rng(seed + 100)
        deltas = honest(seed, 10, noise=1.0)
        for liar in (1, 4, 7):
            deltas[liar] = tell(deltas[liar], random)
        refused = judged(deltas).refused
        assert sorted(refused) == [1, 4, 7]
        assert all(why in reason for reason in refused.values())


def test_the_later_of_two_equal_deltas_is_the_copy() -> None:
    deltas = honest(0, 5)
    deltas[3] = deltas[1].copy()
    found = judged(deltas)
    assert sorted(found.refused) == [3]
    assert "task 1" in found.refused[3]


def test_equal_deltas_are_no_copies_where_all_are_alike() -> None:
    """A round so short, or data so even, that all deltas are equal."""
    deltas = honest(0, 7, noise=0.0)
    assert judged(deltas).refused == {}
    assert sorted(judged([*deltas, *(-delta for delta in deltas[:3])]).refused) == [7, 8, 9]


def test_a_loss_far_from_the_others_is_refused() -> None:
    assert sorted(judged(honest(0, 4), [3.0, 3.1, 9.0, 2.9]).refused) == [2]
    assert sorted(judged(honest(0, 4), [3.0, 3.1, 0.1, 2.9]).refused) == [2]
    assert judged(honest(0, 4), [3.0, 4.5, 2.0, 2.9]).refused == {}


@pytest.mark.parametrize("count", [1, 2])
def test_so_few_are_compared_with_the_rounds_before(count: int) -> None:
    deltas = honest(0, count)
    usual = float(np.linalg.norm(deltas[0]))
    deltas[-1] = 50 * deltas[-1]
    assert judged(deltas, start_norm=1e5).refused == {}  # nothing is known yet, and the start is far longer
    found = judged(deltas, history=[usual, usual])
    assert sorted(found.refused) == [count - 1]
    assert "the rounds before" in found.refused[count - 1]
    assert judged([0.01 * honest(0, 1)[0]], history=[usual]).refused == {}  # what has been learnt gives short deltas


def test_first_lone_delta_is_compared_with_the_parameters() -> None:
    [delta] = honest(0, 1)
    norm = float(np.linalg.norm(delta))
    assert judged([delta], start_norm=norm / 5).refused == {}
    assert sorted(judged([delta], start_norm=norm / 50).refused) == [0]


def test_lengths_go_with_the_learning_rates() -> None:
    """A warm-up's end makes deltas ten times as long, and that is no lie."""
    [delta] = honest(0, 1)
    usual = float(np.linalg.norm(delta))
    assert judged([30 * delta], history=[usual / 0.1], scale=3.0).refused == {}
    assert sorted(judged([30 * delta], history=[usual], scale=1.0).refused) == [0]


def test_rates_of_zero_refuse_nothing() -> None:
    assert judged([np.zeros(SIZE)] * 3, history=[1.0], scale=0.0).refused == {}


def test_measures_are_those_of_the_deltas() -> None:
    deltas = honest(0, 3)
    found = judged(deltas)
    mean = np.mean(deltas, axis=0)
    for measure, delta in zip(found.measures, deltas, strict=True):
        assert measure.delta_norm == pytest.approx(np.linalg.norm(delta))
        assert measure.cosine == pytest.approx(delta @ mean / np.linalg.norm(delta) / np.linalg.norm(mean))


def test_who_refuses_nothing_still_measures() -> None:
    deltas = [*honest(0, 3), np.full(SIZE, 1e6)]
    table = Table((0, 1, 2, 3), tuple(map(tuple, (np.stack(deltas) @ np.stack(deltas).T).tolist())), 1.0, SIZE)
    claims = [Claim(task, f"n{task}/0", 3.0) for task in range(4)]
    found = AcceptAll()(claims, table, ())
    assert found.refused == {}
    assert [measure.delta_norm for measure in found.measures] == pytest.approx(
        [float(np.linalg.norm(delta)) for delta in deltas]
    )
