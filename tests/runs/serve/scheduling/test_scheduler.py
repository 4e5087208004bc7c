"""Texts get the same tokens whatever happens to workers, pages and other texts. The model is a hash of the text."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from serving_model import (
    FORGETFUL,
    SHAPE,
    STATES,
    VOCABULARY,
    FakeWorker,
    ForgetfulWorker,
    StateWorker,
    alone,
    row_of,
)

from planetary.machine.machine import check_invariants
from planetary.runs.serve.program.shape import PAGE, ServingShape
from planetary.runs.serve.scheduling.sampling import SamplingOptions
from planetary.runs.serve.scheduling.scheduler import MOST_FAILURES, Call, Scheduler, SequenceOutput
from planetary.runs.serve.scheduling.sequences import SequenceRequest


def request(number: int, rng: np.random.Generator, **options: object) -> SequenceRequest:
    prompt = tuple(int(t) for t in rng.integers(0, 3, rng.integers(1, 6 * PAGE)))
    return SequenceRequest(
        number=number,
        user=str(rng.integers(3)),
        prompt=prompt,
        most=int(rng.integers(1, 60)),
        options=SamplingOptions(seed=number, temperature=float(rng.choice([0.0, 1.0]))),
        ends=frozenset({7}) if rng.random() < 0.5 else frozenset(),
        **options,  # type: ignore[arg-type]
    )


TOGETHER = msgspec.structs.replace(SHAPE, prefills=(1, 3))
MEMORIES = {
    "pages": (SHAPE, FakeWorker),
    "together": (TOGETHER, FakeWorker),
    "state": (STATES, StateWorker),
    "nothing": (FORGETFUL, ForgetfulWorker),
}


@pytest.mark.parametrize(
    ("memory", "seed"),
    [("pages", seed) for seed in range(30)] + [(m, s) for m in ("together", "state", "nothing") for s in range(8)],
)
def test_no_token_is_lost_doubled_or_changed_under_faults(memory: str, seed: int) -> None:
    """No token is lost doubled or changed under losses and cancellations.

    With odd seeds, workers begin with the first functions, and get those they lack.
    """
    shape, make = MEMORIES[memory]
    rng = np.random.default_rng(seed)
    scheduler, workers, sessions = Scheduler(shape, VOCABULARY), {}, 0
    adapters = 3 if shape.cache_kind.is_shared else 1
    requests = {
        number: request(number, rng, scores_prompt=rng.random() < 0.2, adapter=int(rng.integers(adapters)))
        for number in range(1, 13)
    }
    got: dict[int, list[int]] = {number: [] for number in requests}
    reasons: dict[int, str] = {}
    under_way: dict[int, Call] = {}
    coming = list(requests.values())
    lost = 0

    def take(given: SequenceOutput) -> None:
        assert given.sequence not in reasons
        got[given.sequence] += [token.token for token in given.tokens]
        if given.finished:
            reasons[given.sequence] = given.finished

    while len(reasons) < len(requests):
        chance = rng.random()
        if coming and chance < 0.2:
            scheduler.submit(coming.pop(0))
        elif len(workers) < 2 and chance < 0.3:
            sessions += 1
            workers[sessions] = make()
            scheduler.join(sessions, () if seed % 2 else None)
        elif workers and chance < 0.32:
            session = int(rng.choice(list(workers)))
            del workers[session]
            under_way.pop(session, None)
            lost += 1
            for given in scheduler.lose(session):
                take(given)
        elif chance < 0.324 and (running := [n for n in requests if scheduler.has(n)]):
            number = int(rng.choice(running))
            assert scheduler.cancel(number)
            reasons[number] = "cancelled"
        for session, call in scheduler.next_calls():
            assert session not in under_way
            under_way[session] = call
            state = scheduler.workers[session]
            assert call.function in {size.name for size in state.calls}
            assert seed % 2 or not state.lacking
            if rng.random() < 0.1:
                scheduler.extend(session, list(state.lacking)[:1])
                state.lacking.clear()
        assert scheduler.idle_for_no_reason() == ""
        if under_way and rng.random() < 0.8:
            session = int(rng.choice(list(under_way)))
            for given in scheduler.computed(session, workers[session].compute(under_way.pop(session))):
                take(given)
        check_invariants("scheduler", scheduler.invariants())
    for number, one in requests.items():
        expected = alone(one)
        if reasons[number] in ("stop", "length"):
            assert got[number] == expected
        else:
            assert got[number] == expected[: len(got[number])]
    assert sum(reason in ("stop", "length") for reason in reasons.values()) >= 6
    assert lost > 0


def test_worker_computes_with_the_functions_it_has() -> None:
    scheduler, worker = Scheduler(SHAPE, VOCABULARY), FakeWorker()
    scheduler.join(1, ())
    for number in (1, 2):
        scheduler.submit(SequenceRequest(number=number, prompt=(number, 1), most=6))
    functions: list[str] = []
    while any(map(scheduler.has, (1, 2))):
        for session, call in scheduler.next_calls():
            functions.append(call.function)
            scheduler.computed(session, worker.compute(call))
        if len(functions) == 6:
            state = scheduler.workers[1]
            assert list(state.lacking) == ["prefill_s32_p2", "decode_b1_p2", "decode_b2_p2"]
            scheduler.extend(1, ["decode_b2_p2"])
    assert set(functions[:6]) == {"score_s32_p8", "decode_b1_p8"}
    assert functions[6] == "decode_b2_p2"


def test_a_shared_beginning_is_computed_once() -> None:
    scheduler, worker = Scheduler(SHAPE, VOCABULARY), FakeWorker()
    scheduler.join(1)
    for number in (1, 2):
        scheduler.submit(SequenceRequest(number=number, prompt=(*([1] * 3 * PAGE), number), most=2))
        while scheduler.has(number):
            for session, call in scheduler.next_calls():
                scheduler.computed(session, worker.compute(call))
    assert worker.prefilled == 3 * PAGE + 1  # of the second text its last token alone is decoded


def test_prompts_of_one_size_are_taken_together() -> None:
    scheduler, worker = Scheduler(TOGETHER, VOCABULARY), FakeWorker()
    scheduler.join(1)
    for number in range(1, 5):
        scheduler.submit(SequenceRequest(number=number, prompt=(number, 3), most=2))
    scheduler.submit(SequenceRequest(number=5, prompt=(5,) * 3 * PAGE, most=2))
    functions = []
    while any(scheduler.has(number) for number in range(1, 6)):
        for session, call in scheduler.next_calls():
            functions.append(call.function)
            scheduler.computed(session, worker.compute(call))
    assert functions[:2] == ["prefill_b3_s32_p2", "decode_b4_p2"]
    assert worker.batches[:2] == [3, 3]


def test_texts_continue_while_a_long_prompt_takes_turns() -> None:
    """Texts are continued together while a long prompt is taken in turns."""
    scheduler, worker = Scheduler(SHAPE, VOCABULARY), FakeWorker()
    scheduler.join(1)
    for number in (1, 2):
        scheduler.submit(SequenceRequest(number=number, prompt=(number,), most=30, options=SamplingOptions(seed=1)))
    scheduler.submit(SequenceRequest(number=3, prompt=(5,) * (7 * PAGE), most=1))
    functions = []
    while scheduler.has(3):
        for session, call in scheduler.next_calls():
            functions.append(call.function)
            scheduler.computed(session, worker.compute(call))
    assert functions == ["prefill_s64_p8", "decode_b2_p2", "prefill_s64_p8"]


def test_users_get_equal_shares_however_much_one_asks() -> None:
    scheduler = Scheduler(SHAPE, VOCABULARY)
    for number in range(1, 9):
        scheduler.submit(SequenceRequest(number=number, user="greedy", prompt=(1,), most=9))
    scheduler.submit(SequenceRequest(number=9, user="modest", prompt=(1,), most=9))
    scheduler.join(1)
    ((_, call),) = scheduler.next_calls()
    assert 9 in [row.sequence for row in call.slots]


def test_the_youngest_text_makes_room_and_comes_back() -> None:
    tight = ServingShape(
        vocabulary=VOCABULARY, window=4 * PAGE, pages=6, page_shape=(2, 1, PAGE, 1), batches=(1, 2), chunks=(PAGE,),
        context_sizes=(4,),
    )  # fmt: skip
    scheduler, worker = Scheduler(tight, VOCABULARY), FakeWorker()
    scheduler.join(1)
    requests = [
        SequenceRequest(number=n, prompt=(n,) * PAGE, most=3 * PAGE - 1, options=SamplingOptions(seed=n))
        for n in (1, 2)
    ]
    got: dict[int, list[int]] = {1: [], 2: []}
    for one in requests:
        scheduler.submit(one)
    waited = False
    while scheduler.has(1) or scheduler.has(2):
        for session, call in scheduler.next_calls():
            for given in scheduler.computed(session, worker.compute(call)):
                got[given.sequence] += [token.token for token in given.tokens]
            waited |= any(text.request.number == 2 and text.generated for text in scheduler.waiting)
        check_invariants("scheduler", scheduler.invariants())
    assert waited
    assert got == {one.number: alone(one)[: one.most] for one in requests}


def test_a_text_that_every_worker_is_lost_with_is_given_up() -> None:
    scheduler = Scheduler(SHAPE, VOCABULARY)
    scheduler.submit(SequenceRequest(number=1, prompt=(1,), most=9))
    given: list[SequenceOutput] = []
    for session in range(MOST_FAILURES):
        assert given == []
        scheduler.join(session)
        assert len(scheduler.next_calls()) == 1
        given = scheduler.lose(session)
    assert given == [SequenceOutput(1, (), "error")]
    assert not scheduler.has(1)


def test_log_probabilities_of_a_prompt_are_those_of_its_tokens() -> None:
    scheduler, worker = Scheduler(SHAPE, VOCABULARY), FakeWorker()
    prompt = (4, 9, 2, 2, 31)
    scheduler.join(1)
    scheduler.submit(SequenceRequest(number=1, prompt=prompt, most=1, scores_prompt=True, likeliest=2))
    tokens = []
    while scheduler.has(1):
        for session, call in scheduler.next_calls():
            tokens += [token for given in scheduler.computed(session, worker.compute(call)) for token in given.tokens]
    assert [token.token for token in tokens[:5]] == list(prompt)
    assert tokens[0].logprob is None
    for place in range(1, 5):
        row = row_of(prompt[:place])
        assert tokens[place].logprob == pytest.approx(float(row[prompt[place]]))
        assert [one for one, _ in tokens[place].likeliest] == np.argsort(-row, kind="stable")[:2].tolist()
    assert len(tokens) == 6
