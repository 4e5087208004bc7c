"""Results of serving calls on a connection: the arrays arrive under their names, and nothing else is taken."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from serving_model import SHAPE

from planetary.core.errors import RemoteProtocolError
from planetary.core.tensors import Tensors
from planetary.fleet.gateway.parts import allocate_expected
from planetary.runs.serve.gateway import expects_results, results_of
from planetary.runs.serve.messages import SERVING, Computed
from planetary.wire.limits import Limits
from planetary.wire.streams import Inbox, Outbox

MESSAGE = Computed(call=3, seconds=0.1)
SCORED = msgspec.structs.replace(SHAPE, hidden=6)


def arrays(rows: int, *, full: bool, scores: bool) -> dict[str, np.ndarray]:
    """Return the results of a call as `LoadedModel.compute` does."""
    rng = np.random.default_rng(rows)
    found = {
        "values": rng.normal(size=(rows, SHAPE.candidates)).astype(np.float32),
        "ids": rng.integers(0, SHAPE.vocabulary, (rows, SHAPE.candidates)).astype(np.int32),
    }
    found["drawn"] = rng.integers(0, SHAPE.vocabulary, rows).astype(np.int32)
    found["drawn_values"] = rng.normal(size=rows).astype(np.float32)
    if full:
        found["row"] = rng.normal(size=(rows, SHAPE.vocabulary)).astype(np.float32)
    if scores:
        found["scores"] = rng.normal(size=(rows, 32)).astype(np.float32)
        found["score_values"] = rng.normal(size=(rows, 32, 20)).astype(np.float32)
        found["score_ids"] = rng.integers(0, SHAPE.vocabulary, (rows, 32, 20)).astype(np.int32)
        found["hidden"] = rng.normal(size=(rows, SCORED.hidden)).astype(np.float32)
    return found


def received(tensors: Tensors, count: int = 9) -> Tensors:
    """Return tensors as the gateway's side of a connection has them."""
    inbox = Inbox(SERVING, Limits(tensors=count), allocate_expected(expects_results))
    outbox, messages = Outbox(SERVING), []
    outbox.add(MESSAGE, tensors)
    while frame := outbox.next_frame():
        for part in (frame.head, frame.payload):
            if part is not None:
                messages += inbox.feed(part)
    (found,) = messages
    assert found.message.call == MESSAGE.call
    return found.tensors


@pytest.mark.parametrize("full", [False, True])
def test_results_arrive_as_they_were_computed(full: bool) -> None:
    sent = arrays(3, full=full, scores=False)
    found = results_of(received(sent), SHAPE)
    assert len(found) == 3
    for i, one in enumerate(found):
        np.testing.assert_array_equal(one.ids, sent["ids"][i])
        np.testing.assert_array_equal(one.values, sent["values"][i])
        assert one.drawn == (sent["drawn"][i], sent["drawn_values"][i])
        assert (one.row is not None) == full
        assert one.scores is None


def test_scores_arrive_with_hidden_states() -> None:
    sent = arrays(1, full=True, scores=True)
    assert len(sent) == 9
    (found,) = results_of(received(sent), SCORED)
    assert found.scores is not None
    np.testing.assert_array_equal(found.scores.values, sent["scores"][0])
    np.testing.assert_array_equal(found.scores.hidden, sent["hidden"][0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": np.zeros(9, np.uint8)},
        {"values": np.zeros((1, 2), np.int32)},
        {"ids": np.zeros((1, 2), np.float32)},
    ],
)
def test_other_tensors_are_refused_before_they_are_received(wrong: dict[str, np.ndarray]) -> None:
    with pytest.raises(RemoteProtocolError, match="is not expected with it"):
        received(wrong)


def test_results_that_lack_a_part_are_refused() -> None:
    whole = arrays(2, full=False, scores=False)
    for name in whole:
        with pytest.raises(RemoteProtocolError, match="are not the log-probabilities and ids"):
            results_of(received({key: value for key, value in whole.items() if key != name}), SHAPE)
    with pytest.raises(RemoteProtocolError, match="not finite"):
        results_of(received({**whole, "values": np.full_like(whole["values"], np.nan)}), SHAPE)


@pytest.mark.parametrize("scored", [False, True])
def test_numbers_that_no_model_computes_are_refused(scored: bool) -> None:
    """Ids beyond the vocabulary sized a table of noise: one message took 16 GB of the gateway."""
    whole = arrays(1, full=True, scores=scored)
    results_of(received(whole), SHAPE if not scored else SCORED)
    for name, sent in whole.items():
        others = (2**31 - 1, -1, SHAPE.vocabulary) if sent.dtype == np.int32 else (np.nan, np.inf, -np.inf)
        for value in others:
            wrong = sent.copy()
            wrong.flat[-1] = value
            with pytest.raises(RemoteProtocolError):
                results_of(received({**whole, name: wrong}), SHAPE if not scored else SCORED)
    for name in {"ids", "score_ids"} & set(whole):
        none = {key: array[..., :0] for key, array in whole.items() if key in (name, name.replace("ids", "values"))}
        with pytest.raises(RemoteProtocolError):
            results_of(received({**whole, **none}), SHAPE if not scored else SCORED)
