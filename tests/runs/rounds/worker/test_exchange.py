"""What a worker gets and sends with codecs: equal bits on both sides, and feedback that survives a restart."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from small_training import SPEC, SmallExecutor

from planetary.core.configuration.schema import OuterConfig
from planetary.core.errors import NumericsError, ProtocolError, RemoteProtocolError
from planetary.core.quantisers import to_bfloat16
from planetary.core.schedules import Schedule
from planetary.core.tensors import Tensors, TensorSpec
from planetary.core.token_slice import Slice
from planetary.machine.events import Event
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.changes import ChangeOf
from planetary.runs.rounds.controller.star import start_offer
from planetary.runs.rounds.events import EndParametersOf, OuterStepDone, TakeOuterStep
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.worker.compute import Compute
from planetary.runs.rounds.worker.events import StepDone, TaskBroke, TrainingDone
from planetary.runs.rounds.worker.exchange import CodedUpdates, Exchange, Trained, exchange_of
from planetary.runs.rounds.worker.inner_state import InnerStates
from planetary.sync.merge import Mean, Radial, Senders
from planetary.sync.outer import initial_state, published_params
from planetary.sync.payload import PAYLOAD, PayloadForm, payload_digest
from planetary.sync.relay import COEFFICIENTS
from planetary.wire.streams import ReceivedMessage
from waiting import HANG_S

RULES = {"sparse": Senders(), "sign": Radial()}
SPECS = (TensorSpec("w", "f32", (70, 90)), TensorSpec("b", "bf16", (40,)))
START_MASTERS = {"w": np.full((70, 90), 0.5, np.float32), "b": np.ones(40, np.float32)}
START = {"w": np.full((70, 90), 0.5, np.float32), "b": to_bfloat16(np.ones(40, np.float32))}


def gateway(up: str, down: str) -> ParameterVersions:
    return ParameterVersions(SPECS, initial_state(SPECS, START), 0, rm.Compression(up=up, down=down))


def trained(params: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    noise = np.random.default_rng(seed).standard_normal((70, 90)).astype(np.float32)
    return {"w": params["w"] + np.float32(0.01) * noise, "b": to_bfloat16(np.full(40, 1 + 0.1 * seed, np.float32))}


def result(task: int, digest: str) -> rm.TrainResult:
    return rm.TrainResult(
        task=task, round=1, steps=1, tokens=1, loss=1.0, grad_norm=1.0, seconds=1.0, payload="delta", digest=digest
    )


def sent_to(server: ParameterVersions, round_: int, own: Sequence[int] = ()) -> tuple[rm.Parameters, Tensors]:
    """Return the newest version in the form for a worker with the one before, whose tasks `own` are in it."""
    offer = server.change.offer(round_, round_ - 1, own)
    if isinstance(offer.payload, ChangeOf):
        return offer.message, server.change_of(round_, offer.payload.own)
    return offer.message, server.of_version(round_)


def taken(worker: Exchange, message: rm.Parameters, tensors: Tensors) -> dict[str, np.ndarray]:
    worker.take(message, tensors)
    return dict(worker.start((), 0))


def task(number: int, start: Tensors, ends: Tensors) -> Trained:
    return Trained(task=number, round=1, tokens=1, start=start, ends=ends)


@pytest.mark.parametrize(
    ("up", "down"),
    [("int4", "int4"), ("sparse", "sparse"), ("sign", "sign"), ("float32", "bf16"), ("fp4", "none"), ("sign", "relay")],
)
def test_worker_and_gateway_have_equal_bits_after_each_change(up: str, down: str) -> None:
    server = gateway(up, down)
    workers = [exchange_of(SPECS, rm.Compression(up=up, down=down)) for _ in range(2)]
    params = [taken(worker, rm.Parameters(version=0), server.of_version(0)) for worker in workers]
    for round_ in range(1, 5):
        parts = []
        for number, worker in enumerate(workers):
            ends = trained(params[number], 10 * round_ + number)
            sent = worker.give(replace(task(10 * round_ + number, params[number], ends), round=round_))
            defect, tensors = server.read(result(number, sent.digest), sent.tensors)
            assert not defect
            parts.append((10 * round_ + number, 1, server.attach(tensors, sent.tensors[PAYLOAD], sent.digest)))
        server.take_outer_step(round_, parts, RULES.get(up, Mean()))
        for number, worker in enumerate(workers):
            params[number] = taken(worker, *sent_to(server, round_, [10 * round_ + number]))
        newcomer = exchange_of(SPECS, rm.Compression(up=up, down=down))
        fresh = taken(newcomer, rm.Parameters(version=round_), server.of_version(round_))
        for name in START:
            assert params[0][name].tobytes() == params[1][name].tobytes() == fresh[name].tobytes()


def test_one_worker_with_a_float32_codec_trains_plainly() -> None:
    """To rounding: a delta in float32 is rounded once, which end parameters are not."""
    server, worker = gateway("float32", "float32"), exchange_of(SPECS, rm.Compression(up="float32", down="float32"))
    params = taken(worker, rm.Parameters(version=0), server.of_version(0))
    ends = trained(dict(params), 1)
    sent = worker.give(task(1, params, ends))
    _, tensors = server.read(result(1, sent.digest), sent.tensors)
    server.take_outer_step(1, [(1, 1, server.attach(tensors))], Mean())
    np.testing.assert_allclose(taken(worker, *sent_to(server, 1))["w"], ends["w"], rtol=1e-6)


def test_master_is_the_sum_of_deltas_for_any_broadcast() -> None:
    """The broadcast's rounding is never in the master copy, and what workers have stays near it."""
    server, worker = gateway("float32", "int4"), exchange_of(SPECS, rm.Compression(up="float32", down="int4"))
    params = taken(worker, rm.Parameters(version=0), server.of_version(0))
    total = START["w"].astype(np.float64)
    for round_ in range(1, 12):
        ends = trained(params, round_)
        total += ends["w"].astype(np.float64) - params["w"]
        sent = worker.give(task(1, params, ends))
        _, tensors = server.read(result(round_, sent.digest), sent.tensors)
        server.take_outer_step(round_, [(round_, 1, server.attach(tensors))], Mean())
        params = taken(worker, *sent_to(server, round_))
    np.testing.assert_allclose(server.state.params["w"], total, atol=1e-5)
    far = np.linalg.norm(params["w"] - server.state.params["w"])
    assert 0 < far < 0.3 * np.linalg.norm(trained(params, 0)["w"] - params["w"])


def test_altered_delta_is_named_and_dropped() -> None:
    server, worker = gateway("int8", "none"), CodedUpdates(SPECS, rm.Compression(up="int8"))
    sent = worker.give(task(1, START, trained(START, 1)))
    defect, tensors = server.read(result(1, "0" * 32), sent.tensors)
    assert "it was altered" in defect
    assert tensors == {}
    assert server.read(result(1, sent.digest), {PAYLOAD: sent.tensors[PAYLOAD][1:]})[0].startswith("reading an update")
    assert server.read(result(1, sent.digest), {}) == ("it came without its delta", {})


def test_altered_or_foreign_change_is_refused() -> None:
    worker = CodedUpdates(SPECS, rm.Compression(up="int4", down="int4"))
    payload = PayloadForm("int4", SPECS).encode({"w": START["w"], "b": np.ones(40, np.float32)})
    change = rm.Parameters(version=3, since=2, digest=payload_digest(payload))
    with pytest.raises(RemoteProtocolError, match="a change since 2, which this worker has not"):
        worker.take(change, {PAYLOAD: payload})
    worker.take(rm.Parameters(version=2), {"w": START["w"], "b": np.ones(40, np.float32)})
    with pytest.raises(ProtocolError, match="digest"):
        worker.take(change, {PAYLOAD: payload ^ np.uint8(1)})


def test_feedback_is_saved_and_loaded_by_round(tmp_path: Path) -> None:
    """A worker that is started again goes on from the residual of the round before, as from its optimizer state."""
    compression = rm.Compression(up="int4")
    first, states = (
        CodedUpdates(SPECS, compression),
        InnerStates(tmp_path, CodedUpdates(SPECS, compression).residual_specs),
    )
    first.give(task(1, START, trained(START, 1)))
    assert first.residual is not None
    states.save(1, first.residual)
    again = CodedUpdates(SPECS, compression)
    found = states.load(2)
    assert found is not None
    again.residual = found[1]
    one, other = first.give(task(1, START, trained(START, 2))), again.give(task(1, START, trained(START, 2)))
    assert one.digest == other.digest
    fresh = CodedUpdates(SPECS, compression)
    assert fresh.give(task(1, START, trained(START, 2))).digest != one.digest


def test_tensors_are_coded_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the worker's compute thread, and in one that a received message is read in.

    The outer step, which encodes the broadcast, is an answer of the gateway's shell, which are computed in threads.
    """
    coded: list[tuple[str, bool]] = []

    def noting(name: str) -> Callable[..., Any]:
        work = getattr(PayloadForm, name)

        def noted(*args: Any) -> Any:
            coded.append((name, threading.current_thread() is threading.main_thread()))
            return work(*args)

        return noted

    for name in ("compress", "decode"):
        monkeypatch.setattr(PayloadForm, name, noting(name))
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
    compression, start = rm.Compression(up="int4", down="int4"), {"w": np.ones(8, np.float32)}
    worker = CodedUpdates(SPEC.params, compression)
    server = ParameterVersions(SPEC.params, initial_state(SPEC.params, start), 0, compression)
    states, feedback = InnerStates(tmp_path / "inner", ()), InnerStates(tmp_path / "feedback", worker.residual_specs)
    loaded: list[int] = []
    load = feedback.load

    def noted_load(before: int) -> tuple[int, dict[str, np.ndarray]] | None:
        loaded.append(before)
        return load(before)

    monkeypatch.setattr(feedback, "load", noted_load)
    compute = Compute(
        SmallExecutor(), SPEC, {}, states, reset_inner_state=False, exchange=worker, feedback=feedback, report=ended.put
    )
    tokens, schedule = np.arange(20, dtype=np.int32), Schedule("constant", 0.1, 0, 10)

    async def train(round_: int) -> None:
        """Train a task, let the gateway read its result and step, and let the worker take the change."""
        message, tensors = sent_to(server, round_ - 1) if round_ > 1 else (rm.Parameters(version=0), start)

        def use() -> Tensors:
            worker.take(message, tensors)
            return worker.start()

        compute.use_parameters(use)
        lease = Slice("", "ui32", 0, tokens.size)
        task = rm.TrainTask(
            task=round_, round=round_, version=round_ - 1, lease=round_, slice=lease, steps=2, first_step=0
        )
        compute.train(task, schedule, tokens)
        while not isinstance(done := await asyncio.to_thread(ended.get), TrainingDone):
            assert isinstance(done, StepDone)
        payload = compute.end_parameters(EndParametersOf(round_))
        sent = replace(result(round_, done.digest), round=round_)
        event = await server.receive(rm.TrainResult, 1, ReceivedMessage(sent, payload))
        assert event.defect == ""
        merge = TakeOuterStep(round_, "mean", ((round_, 1, event.attachment),))
        assert isinstance(await asyncio.to_thread(server.step, OuterConfig(), 1, merge), OuterStepDone)

    async def rounds() -> None:
        await train(1)
        await train(2)

    try:
        asyncio.run(rounds())
    finally:
        compute.close()
    assert [name for name, _ in coded] == ["compress", "decode"] * 2 + ["decode"] + ["compress", "decode"] * 2
    assert not any(on_loop for _, on_loop in coded)
    assert loaded == [1]  # the feedback of round 1 is still there in round 2


@pytest.mark.parametrize("beside", [True, False], ids=["ahead", "at the border"])
def test_no_task_begins_before_an_unreadable_version(beside: bool, tmp_path: Path) -> None:
    """Whatever the error is, and whichever thread it was in."""
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
    states, start = InnerStates(tmp_path, ()), {"w": np.ones(8, np.float32)}
    compute = Compute(
        SmallExecutor(), SPEC, {}, states, reset_inner_state=False, exchange=exchange_of(SPEC.params, rm.Compression()),
        feedback=None, report=ended.put,
    )  # fmt: skip

    def odd() -> Any:
        raise ValueError("odd")

    def train(task: int) -> Event:
        lease, tokens = Slice("", "ui32", 0, 20), np.arange(20, dtype=np.int32)
        work = rm.TrainTask(task=task, round=1, version=0, lease=1, slice=lease, steps=2, first_step=0)
        compute.train(work, Schedule("constant", 0.1, 0, 10), tokens)
        while isinstance(event := ended.get(timeout=HANG_S), StepDone):
            pass
        return event

    try:
        compute.use_parameters(lambda: start)
        assert isinstance(train(1), TrainingDone)
        if beside:
            compute.take_ahead(odd)
        compute.use_parameters((lambda: start) if beside else odd)
        assert train(2) == TaskBroke(2, "internal", "ValueError: odd")
        compute.use_parameters(lambda: start)
        assert isinstance(train(3), TrainingDone)
    finally:
        compute.close()


def test_a_nan_is_found_before_it_is_sent() -> None:
    worker = CodedUpdates(SPECS, rm.Compression(up="int4"))
    with pytest.raises(NumericsError, match="tensor 'w' contains NaN"):
        worker.give(task(1, START, {**START, "w": np.full((70, 90), np.nan, np.float32)}))
    assert worker.residual is None


def test_without_codecs_everything_is_whole() -> None:
    worker = exchange_of(SPECS, rm.Compression())
    assert isinstance(worker, Exchange)
    assert worker.give(task(1, START, START)).tensors is START
    assert taken(worker, rm.Parameters(version=1), START) == START


def test_an_eager_start_has_the_delta_and_the_error_feedback() -> None:
    """All that the worker has trained and no version contains: the rest of one payload goes with the next delta."""
    server = gateway("int4", "none")
    worker = CodedUpdates(SPECS, rm.Compression(up="int4"), eager_rate=1.0)
    params = taken(worker, rm.Parameters(version=0), server.of_version(0))
    ends = trained(params, 1)
    sent = worker.give(task(5, params, ends))
    delta = np.subtract(params["w"], ends["w"])
    expected = params["w"].astype(np.float64) - 0.25 * delta.astype(np.float64)
    np.testing.assert_array_equal(worker.start((5,), 4)["w"], expected.astype(np.float32))
    np.testing.assert_array_equal(worker.start((), 0)["w"], params["w"])
    np.testing.assert_array_equal(worker.start((99,), 4)["w"], params["w"])  # of a connection that was lost

    rest = delta - PayloadForm("int4", SPECS).decode(sent.tensors[PAYLOAD], sent.digest)["w"]
    assert np.abs(rest).max() > 0
    worker.give(task(6, params, params))
    expected = params["w"].astype(np.float64) - 0.25 * rest.astype(np.float64)
    np.testing.assert_array_equal(worker.start((6,), 4)["w"], expected.astype(np.float32))


def test_eager_start_takes_the_root_of_its_share_radially() -> None:
    """That is the coefficient of one of M orthogonal deltas; embeddings take the mean."""
    specs = (TensorSpec("w", "f32", (4,)), TensorSpec("embed", "f32", (4,)))
    worker = CodedUpdates(specs, rm.Compression(up="float32"), eager_rate=1.0, eager_radial=True)
    start, ends = ({spec.name: np.full(4, value, np.float32) for spec in specs} for value in (1.0, 3.0))
    taken(worker, rm.Parameters(version=0), start)
    worker.give(Trained(task=5, round=1, tokens=1, start=start, ends=ends))
    begins = worker.start((5,), 4)
    np.testing.assert_array_equal(begins["w"], np.full(4, 1.0 + 0.5 * 2.0, np.float32))
    np.testing.assert_array_equal(begins["embed"], np.full(4, 1.0 + 0.25 * 2.0, np.float32))


def test_eager_worker_forgets_contents_of_the_newest_version() -> None:
    worker = CodedUpdates(SPECS, rm.Compression(up="float32"), eager_rate=1.0)
    taken(worker, rm.Parameters(version=0), START)
    worker.give(task(5, START, trained(START, 1)))
    later = trained(START, 3)
    taken(worker, rm.Parameters(version=1), later)
    np.testing.assert_array_equal(worker.start((5,), 1)["w"], later["w"])


PARTS = rm.Fragmentation(count=2, delay=1, mixing=0.5)


def test_a_fragment_for_another_version_is_refused() -> None:
    """And one that is older than the worker's: versions only go forward, but for whole parameters."""
    worker = exchange_of(SPECS, rm.Compression(), fragments=PARTS)
    worker.take(rm.Parameters(version=2), START)
    later = trained(START, 1)
    with pytest.raises(RemoteProtocolError, match="came as a fragment for version 3, and this worker has version 2"):
        worker.take(rm.Parameters(version=4, since=3), {"b": later["b"]})
    worker.take(rm.Parameters(version=3, since=2), {"w": later["w"]})
    with pytest.raises(RemoteProtocolError, match="for version 2, and this worker has version 3"):
        worker.take(rm.Parameters(version=3, since=2), {"w": later["w"]})
    assert worker.start()["w"] is later["w"]
    assert worker.start()["b"] is START["b"]


def test_fragments_in_codecs_give_both_sides_the_same_bits() -> None:
    codecs = rm.Compression(up="int4", down="int8")
    server = ParameterVersions(SPECS, initial_state(SPECS, START), 0, codecs, fragments=2)
    worker = exchange_of(SPECS, codecs, fragments=PARTS)
    worker.take(rm.Parameters(version=0), server.of_version(0))
    own = worker.start()
    for round_ in range(1, 6):
        ends = trained(dict(own), round_)
        sent = worker.give(Trained(round_, round_, 1, own, ends))
        assert sent.tensors[PAYLOAD].size < 4000  # one fragment of the two
        defect, tensors = server.read(replace(result(round_, sent.digest), round=round_), sent.tensors)
        assert not defect
        server.take_outer_step(round_, [(round_, 1, server.attach(tensors))], Mean())
        worker.take(*sent_to(server, round_))
        shared, newcomer = worker.start(), exchange_of(SPECS, codecs, fragments=PARTS)
        newcomer.take(rm.Parameters(version=round_), server.of_version(round_))
        assert {k: v.tobytes() for k, v in shared.items()} == {k: v.tobytes() for k, v in newcomer.start().items()}
        own = worker.mix(ends, round_)
        kept = "b" if round_ % 2 else "w"  # of the other fragment
        assert own[kept].tobytes() == ends[kept].tobytes()


def test_nan_in_the_feedback_of_a_fragment_is_named() -> None:
    worker = exchange_of(SPECS, rm.Compression(up="int4"), fragments=PARTS)
    worker.take(rm.Parameters(version=0), START)
    worker.give(task(1, START, trained(START, 1)))
    worker.residual = {"w": np.full((70, 90), np.nan, np.float32), "b": np.zeros(40, np.float32)}
    with pytest.raises(NumericsError, match="error feedback of tensor 'w'"):
        worker.give(task(1, START, trained(START, 1)))


def test_a_chain_without_fragments_is_refused() -> None:
    for worker in (exchange_of(SPECS, rm.Compression()), CodedUpdates(SPECS, rm.Compression(up="int4"))):
        worker.take(rm.Parameters(version=0), START)
        with pytest.raises(RemoteProtocolError, match="goes on from task 4, and its run has no fragments"):
            worker.start(after=4)
        with pytest.raises(RemoteProtocolError, match="mixes in version 1, and its run has no fragments"):
            worker.mix(START, 1)


def test_zero_fragment_is_judged_by_the_length_of_all() -> None:
    """A fragment that begins at zero is judged by the length of all parameters."""
    zero = {"w": START["w"], "b": to_bfloat16(np.zeros(40, np.float32))}
    server = ParameterVersions(SPECS, initial_state(SPECS, zero), 0, rm.Compression(up="float32"), fragments=2)
    part = server.attach({"b": np.ones(40, np.float32)})
    whole = float(np.linalg.norm(START["w"].astype(np.float64)))
    assert server.measure(2, [(1, part)]).start_norm == pytest.approx(whole)


def test_initial_parameters_in_a_codec_are_those_of_the_run() -> None:
    """The gateway begins from the decoded values, so that a newcomer's whole parameters have the same bits."""
    codecs = rm.Compression(up="sign", down="relay", start="int8")
    server, worker = ParameterVersions(SPECS, initial_state(SPECS, START), 0, codecs), exchange_of(SPECS, codecs)
    offer = start_offer("int8", server.start_digest, SPECS)
    sent = server.of_version(0)
    assert sum(array.nbytes for array in sent.values()) == offer.nbytes < 0.3 * (4 * 6340)
    spec = worker.expects(offer.message, PAYLOAD)
    assert spec is not None
    assert spec.nbytes == offer.nbytes
    params = taken(worker, offer.message, sent)
    expected = published_params(SPECS, server.state.params)
    assert {k: v.tobytes() for k, v in params.items()} == {k: v.tobytes() for k, v in expected.items()}
    server.go_back(initial_state(SPECS, START), 0, {})
    assert payload_digest(server.of_version(0)[PAYLOAD]) == server.start_digest
    with pytest.raises(ProtocolError, match="it was altered"):
        worker.take(offer.message, {PAYLOAD: sent[PAYLOAD] ^ 1})


def test_relayed_version_lacking_a_payload_is_refused() -> None:
    codecs = rm.Compression(up="sign", down="relay")
    server, worker = ParameterVersions(SPECS, initial_state(SPECS, START), 0, codecs), exchange_of(SPECS, codecs)
    with pytest.raises(RemoteProtocolError, match="as a change since 0, which this worker has not"):
        worker.take(rm.Parameters(version=1, since=0, digest="d"), {PAYLOAD: np.zeros(1, np.uint8)})
    params = taken(worker, rm.Parameters(version=0), server.of_version(0))
    sent = worker.give(task(4, params, trained(params, 1)))
    _, tensors = server.read(result(4, sent.digest), sent.tensors)
    server.take_outer_step(1, [(4, 1, server.attach(tensors, sent.tensors[PAYLOAD], sent.digest))], Radial())
    message, change = sent_to(server, 1, [4])
    assert list(change) == [COEFFICIENTS]
    other = exchange_of(SPECS, codecs)
    taken(other, rm.Parameters(version=0), START_MASTERS)
    with pytest.raises(RemoteProtocolError, match="without the payload of task 4"):
        other.take(message, change)
    assert worker.expects(message, "payload-4") == TensorSpec("payload-4", "ui8", sent.tensors[PAYLOAD].shape)
    assert worker.expects(message, "payload-5") is None
    taken(worker, message, change)
    taken(worker, rm.Parameters(version=0), START_MASTERS)  # to evaluate an older version
    again = taken(worker, message, change)
    assert again["w"].tobytes() == server.state.params["w"].tobytes()
