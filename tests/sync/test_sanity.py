from __future__ import annotations

import math

from planetary.runs.rounds.controller.evaluation import settle
from planetary.sync.sanity import CAUTIOUS_ROUNDS, first_damaged, is_cautious, is_sane


def test_a_loss_may_rise_a_little() -> None:
    assert is_sane(5.5, None, 0.25)
    assert is_sane(3.9, 3.0, 0.25)
    assert not is_sane(4.1, 3.0, 0.25)
    assert is_sane(400.0, 3.0, 0.0)  # switched off, but for what is not a number
    assert not is_sane(math.nan, None, 0.0)
    assert not is_sane(math.inf, 3.0, 0.0)


def test_first_damaged_version_is_compared_with_the_best() -> None:
    assert first_damaged({0: 5.5, 1: 4.0, 2: 3.0, 3: 3.5}, 0.25) is None
    assert first_damaged({0: 5.5, 1: 4.0, 2: 3.0, 3: 4.5, 4: 30.0}, 0.25) == 3
    assert first_damaged({2: math.nan, 0: 5.5}, 0.25) == 2
    assert first_damaged({}, 0.25) is None


def test_a_model_that_learns_its_data_by_heart_is_not_damaged() -> None:
    held_out = {version: 2.0 + 0.2 * version for version in range(20)}  # to 5.8
    falling = {round_: 3.0 / round_ for round_ in range(1, 20)}
    assert first_damaged(held_out, 0.25, falling) is None
    assert first_damaged(held_out, 0.25) == 4
    rising = {round_: 2.0 + 0.2 * round_ for round_ in range(1, 20)}  # as whoever makes it worse bit by bit gets it
    assert first_damaged(held_out, 0.25, rising) == 6
    assert first_damaged(held_out | {12: 8.0}, 0.25, falling) == 12
    assert first_damaged({0: 5.5, 1: 4.0, 2: 3.0, 3: 3.5, 4: 4.5}, 0.25, {1: 5.5, 2: 4.0, 3: 3.0, 4: 3.4}) == 4


def test_rounds_after_a_retreat_are_cautious() -> None:
    assert not is_cautious(3, [4])
    assert is_cautious(4, [4])
    assert is_cautious(4 + CAUTIOUS_ROUNDS, [4])
    assert not is_cautious(5 + CAUTIOUS_ROUNDS, [4])


def test_a_plausible_loss_needs_no_second_opinion() -> None:
    found = settle({"a": 2.9}, 3.0, 0.25, others=9)
    assert found is not None
    assert (found.loss, found.wrong) == (2.9, ())


def test_the_first_loss_of_a_run_is_said_by_two() -> None:
    """One that is too low would make everything after it look damaged."""
    assert settle({"liar": 0.001}, None, 0.25, others=3) is None
    assert settle({"liar": 0.001, "b": 5.5}, None, 0.25, others=2) is None
    found = settle({"liar": 0.001, "b": 5.5, "c": 5.5}, None, 0.25, others=1)
    assert found is not None
    assert (found.loss, found.wrong) == (5.5, ("liar",))
    alone = settle({"a": 5.5}, None, 0.25, others=0)
    assert alone is not None
    assert alone.loss == 5.5


def test_an_implausible_loss_is_asked_again_until_most_say_it() -> None:
    assert settle({"a": 100.0}, 3.0, 0.25, others=2) is None
    assert settle({"a": 0.001}, 3.0, 0.25, others=2) is None  # too good to be true
    found = settle({"a": 100.0, "b": 100.3}, 3.0, 0.25, others=1)  # two of three
    assert found is not None
    assert (found.loss, found.wrong) == (100.0, ())


def test_outlier_among_plausible_answers_is_wrong() -> None:
    assert settle({"liar": 100.0, "b": 3.0}, 3.1, 0.25, others=1) is None
    found = settle({"liar": 100.0, "b": 3.0, "c": 3.01}, 3.1, 0.25, others=5)
    assert found is not None
    assert (found.loss, found.wrong) == (3.0, ("liar",))


def test_agreeing_liars_are_believed_only_as_a_majority() -> None:
    said = {"liar": 100.0, "liar too": 100.0}
    assert settle(said, 3.0, 0.25, others=3) is None
    found = settle({**said, "c": 3.0, "d": 3.0}, 3.0, 0.25, others=1)
    assert found is not None
    assert (found.loss, set(found.wrong)) == (3.0, {"liar", "liar too"})


def test_where_nobody_else_can_be_asked_the_median_is_taken() -> None:
    found = settle({"a": 100.0, "b": 3.0}, 3.0, 0.25, others=0)
    assert found is not None
    assert (found.loss, found.wrong) == (51.5, ())
