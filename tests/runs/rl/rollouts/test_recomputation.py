"""Sampled texts are drawn from the policy's distribution, packed into batches, and forgeries of them are found."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from policy_model import DECODE, LENGTH, PARAMS, ROWS, SERVING, SHAPE, SPECS, VOCABULARY, program

from planetary.core.errors import RemoteProtocolError, UserError
from planetary.core.tensors import Tensors
from planetary.models.initial import flat_names
from planetary.runs.rl.environments.judging import Judged
from planetary.runs.rl.environments.tasks import Problem
from planetary.runs.rl.loaded_policy import RolloutStart, sample
from planetary.runs.rl.objectives.objective import IMITATION, OBJECTIVES
from planetary.runs.rl.rollouts.dialogues import Dialogue, RolloutLimits, Rollouts, outcome_of
from planetary.runs.rl.rollouts.packing import pack
from planetary.runs.rl.rollouts.recomputation import Recomputation
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runtime.device_program import open_on_xla

END = 0
LIMITS = RolloutLimits(window=16, most=8, vocabulary=VOCABULARY, ends=(END,))


class Letters:
    """A tokenizer of a few letters: a token is a byte's place in the alphabet."""

    vocab_size, end_of_document, digest = VOCABULARY, END, "letters"

    def encode(self, text: bytes) -> np.ndarray:
        return np.array([byte - 96 for byte in text], np.uint32)

    def decode(self, ids: list[int]) -> bytes:
        return bytes(min(96 + i, 126) for i in ids)

    def to_json(self) -> bytes:
        return b""


class Words:
    """Prompts that are letters, and their answers."""

    held_out_count = 2

    def train(self, number: int) -> Problem:
        return Problem("abc" + "d" * (number % 3), "cba", {"n": number})

    def held_out(self, number: int) -> Problem:
        return Problem("bca", "acb", {"n": -number})


@functools.cache
def weights(scale: float = 1.0) -> Tensors:
    rng = np.random.default_rng(5)
    return {
        name: (np.asarray(value) + scale * 0.3 * rng.normal(size=np.shape(value))).astype(np.float32)
        for name, value in flat_names(PARAMS).items()
    }


@functools.cache
def model() -> LoadedModel:
    return LoadedModel(open_on_xla(program()[0], optimise=False), SERVING, weights())


def texts() -> Rollouts:
    return Rollouts(Words(), Letters(), LIMITS, seed=3, completions=3)


def answered(arrays: Tensors) -> dict[str, np.ndarray]:
    """What an honest worker sends for what it was asked."""
    parts = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
    starts = [
        RolloutStart(tuple(part.tolist()), int(seed), int(most), float(temperature))
        for part, seed, most, temperature in zip(
            parts, arrays["seeds"], arrays["most"], arrays["temperatures"], strict=True
        )
    ]
    found = sample(model(), SERVING, VOCABULARY, starts, ends=(END,))
    return {
        "tokens": np.array([token for one in found for token in one.tokens], np.int32),
        "logprobs": np.array([value for one in found for value in one.logprobs], np.float32),
        "lengths": np.array([len(one.tokens) for one in found], np.int32),
    }


@functools.cache
def recomputation() -> Recomputation:
    return Recomputation(DECODE, PARAMS, SPECS, length=LENGTH, vocabulary=VOCABULARY, tolerance=0.02)


def taken(changed: dict[str, np.ndarray] | None = None) -> tuple[Rollouts, list[Dialogue]]:
    held = texts()
    sent = changed or answered(held.to_sample(False, (1, 2)))
    return held, held.take(False, (1, 2), 4, sent)


@pytest.mark.slow
def test_honest_texts_are_found_right_and_carry_their_version() -> None:
    _, dialogues = taken()
    assert len(dialogues) == 6
    assert recomputation().defect(dialogues, weights()) == ""
    for one in dialogues:
        turn = one.turns[0]
        assert one.own == [False] * turn.start + [True] * turn.count
        assert [version for version in one.versions if version >= 0] == [4] * turn.count
        assert turn.count == LIMITS.most or one.tokens[-1] == END
    assert len({tuple(one.tokens) for one in dialogues}) > 4  # each has noise of its own


@pytest.mark.slow
def test_held_out_answers_are_the_likeliest_and_a_draw() -> None:
    """Each is computed again as what it has to be, so a worker cannot send one in place of the other."""
    held = texts()
    asked = held.to_sample(True, (0,))
    assert asked["temperatures"].tolist() == [0.0, 1.0]
    dialogues = held.take(True, (0,), 4, answered(asked))
    assert recomputation().defect(dialogues, weights()) == ""
    for temperatures in ([1.0, 1.0], [0.0, 0.0]):
        other = texts()
        sent = answered(asked | {"temperatures": np.array(temperatures, np.float32)})
        assert "not drawn" in recomputation().defect(other.take(True, (0,), 4, sent), weights())


@pytest.mark.slow
def test_equal_seeds_give_equal_texts_wherever_they_are_sampled() -> None:
    asked = texts().to_sample(False, (1, 2))
    first, second = answered(asked), answered(asked)
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_wrong_log_probabilities_are_found() -> None:
    sent = answered(texts().to_sample(False, (1, 2)))
    sent["logprobs"][3] -= 0.05
    _, dialogues = taken(sent)
    assert "was sent as" in recomputation().defect(dialogues, weights())


@pytest.mark.slow
def test_texts_of_other_weights_are_found() -> None:
    _, dialogues = taken()
    assert "was sent as" in recomputation().defect(dialogues, weights(1.2))


@pytest.mark.slow
def test_copied_completion_is_found_by_its_seed() -> None:
    """A copied completion is found by its seed although its log probabilities are right."""
    asked = texts().to_sample(False, (1, 2))
    sent = answered(asked)
    ends = np.cumsum(sent["lengths"])
    first, second = slice(0, ends[0]), slice(ends[0], ends[1])
    parts = {
        name: np.concatenate([sent[name][first], sent[name][first], sent[name][ends[1] :]])
        for name in ("tokens", "logprobs")
    }
    lengths = sent["lengths"].copy()
    lengths[1] = lengths[0]
    assert sent["tokens"][first].tolist() != sent["tokens"][second].tolist()
    _, dialogues = taken({**parts, "lengths": lengths})
    assert "not drawn with the seed" in recomputation().defect(dialogues, weights())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: {**s, "lengths": s["lengths"][:-1]}, "6 completions"),
        (lambda s: {**s, "logprobs": s["logprobs"] + 1e3}, "above 0"),
        (lambda s: {**s, "logprobs": s["logprobs"] * np.float32("nan")}, "not finite"),
        (lambda s: {**s, "tokens": s["tokens"] + VOCABULARY}, "is not below"),
        (lambda s: {**s, "tokens": np.zeros_like(s["tokens"])}, "after its end"),
        (lambda s: {"tokens": s["tokens"]}, "6 completions"),
    ],
)
def test_what_is_no_answer_is_refused_and_nothing_is_appended(change, why: str) -> None:  # type: ignore[no-untyped-def]
    held = texts()
    sent = change(answered(held.to_sample(False, (1, 2))))
    with pytest.raises(RemoteProtocolError, match=why):
        held.take(False, (1, 2), 4, sent)
    assert all(not one.turns for one in held.group(False, 1))


def test_what_is_refused_is_sampled_again_from_where_it_was() -> None:
    held, dialogues = taken()
    before = texts().to_sample(False, (1, 2))
    held.untake(dialogues)
    np.testing.assert_equal(held.to_sample(False, (1, 2)), before)


def test_dialogue_goes_on_after_a_reply_with_own_tokens_only() -> None:
    held, dialogues = taken()
    for one in dialogues:  # so that there is room for a second turn
        assert len(one.completions) == 1
    short = [one for one in dialogues if len(one.tokens) < 13]
    verdicts = [Judged(reply="z") if one in short else Judged(reward=0.5) for one in dialogues]
    held.settle(dialogues, verdicts)
    assert outcome_of(held.group(False, 1)) == {"goes_on": True} or not short
    again = held.going_on(False, (1, 2))
    assert again == short
    if short:
        sent = answered(held.to_sample(False, (1, 2)))
        held.take(False, (1, 2), 5, sent)
        assert recomputation().defect(short, weights()) == ""
        one = short[0]
        assert one.own[one.turns[1].start - 1] is False
        assert {version for version in one.versions if version >= 0} == {4, 5}


def test_packing_puts_advantages_and_weights_at_their_tokens() -> None:
    """Packing has advantages weights and log probabilities at their tokens."""
    held, dialogues = taken()
    rewards = [1.0, 0.0, None, 0.5, 0.25, 0.75]
    held.settle(dialogues, [Judged(reward=reward) for reward in rewards])
    batches = pack(held.trained((1, 2)), OBJECTIVES["importance"], SHAPE, LIMITS.most)
    assert [batch.arrays["tokens"].shape for batch in batches] == [(ROWS, LENGTH + 1)] * 2
    counted = [one for one, reward in zip(dialogues, rewards, strict=True) if reward is not None]
    assert sum(batch.tokens for batch in batches) == sum(one.turns[0].count for one in counted)
    assert sum(float(batch.arrays["weights"].sum()) for batch in batches) == pytest.approx(2.0)  # one a batch
    one, arrays = counted[0], batches[0].arrays
    start, end = one.turns[0].start, len(one.tokens)
    assert arrays["tokens"][0, :end].tolist() == one.tokens
    assert np.flatnonzero(arrays["weights"][0]).tolist() == list(range(start - 1, end - 1))
    assert arrays["sampled"][0, start - 1 : end - 1] == pytest.approx(one.sampled[start:], abs=1e-6)
    assert set(arrays["advantages"][0, start - 1 : end - 1].tolist()) == {0.5}
    assert arrays["terms"][0, 0] == 1.0


def test_answers_are_imitated_with_the_token_that_ends_them() -> None:
    (batch,) = pack(texts().answered((1, 2)), IMITATION, SHAPE, LIMITS.most)
    assert batch.arrays["tokens"][0, :8].tolist() == [1, 2, 3, 4, 3, 2, 1, END]
    assert np.flatnonzero(batch.arrays["weights"][0]).tolist() == [3, 4, 5, 6]
    assert batch.tokens == 8


def test_a_prompt_that_does_not_fit_is_named() -> None:
    class Long(Words):
        def train(self, number: int) -> Problem:
            return Problem("a" * 20, "b", {})

    held = Rollouts(Long(), Letters(), LIMITS, seed=0, completions=2)
    with pytest.raises(UserError, match="a prompt has 20 tokens: expected 1 to 15"):
        held.to_sample(False, (1,))


def test_rollouts_of_a_run_and_of_the_next_seed_share_no_noise() -> None:
    """A seed for each group, member and turn, held out or not."""
    seeds: list[int] = []
    for run_seed in range(2):
        found = Rollouts(Words(), Letters(), LIMITS, seed=run_seed, completions=16)
        for held_out in (False, True):
            numbers = range(8) if held_out else range(1, 400)
            seeds += found.drawings(held_out, numbers)[0]
    assert len(set(seeds)) == len(seeds) > 12_000
    assert all(0 <= seed < 2**63 for seed in seeds)
