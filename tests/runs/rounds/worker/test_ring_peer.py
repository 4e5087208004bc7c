"""Workers of a ring reduce through real communicators, and refuse to add a result that they do not have."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest

from planetary.collectives import Master, Quantization, ReduceOp
from planetary.collectives.reduction import quantise
from planetary.core.errors import LocalProtocolError
from planetary.core.registry import Chosen
from planetary.core.schedules import Schedule
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec
from planetary.machine.events import Event
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.worker.events import ReduceBroke, ReduceSucceeded
from planetary.runs.rounds.worker.ring_peer import RingPeer
from planetary.sync.outer import initial_state
from planetary.sync.ring import state_tensors
from waiting import HANG_S

PARAMS = (TensorSpec("w", "f32", (1000,)),)
SPEC = StepSpec("small", PARAMS, (), (), (), "0" * 64)


def job(port: int, bits: int = 0) -> rm.TrainingJob:
    ring = rm.RingJob(
        port=port,
        connections=1,
        precision="f32",
        outer=Chosen("nesterov", {"learning_rate": 1.0, "momentum": 0.0}),
        gather_s=20.0,
        measures=True,
        bits=bits,
    )
    return rm.TrainingJob(
        run="r", artifact="", buffers="", spec=SPEC, inner_state="reset", schedule=Schedule(), ring=ring
    )


def reduced(bits: int) -> tuple[list[ReduceSucceeded], np.ndarray, np.ndarray]:
    """Reduce once among three workers; return their answers, the parameters of one, and the exact ones."""
    if bits:
        quantise.check(Quantization(bits=bits), "f32", ReduceOp.SUM)  # compiles its loops
    master = Master("127.0.0.1:0")
    master.start()
    events: queue.Queue[Event] = queue.Queue()
    random = np.random.default_rng(3)
    start = initial_state(PARAMS, {"w": random.normal(size=1000).astype(np.float32)})
    ends = [start.params["w"] + random.normal(scale=0.1, size=1000).astype(np.float32) for _ in range(3)]
    port = int(master.address.rpartition(":")[2])
    peers = [RingPeer(f"node-{i}/0", "127.0.0.1", "", job(port, bits), events.put) for i in range(3)]
    try:
        for task, peer in enumerate(peers):
            peer.received(0, state_tensors(start))
            peer.use(0, (0,))
            peer.start_from(0)()
            peer.hold(task, 1, 10, {"w": ends[task]})
        for task, peer in enumerate(peers):
            peer.reduce(rm.Reduce(round=1, attempt=1, group=1, peers=3, own={task: 10}, contributions=3, tokens=30))
        answers = [events.get(timeout=HANG_S) for _ in peers]
        assert all(isinstance(answer, ReduceSucceeded) for answer in answers), answers
        peers[0].use(1, (1,))
        found = peers[0].tensors(1)["w"]
    finally:
        for peer in peers:
            peer.close()
        master.stop()
    return [a for a in answers if isinstance(a, ReduceSucceeded)], np.asarray(found), np.mean(ends, axis=0)


@pytest.mark.parametrize(
    ("bits", "worst", "share"),
    [
        (0, 1e-5, 1.0),
        pytest.param(8, 0.01, 0.30, marks=pytest.mark.slow),  # the loops are compiled
        pytest.param(4, 0.15, 0.20, marks=pytest.mark.slow),
    ],
)
def test_peers_get_equal_bits_in_fewer_bytes(bits: int, worst: float, share: float) -> None:
    answers, found, exact = reduced(bits)
    assert len({answer.digest for answer in answers}) == 1
    assert np.abs(found - exact).max() <= worst
    plain = 2 * 2 / 3 * 4000  # bytes of float32 that each of three sends
    assert all(answer.sent_bytes <= share * plain * 1.05 for answer in answers)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ({"own": {1: 10, 2: 10}}, "it has no result of task 2, expected one of 10 tokens"),
        ({"own": {1: 20}}, "its result of task 1 has 10 tokens, expected 20"),
        ({"round": 2}, "it has the outer state of round 0, expected 1"),
    ],
    ids=["absent", "other weight", "other state"],
)
def test_peer_refuses_to_add_what_it_has_not(order: dict[str, Any], reason: str) -> None:
    events: queue.Queue[Event] = queue.Queue()
    peer = RingPeer("node-0/0", "127.0.0.1", "", job(1), events.put)
    start = initial_state(PARAMS, {"w": np.zeros(1000, np.float32)})
    sound = {"round": 1, "attempt": 1, "group": 1, "peers": 1, "own": {1: 10}, "contributions": 1, "tokens": 10}
    try:
        peer.received(0, state_tensors(start))
        peer.use(0, (0,))
        peer.start_from(0)()
        peer.hold(1, 1, 10, {"w": np.ones(1000, np.float32)})
        peer.reduce(rm.Reduce(**{**sound, **order}))
        assert events.get(timeout=HANG_S) == ReduceBroke(order.get("round", 1), 1, "refused", reason)
        peer.reduce(rm.Reduce(**sound))
        assert isinstance(events.get(timeout=HANG_S), ReduceSucceeded)
    finally:
        peer.close()


def test_lease_does_not_begin_ahead_of_an_absent_result() -> None:
    peer = RingPeer("node-0/0", "127.0.0.1", "", job(1), lambda event: None)
    peer.received(0, state_tensors(initial_state(PARAMS, {"w": np.zeros(1000, np.float32)})))
    peer.use(0, (0,))
    with pytest.raises(LocalProtocolError, match=r"results of tasks \[7\], and lacks one"):
        peer.start_from(0, (7,), 10)()
    peer.close()
