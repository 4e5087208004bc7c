"""Acceptance of an expert worker's result: every array is checked, and nothing of a refused one stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixture_checks import check_answers, check_equal, check_streams, of_kind, spoil, waiting_work
from mixture_stage import MixtureStage, make_plan
from moe_support import BASE, OPTIONS, train
from msgspec.structs import replace

from planetary.core.errors import LocalProtocolError, RemoteProtocolError
from planetary.fleet.protocol.records import TaskAborted
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.controller.tasks import Improving
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.methods.delta import Delta
from planetary.runs.mixture.methods.moments import MomentRule
from planetary.runs.mixture.payloads.experts import added, experts_from
from planetary.runs.mixture.records import Experts, ExpertsAdvanced, ExpertWorkEnded, MixtureState, SyncNote
from planetary.runs.mixture.training.audit import accept_slots
from planetary.runs.mixture.training.expert_work import HeldExperts, Improved
from planetary.runs.mixture.training.settings import MoeTraining

SLOTS = np.array([4, 7, -1], np.int32)  # the last one is empty
SHAPES = {"up": (3, 6, 8), "down": (3, 8, 6)}
TRAINING = replace(BASE, sketches="owner", acceptance=Policy(norm_ratio=1.0))
LOSSY = replace(TRAINING, update_form="4bit")
MUON = replace(TRAINING, experts=replace(OPTIONS, optimizer="muon"))


def some(seed: int, scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def stepped(moments: dict[str, np.ndarray], gradient: dict[str, np.ndarray], optimizer: str) -> dict[str, np.ndarray]:
    """Moments after one gradient."""
    kind, beta = ("adam", OPTIONS.beta1) if optimizer == "adamw" else ("muon", OPTIONS.momentum)
    after: dict[str, np.ndarray] = {f"{kind}.count": moments[f"{kind}.count"] + np.int32(1)}
    for name, g in gradient.items():
        after[f"{kind}.mean.{name}"] = np.float32(beta) * moments[f"{kind}.mean.{name}"] + np.float32(1 - beta) * g
        if kind == "adam":
            held = moments[f"adam.square.{name}"]
            after[f"adam.square.{name}"] = np.float32(OPTIONS.beta2) * held + np.float32(1 - OPTIONS.beta2) * g * g
    return after


def experts(training: MoeTraining) -> tuple[HeldExperts, Improved]:
    """Experts some steps into a run, and an honest worker's result."""
    optimizer = training.experts.optimizer
    kind = "adam" if optimizer == "adamw" else "muon"
    moments: dict[str, np.ndarray] = {f"{kind}.count": np.array(0, np.int32)}
    for what in ("mean", "square") if kind == "adam" else ("mean",):
        moments |= {f"{kind}.{what}.{name}": np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for step in range(3):
        moments = stepped(moments, some(step, 0.1), optimizer)
    weights, left = some(10, 0.3), some(11, 1e-4)
    before = HeldExperts(weights, moments, left if training.update_form != "exact" else {})
    moved = {name: value + some(12, 1e-3)[name] for name, value in weights.items()}
    after = stepped(moments, some(3, 0.1), optimizer)
    residuals = some(13, 1e-4) if training.update_form != "exact" else {}
    return before, Improved(moved, after, np.ones(3), np.zeros(3), residuals)


def accept(
    before: HeldExperts, improved: Improved, training: MoeTraining, **more: Any
) -> tuple[HeldExperts, list[str]]:
    after, verdicts = accept_slots(before, improved, training, layer=0, owner=0, slots=SLOTS, **more)
    assert all(verdict.why for verdict in verdicts)
    return after, [str(verdict.refusal) for verdict in verdicts]


def spoiled(improved: Improved, bad: tuple[str, str, float], slot: int) -> Improved:
    """One number of one slot is another one; `bad`: group, name, number."""
    group, name, value = bad
    arrays = dict(getattr(improved, group))
    arrays[name] = arrays[name].copy()
    arrays[name][slot].flat[0] = value
    return replace(improved, **{group: arrays})


@pytest.mark.parametrize("training", [TRAINING, LOSSY, MUON], ids=["adam", "lossy", "muon"])
def test_an_honest_result_counts(training: MoeTraining) -> None:
    before, improved = experts(training)
    after, said = accept(before, improved, training)
    assert said == ["accepted", "accepted"]
    for name, value in improved.moments.items():
        assert (after.moments[name][:2] == value[:2]).all() if value.ndim else after.moments[name] == value
    assert (after.weights["up"][2] == before.weights["up"][2]).all()


BAD = [
    (TRAINING, ("weights", "up", np.nan), "not finite"),
    (TRAINING, ("weights", "up", 1e6), "too large"),
    (TRAINING, ("moments", "adam.mean.up", np.nan), "not finite"),
    (TRAINING, ("moments", "adam.square.down", np.inf), "not finite"),
    (TRAINING, ("moments", "adam.square.up", -1.0), "moments"),
    (TRAINING, ("moments", "adam.square.up", 1e30), "moments"),
    (TRAINING, ("moments", "adam.square.up", 0.0), "moments"),
    (TRAINING, ("moments", "adam.mean.up", 1.0), "moments"),
    (MUON, ("moments", "muon.mean.up", np.nan), "not finite"),
    (MUON, ("moments", "muon.mean.up", 1e30), "moments"),
    (LOSSY, ("residuals", "down", np.nan), "not finite"),
    (LOSSY, ("residuals", "down", 1e3), "residual"),
    (replace(LOSSY, update_form="topk"), ("residuals", "down", np.nan), "not finite"),
]


@pytest.mark.parametrize("whole", [False, True], ids=["slot", "whole"])
@pytest.mark.parametrize(("training", "bad", "reason"), BAD)
def test_nothing_of_a_bad_result_stays(
    training: MoeTraining, bad: tuple[str, str, float], reason: str, whole: bool
) -> None:
    before, improved = experts(training)
    result = spoiled(improved, bad, 1)
    if whole:
        result = spoiled(result, bad, 0)
    after, said = accept(before, result, training)
    assert said == [reason if whole else "accepted", reason]
    assert (after is before) == whole
    for part in ("weights", "moments", "residuals"):
        held, old, new = (getattr(one, part) for one in (after, before, improved))
        for tensor, array in held.items():
            if array.ndim:
                assert (array[1] == old[tensor][1]).all()
                assert whole or (array[0] == new[tensor][0]).all()


@pytest.mark.parametrize("count", [-1, 2**31 - 1, 3, 5])
@pytest.mark.parametrize("training", [TRAINING, MUON], ids=["adam", "muon"])
def test_foreign_step_count_refuses_the_whole_result(training: MoeTraining, count: int) -> None:
    before, improved = experts(training)
    name = next(name for name in before.moments if name.endswith(".count"))
    bad = replace(improved, moments={**improved.moments, name: np.array(count, np.int32)})
    after, said = accept(before, bad, training)
    assert said == ["moments", "moments"]
    assert after is before
    more = replace(training, inner_steps=2)
    assert accept(before, bad, more)[1] == (["accepted"] * 2 if count == 5 else ["moments"] * 2)


def test_refused_result_keeps_the_count_and_old_ones_fail() -> None:
    """A refused result leaves the count of steps and an old one is refused."""
    before, improved = experts(TRAINING)
    late, said = accept(before, improved, TRAINING, versions=(5, 2))
    assert said == ["stale", "stale"]
    assert late is before
    assert accept(before, improved, TRAINING, versions=(5, 6))[1] == ["future", "future"]
    assert accept(before, improved, TRAINING, versions=(5, 3))[1] == ["accepted", "accepted"]
    useless = replace(improved, proxy_after=np.ones(3))
    after, said = accept(before, useless, TRAINING)
    assert said == ["no gain", "no gain"]
    assert after.moments["adam.count"] == 3


def test_residuals_survive_an_exact_update() -> None:
    before, improved = experts(LOSSY)
    exactly = spoiled(replace(improved, residuals={}), ("weights", "up", np.nan), 1)
    after, said = accept(before, exactly, LOSSY)
    assert said == ["accepted", "not finite"]
    check_equal(after.residuals, before.residuals)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "lion"])
@pytest.mark.slow
def test_no_moments_of_honest_steps_are_taken_for_impossible(optimizer: Any) -> None:
    options = replace(OPTIONS, optimizer=optimizer, average_decay=0.5 if optimizer == "adamw" else 0.0)
    accepting = {"sketches": "owner", "acceptance": Policy(norm_ratio=10), "experts": options}
    _, states, reports = train(6, **accepting)
    said = [str(v.refusal) for report in reports for v in report.verdicts]
    assert set(said) <= {"accepted", "no gain"}
    assert said.count("accepted") > len(said) / 2
    rule = MomentRule(options)
    for composer in states[-1].composers:
        for held, moments in zip(composer.experts, composer.expert_moments, strict=True):
            each = {n: v[0] for n, v in moments.items() if v.ndim}
            assert rule.impossible(each, {n: v[0] for n, v in held.items()}, 6) == ""


def test_adams_mean_and_squares_are_of_the_same_gradients() -> None:
    """The most that the mean can be over the root of the squares is reached by gradients that grow just so."""
    for beta1, beta2 in ((0.9, 0.95), (0.9, 0.999), (0.5, 0.25), (0.9, 0.5), (0.9, 0.0)):
        rule = MomentRule(replace(OPTIONS, beta1=beta1, beta2=beta2))
        m1, v = np.zeros(1), np.zeros(1)
        for count in range(1, 40):
            g = np.array([(beta2 / beta1) ** count if beta2 else 1.0])
            m1, v = beta1 * m1 + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            assert rule.impossible({"adam.mean.up": m1, "adam.square.up": v}, {"up": np.ones(1)}, count) == ""
        if beta2 > beta1**2:
            far = {"adam.mean.up": 1.05 * m1, "adam.square.up": v}
            assert "times the root" in rule.impossible(far, {"up": np.ones(1)}, 39)


# --- on the fabric ----------------------------------------------------------------------------------------------


def wrong(group: str, name: str, value: float) -> Callable[[Improved], Improved]:
    def change(improved: Improved) -> Improved:
        arrays = dict(getattr(improved, group))
        arrays[name] = np.full_like(arrays[name], value)
        return replace(improved, **{group: arrays})

    return change


@pytest.mark.parametrize(
    ("form", "bad", "reason"),
    [
        ("exact", ("moments", "adam.count", -1), "moments"),
        ("exact", ("moments", "adam.square.up", -1), "moments"),
        ("exact", ("moments", "adam.square.up", 1e30), "moments"),
        ("4bit", ("residuals", "up", np.nan), "not finite"),
    ],
)
@pytest.mark.slow
def test_honest_worker_is_unaffected_by_impossible_state(
    tmp_path: Path, form: Any, bad: tuple[str, str, float], reason: str
) -> None:
    """After a worker with impossible state an honest one goes on as if nothing had been."""
    options = {"sketches": "owner", "acceptance": Policy(norm_ratio=10), "update_form": form}
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=40, **options), seed=9)
    for one in "abw":
        cluster.start(one)
    first = {key: held.payload for key, held in cluster.controller.state.experts.items()}
    spoil(cluster.workers["w"], wrong(*bad))
    cluster.until(lambda: len(of_kind(cluster, ExpertsAdvanced)) > 3)
    cluster.kill(cluster.workers["w"])
    refused = of_kind(cluster, ExpertsAdvanced)
    assert {why for record in refused for why in record.refused} == {reason}
    told = [note.why for note in of_kind(cluster, SyncNote) if note.what == reason]
    assert told
    assert all(why.startswith("w: layer 0 expert") for why in told)
    assert {record.version for record in refused} == {0}
    assert {key: held.payload for key, held in cluster.controller.state.experts.items()} == first
    cluster.start("x")
    assert cluster.finish().ok
    good = [record for record in of_kind(cluster, ExpertsAdvanced) if record.worker == "x"]
    assert sum(record.accepted for record in good) > sum(sum(record.refused.values()) for record in good)
    assert not {why for record in good for why in record.refused} - {"no gain"}
    assert not of_kind(cluster, TaskAborted)
    check_streams(cluster)


@pytest.mark.slow
def test_refused_update_makes_no_version(tmp_path: Path) -> None:
    """A refused update makes no version and brings composers nothing but the word."""
    plan = make_plan(tmp_path, steps=24, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=9)
    a, _, w = (cluster.start(name) for name in "abw")
    spoil(w, wrong("weights", "up", np.nan))
    cluster.until(lambda: a.machine.done >= 12)
    shard = a.machine.shard
    told = [s for s in cluster.told if isinstance(s, mm.ExpertsUpdate) and s.shard == shard]
    assert {(s.version, s.base, bool(s.payload)) for s in told[1:]} == {(0, 0, False)}
    assert len({s.step for s in told}) > 3  # no composer waits
    updates = of_kind(cluster, ExpertsAdvanced)
    assert {(record.version, record.accepted) for record in updates} == {(0, 0)}
    cluster.restart_gateway()
    assert {held.version for held in cluster.controller.state.experts.values()} == {0}
    assert max(held.step for held in cluster.controller.state.experts.values()) == max(r.step for r in updates)
    assert cluster.finish().ok
    for (number, layer), held in cluster.controller.state.experts.items():
        start = cluster.prepared.initial().composers[number]
        found = experts_from(cluster.store.get(held.payload))
        check_equal(found.weights, start.experts[layer])
        check_equal(found.moments, start.expert_moments[layer])


@pytest.mark.slow
def test_work_lagging_beyond_the_window_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Composers that were told a wider window than the gateway's, while no expert worker is there."""
    plan = make_plan(tmp_path, steps=60, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=3)
    wider = replace(plan.training, acceptance=Policy(norm_ratio=10, window=5 * plan.window))
    cluster.told_plan = replace(plan, training=wider)
    a, b = cluster.start("a"), cluster.start("b")
    for _ in range(5):
        done = a.machine.done
        cluster.until(lambda done=done: min(a.machine.done, b.machine.done) >= done + 3)
        for worker in (a, b):
            cluster.cut(worker)
            cluster.connect(worker)
    cluster.restart_gateway()
    assert len(cluster.controller.board.waiting) > 4 * plan.window
    cluster.start("w")
    cluster.until(lambda: check_answers(cluster) or cluster.finished is not None)
    assert cluster.finish().ok
    given_up = of_kind(cluster, ExpertWorkEnded)
    made_with = {(s.shard, s.layer, s.step): s.version for s in cluster.sent if isinstance(s, mm.OfferSketches)}
    updates = of_kind(cluster, ExpertsAdvanced)
    lags = [
        record.version - (record.accepted > 0) - made_with[record.shard, record.layer, record.step]
        for record in updates
    ]
    assert max(lags) <= plan.window
    assert max(record.step for record in updates) > 20
    assert len(given_up) > plan.window
    stale = cluster.controller.rounds.updates.get("stale", 0)
    stale += sum(line.own.updates.get("stale", 0) for line in cluster.lines if line.own)
    # The others were too old, as their composers knew.
    assert 0 < stale <= sum(plan.owners[work.layer].count(work.shard) for work in given_up)
    check_streams(cluster)


def test_update_of_another_shape_is_refused_before_allocation() -> None:
    """An update of another shape is refused before anything of that shape is made."""
    before, _ = experts(LOSSY)
    parts = np.zeros(1, np.uint32), np.ones(1, np.float32)
    large = {"up": Delta("topk", (200_000, 4, 64, 64), parts)}  # of 12 GiB
    with pytest.raises(RemoteProtocolError, match="other tensors than they: up"):
        added(before.weights, large)
    with pytest.raises(RemoteProtocolError, match="other tensors than they: gate"):
        added(before.weights, {"gate": Delta("topk", SHAPES["up"], parts)})


@pytest.mark.slow
def test_lock_step_lags_nowhere_even_before_experts_come(tmp_path: Path) -> None:
    """Without surrogates nothing makes a composer wait for them with its first step."""
    policy = Policy(norm_ratio=10, window=0)
    plan = make_plan(tmp_path, steps=8, pace="lockstep", rank=0, sketches="owner", acceptance=policy)
    cluster = MixtureStage(tmp_path, plan, seed=1)
    for name in "abw":
        cluster.start(name).slow(down_s=3.0)
    assert cluster.finish().ok
    assert not any("stale" in record.refused for record in of_kind(cluster, ExpertsAdvanced))


@pytest.mark.slow
def test_failed_work_ends_lock_step_and_is_answered_otherwise(
    tmp_path: Path,
) -> None:
    for pace in ("lockstep", "free"):
        folder = tmp_path / pace
        folder.mkdir()
        plan = make_plan(folder, steps=24, pace=pace, sketches="owner", acceptance=Policy(norm_ratio=10))
        cluster = MixtureStage(folder, plan, seed=10)
        cluster.start("a")
        cluster.start("b")
        cluster.until(lambda cluster=cluster: any(isinstance(s, mm.OfferSketches) for s in cluster.sent))
        gone = next(s for s in cluster.sent if isinstance(s, mm.OfferSketches))
        key = gone.shard, gone.layer, gone.step
        cluster.until(lambda cluster=cluster, key=key: key in cluster.controller.state.work)
        board = cluster.controller.board
        (task,) = [one for one in board if isinstance(one, Improving) and one.work.key == key]
        for _ in range(3):
            board.lend(-1, [task], "work", cluster.now)
            board.lost(-1)
        cluster.start("w")
        end = cluster.finish()
        assert end.ok == (pace == "free")
        if pace == "lockstep":
            assert (
                f"no expert worker could improve the experts of shard {gone.shard} layer {gone.layer} after step 1"
                in end.reason
            )
        else:
            failed = sum(line.own.updates.get("failed", 0) for line in cluster.lines if line.own)
            assert failed == plan.owners[gone.layer].count(gone.shard)


def test_old_journal_with_refused_versions_is_read_unchanged() -> None:
    """A journal in which refused updates made versions is read as it was."""
    state = MixtureState(steps_per_round=4)
    state.experts[0, 0] = Experts("before", 4, 3)
    refused = {"shard": 0, "layer": 0, "step": 5, "worker": "w", "accepted": 0, "refused": {"no gain": 2}, "change": ""}
    state.apply(ExpertsAdvanced(version=5, payload="after", **refused))
    assert (state.experts[0, 0].version, state.experts[0, 0].payload) == (5, "after")
    state.apply(ExpertsAdvanced(version=5, payload="other", **refused))
    assert (state.experts[0, 0].version, state.experts[0, 0].payload) == (5, "after")
    with pytest.raises(LocalProtocolError, match="they cannot be at 7 then"):
        state.apply(ExpertsAdvanced(version=7, payload="after", **refused))


@pytest.mark.slow
def test_sketches_that_come_too_late_are_counted_as_sketches(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=24, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=9)
    a, _, _ = (cluster.start(name) for name in "abw")
    cluster.until(lambda: min(held.version for held in cluster.controller.state.experts.values()) > plan.window)
    offer = next(s for s in cluster.sent if isinstance(s, mm.OfferSketches) and s.shard == a.machine.shard)
    payload = cluster.store.get(offer.payload)
    refused = dict(cluster.controller.rounds.refused_sketches)
    for version in (offer.version, 99):
        again = replace(offer, epoch=a.machine.epoch, version=version)
        a.say(again, payload)
    cluster.until(lambda: cluster.controller.rounds.refused_sketches.get("future", 0) > refused.get("future", 0))
    assert (offer.shard, offer.step) not in {(work.shard, work.step) for work in waiting_work(cluster)}
    found = cluster.controller.rounds.refused_sketches
    assert {what: n - refused.get(what, 0) for what, n in found.items()} == {"stale": 1, "future": 1}
    assert cluster.finish().ok
    reported: dict[str, int] = {}
    for line in cluster.lines:
        for what, n in line.own.refused_sketches.items():
            reported[what] = reported.get(what, 0) + n
    assert reported["future"] == 1
