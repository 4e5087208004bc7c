"""Tokens are drawn by the worker: the same ones the gateway would draw, in a message without the vocabulary."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from planetary.runs.serve.loaded_model import next_call, with_draws
from planetary.runs.serve.messages import SERVING, ComputeCall, Computed, candidates_of
from planetary.runs.serve.scheduling.sampling import Candidates, Drawing, SamplingOptions, draw
from planetary.wire.streams import Outbox

VOCABULARY = 49_152
OPTIONS = {
    "usual": SamplingOptions(seed=3),
    "nucleus": SamplingOptions(top_p=0.9, temperature=1.5, seed=4),
    "greedy": SamplingOptions(temperature=0.0),
    "penalties": SamplingOptions(presence_penalty=2.0, frequency_penalty=2.0, seed=5),
    "bias": SamplingOptions(logit_bias={7: 20.0}, seed=6),
}


def found(sequences: int) -> dict[str, np.ndarray]:
    """Return the results of a call's function, with the row."""
    rows = np.random.default_rng(sequences).normal(size=(sequences, VOCABULARY)).astype(np.float32)
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :64].astype(np.int32)
    return {"values": np.take_along_axis(rows, ids, 1), "ids": ids, "row": rows}


def call(*drawings: Drawing | None, **fields: object) -> ComputeCall:
    number = len(drawings)
    return ComputeCall(
        call=1,
        function="decode",
        tokens=((5,),) * number,
        starts=tuple(range(20, 20 + number)),
        page_tables=((1, 2),) * number,
        drawings=drawings,
        **{"full": False, "vocabulary": VOCABULARY - 100, **fields},  # type: ignore[arg-type]
    )


def sent_bytes(message: ComputeCall) -> int:
    """Return the size of the answer on the wire."""
    results = with_draws(message, found(len(message.tokens)))
    outbox, size = Outbox(SERVING), 0
    outbox.add(Computed(call=1, seconds=0.01), results)
    while frame := outbox.next_frame():
        size += len(frame.head) + (0 if frame.payload is None else len(frame.payload))
    return size


@pytest.mark.parametrize("name", OPTIONS)
def test_worker_draws_what_the_gateway_would(name: str) -> None:
    drawing = Drawing(OPTIONS[name], frozenset({0}), generated=(9, 9, 11))
    message, results = call(drawing, None, drawing), found(3)
    sent = with_draws(message, results)
    assert "row" not in sent
    for place, one in enumerate(candidates_of(sent)):
        if message.drawings[place] is None:
            continue
        whole = Candidates(results["ids"][place], results["values"][place], results["row"][place])
        position, most = 21 + place, message.vocabulary
        assert one.drawn == draw(whole, drawing.options, position, generated=drawing.generated, most=most)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_token_is_less_than_a_kilobyte(name: str) -> None:
    """The log-probabilities of all tokens were 197 kB."""
    drawing = Drawing(OPTIONS[name], frozenset({0}))
    assert sent_bytes(call(drawing)) < 1000
    assert sent_bytes(call(drawing, likeliest=20)) < 1000
    assert len(msgspec.json.encode(call(drawing))) < 1000


def test_a_row_is_sent_where_the_gateway_draws() -> None:
    sent = with_draws(call(None, full=True), found(1))
    assert sent["row"].shape == (1, VOCABULARY)


def test_penalties_count_the_tokens_a_worker_drew_by_itself() -> None:
    drawing = Drawing(OPTIONS["penalties"], frozenset({0}), generated=(9,))
    message = call(drawing, extra_steps=2)
    sent = with_draws(message, found(1))
    following = next_call(message, sent)
    assert following is not None
    token = int(sent["drawn"][0])
    assert following.tokens == ((token,),)
    assert following.starts == (21,)
    assert following.drawings == (Drawing(drawing.options, drawing.ends, (9, token)),)
    assert following.extra_steps == 1
    ending = msgspec.structs.replace(message, drawings=(Drawing(drawing.options, frozenset({token})),))
    assert next_call(ending, sent) is None
