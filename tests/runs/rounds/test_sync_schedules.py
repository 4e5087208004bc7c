"""The rules and modes of synchronisation under random fault schedules; `fault_schedules.check` says what must hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from fault_schedules import run_schedule, sweep

from planetary.fleet.protocol.records import TaskAborted
from planetary.runs.rounds.changes import RelayedChange
from planetary.runs.rounds.records import LeaseAssigned, ParametersSent, RoundMerged, RoundsResumed
from planetary.simulation.rounds.cluster import SimCluster
from planetary.sync.relay import RelayedVersion
from random_schedules import SLOW_SEEDS

RADIAL = ("outer.merge=rda", "sync.precision=f32")


@pytest.mark.parametrize("ring", [False, True], ids=["star", "ring"])
def test_radial_averaging_survives_random_faults(ring: bool) -> None:
    assert sweep(range(4000, 4002), ring=ring, given=RADIAL).records[RoundMerged] >= 2 * 6


@pytest.mark.slow
@pytest.mark.parametrize("ring", [False, True], ids=["star", "ring"])
def test_radial_averaging_survives_more_random_faults(ring: bool) -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 26), ring=ring, given=RADIAL).records[RoundsResumed] > 0


def coded(up: str, down: str, merge: str = "mean") -> tuple[str, ...]:
    # With one of eight numbers a round, or eight of one size, Nesterov's velocity overshoots; SparseLoCo takes plain
    # steps of SGD.
    plain = ("outer.momentum=0", "outer.learning_rate=1.0") if up in ("sparse", "sign") or down == "relay" else ()
    return (f"sync.compression={up}", f"sync.broadcast_compression={down}", f"outer.merge={merge}", *plain)


@pytest.mark.parametrize("given", [coded("int4", "int8"), coded("sparse", "fp4", "senders")], ids="-".join)
def test_compressed_updates_survive_random_faults(given: tuple[str, ...]) -> None:
    assert sweep(range(4100, 4103), given=given).records[RoundMerged] >= 3 * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        coded("int4", "int4"),
        coded("sparse", "sparse", "senders"),
        coded("sign", "sign", "rda"),
        coded("bf16", "none"),
        coded("float32", "int8"),
    ],
    ids="-".join,
)
def test_compressed_updates_survive_more_random_faults(given: tuple[str, ...]) -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 15), given=given).records[RoundsResumed] > 0


RELAY = (*coded("sign", "relay", "rda"), "sync.start_compression=int8")


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make whole parameters larger than any payloads: the model has eight numbers."""
    monkeypatch.setattr(RelayedChange, "whole_bytes", 1 << 30)


def relayed(cluster: SimCluster) -> Counter[str]:
    """Return how often parameters were sent in each form; the workers of the run had equal bits."""
    broken = [r for r in cluster.journal if isinstance(r, TaskAborted) and r.kind == "parameters"]
    assert not broken, broken[0].reason
    return Counter(r.form for r in cluster.journal if isinstance(r, ParametersSent))


EAGER_RELAY = (*coded("sign", "relay"), "sync.start_compression=int8", "sync.overlap=eager", "outer.loss_rise=0")
EAGER_RADIAL = (*EAGER_RELAY, "outer.merge=rda")


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("given", [RELAY, EAGER_RELAY, EAGER_RADIAL], ids=["none", "eager", "eager-rda"])
def test_relayed_updates_survive_random_faults(given: tuple[str, ...]) -> None:
    forms = sum((relayed(run_schedule(seed, given=given)) for seed in range(4500, 4503)), Counter())
    assert min(forms["relay"], forms["whole"], forms["int8"]) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    "given",
    [RELAY, (*RELAY, "sync.compression=float32", "fabric.leases=measured"), EAGER_RADIAL],
    ids=["sign", "float32", "eager"],
)
def test_relayed_updates_survive_more_random_faults(given: tuple[str, ...]) -> None:
    runs = [
        run_schedule(seed, checkpoint_every=1 + seed % 2, given=given) for seed in range(SLOW_SEEDS, SLOW_SEEDS + 12)
    ]
    forms = sum(map(relayed, runs), Counter())
    assert forms["relay"] > 12 * 6
    assert any(isinstance(record, RoundsResumed) for run in runs for record in run.journal)


def test_small_model_is_sent_whole_beside_larger_payloads() -> None:
    forms = relayed(run_schedule(4501, given=RELAY))
    assert forms["whole"] > forms["relay"]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("given", [RELAY, EAGER_RELAY], ids=["none", "eager"])
def test_worker_with_other_bits_is_sent_whole_parameters(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, of a version in the middle of the run: the version before stays, and the worker trains on after it."""
    advance, calls = RelayedVersion.advance, Counter[str]()

    def broken(self: RelayedVersion, payloads: Any, coefficients: np.ndarray, *rest: Any, **more: Any) -> None:
        calls[rest[1]] += 1
        factor = 1.001 if (len(calls), calls[rest[1]]) == (3, 1) else 1.0
        advance(self, payloads, coefficients * factor, *rest, **more)

    monkeypatch.setattr(RelayedVersion, "advance", broken)
    journal = run_schedule(4503, given=given).journal
    aborted = [r for r in journal if isinstance(r, TaskAborted) and r.kind == "parameters"]
    assert {r.worker for r in aborted} == {aborted[0].worker}
    assert "computes other bits than the gateway" in aborted[0].reason
    after = [r for r in journal[journal.index(aborted[0]) :] if isinstance(r, ParametersSent)]
    own = [(r.form, r.why) for r in after if r.worker == aborted[0].worker]
    assert own[0] == ("whole", "it has no parameters")
    assert own[-1][0] == "relay"


ADAM = ("outer.optimizer=adam", "outer.learning_rate=0.2", "outer.momentum=0.5", "outer.merge=mean")
IN_FRAGMENTS = (*ADAM, "sync.overlap=streaming", "sync.fragments=2", "sync.delay=2", "outer.loss_rise=0")


@pytest.mark.parametrize(
    "more",
    [{"given": ADAM}, {"given": ADAM, "ring": True}, {"given": IN_FRAGMENTS}],
    ids=["star", "ring", "streaming"],
)
def test_outer_adam_survives_random_faults(more: dict[str, Any]) -> None:
    assert sweep([4600], **more).records[RoundMerged] >= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"given": (*ADAM, "outer.merge=rda", "sync.precision=f32"), "ring": True},
        {"given": IN_FRAGMENTS, "checkpoint_every": 2},
        {"given": (*ADAM, "sync.compression=int4", "sync.broadcast_compression=int8")},
    ],
    ids=["ring", "streaming", "coded"],
)
def test_outer_adam_survives_more_random_faults(more: dict[str, Any]) -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 9), **more).records[RoundsResumed] > 0


EAGER = ("sync.overlap=eager",)


@pytest.mark.slow
def test_eager_overlap_survives_random_faults() -> None:
    assert sweep(range(4200, 4202), overlap=True, given=EAGER).records[RoundMerged] >= 2 * 6


@pytest.mark.slow
def test_eager_overlap_survives_more_random_faults() -> None:
    assert sweep(range(SLOW_SEEDS, SLOW_SEEDS + 27), overlap=True, given=EAGER).records[RoundsResumed] > 0


def test_eager_round_begins_with_the_workers_own_part() -> None:
    cluster = run_schedule(4203, overlap=True, given=EAGER)
    assigned = [r for r in cluster.journal if isinstance(r, LeaseAssigned)]
    ahead = [r for r in assigned if r.ahead]
    assert ahead
    owners = {r.task: r.worker for r in assigned}
    assert all(owners[task] == r.worker for r in ahead for task in r.ahead)


def test_the_merged_delta_is_measured_in_every_round_of_the_star() -> None:
    cluster = run_schedule(4000)
    ends = [r.merged for r in cluster.journal if isinstance(r, RoundMerged)]
    assert all(merged is not None and merged.radial_ratio is not None for merged in ends)
    assert any(merged.autocorrelation is not None and merged.effective_rate is not None for merged in ends if merged)
    assert all(merged.radial_ratio <= 1 + 1e-9 for merged in ends if merged is not None and merged.radial_ratio)


QUANTISED = ("sync.precision=f32", "outer.merge=mean", "sync.ring_compression=int8", "sync.ring_order=measured")


@pytest.mark.parametrize("seed", [4400, pytest.param(4401, marks=pytest.mark.slow)])
@pytest.mark.parametrize("more", [{}, {"overlap": True, "given": (*QUANTISED, *EAGER)}], ids=["ring", "eager"])
def test_a_measured_and_quantised_ring_survives_random_faults(more: dict[str, Any], seed: int) -> None:
    seen = sweep([seed], **{"ring": True, "given": QUANTISED, **more})
    assert seen.records[RoundMerged] >= 6
