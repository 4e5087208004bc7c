"""Expert workers of a mixture in one process: equal to the trainer, lossy, dead, and wrong."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixture_checks import check_equal, check_steps, check_streams, composing, of_kind, trained, waiting_work
from mixture_stage import MixtureStage, make_plan
from moe_support import TINY
from msgspec.structs import replace

from planetary.artifacts.packed_arrays import Packed, unpack_arrays
from planetary.artifacts.store import digest_of
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerLost
from planetary.machine.board import TaskTimes
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.controller.events import AssembleModel
from planetary.runs.mixture.gateway.payload_work import assembled_model
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.methods.delta import Form
from planetary.runs.mixture.methods.sketch import decode, encode
from planetary.runs.mixture.payloads.experts import (
    experts_from,
    improved_bytes,
    improved_from,
    weights_bytes,
    weights_from,
)
from planetary.runs.mixture.payloads.payloads import sketch_bytes, sketch_from
from planetary.runs.mixture.payloads.surrogates import surrogates_bytes
from planetary.runs.mixture.records import ExpertsAdvanced, ShardGranted, SurrogatesRefreshed, SyncNote
from planetary.runs.mixture.training.expert_work import HeldExperts
from planetary.runs.mixture.training.participant_states import computed_weights, merged_model


@pytest.mark.parametrize(
    ("form", "more", "ternary"),
    [
        ("exact", {}, False),
        pytest.param("topk", {}, False, marks=pytest.mark.slow),
        pytest.param("exact", {"inner_steps": 2, "trust": 0.1, "sketch_fraction": 0.5}, False, marks=pytest.mark.slow),
        pytest.param("exact", {}, True, marks=pytest.mark.slow),
        pytest.param("4bit", {"rank": TINY.n_hidden, "refresh_form": "4bit"}, True, marks=pytest.mark.slow),
    ],
    ids=["exact", "topk", "inner steps", "ternary", "ternary copies"],
)
def test_expert_workers_in_lock_step_equal_the_trainer(tmp_path: Path, form: Form, more: dict, ternary: bool) -> None:
    options = {"sketches": "all", "acceptance": Policy(norm_ratio=10, spectral_ratio=10), "update_form": form, **more}
    plan = make_plan(tmp_path, steps=4, pace="lockstep", **options)
    plan = replace(plan, model=replace(plan.model, ternary=ternary))
    cluster = MixtureStage(tmp_path, plan)
    for name in ("a", "b", "c", "d"):
        cluster.start(name)
    assert cluster.finish().ok
    state = trained(plan)
    for composer in state.composers:
        found = composing(cluster, composer.number)
        assert not any(found.expert_moments)  # they live with the experts
        for layer, theirs in enumerate(composer.experts):
            held = experts_from(cluster.store.get(cluster.controller.state.experts[composer.number, layer].payload))
            check_equal(found.experts[layer], computed_weights(theirs, plan.model))
            check_equal(held.weights, theirs)
            check_equal(held.moments, composer.expert_moments[layer])
            check_equal(held.residuals, composer.residuals[layer])
        check_equal(found.dense, composer.dense)
    updates = cluster.lines[-1].own.updates
    assert sum(updates.values()) == plan.steps * plan.model.n_layer * plan.model.n_expert
    assert updates["accepted"] > 0
    changes = [s for s in cluster.told if isinstance(s, mm.ExpertsUpdate) and s.base >= 0 and s.payload]
    assert bool(changes) == (form != "exact" and not ternary)
    shards, experts = cluster.controller.state.shards, cluster.controller.state.experts_of
    made = assembled_model(cluster.store, [s.payload for s in shards], [experts(n) for n in range(len(shards))], plan)
    check_equal(made, merged_model(state, plan.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "source", "more"),
    [("exact", "owner", {}), ("4bit", "all", {}), ("exact", "all", {"delta_rank": 1})],
    ids=["owner", "lossy", "changes"],
)
def test_surrogates_fitted_by_expert_workers_are_the_trainers(
    tmp_path: Path, form: Form, source: str, more: dict
) -> None:
    """The data of a fit is in the work, for any worker that does it."""
    options = {"sketches": source, "precision": "4bit", "acceptance": Policy(norm_ratio=0.3), "update_form": form}
    plan = make_plan(tmp_path, steps=8, pace="lockstep", fitted_by="expert-workers", **options, **more)
    cluster = MixtureStage(tmp_path, plan)
    for name in ("a", "b", "c", "d"):
        cluster.start(name)
    assert cluster.finish().ok
    state = trained(plan)
    bank = state.surrogates
    assert bank is not None
    assert (bank.versions == 8).all()
    for composer in state.composers:
        found = composing(cluster, composer.number)
        driver = next(w.driver for w in cluster.workers.values() if w.machine.shard == composer.number)
        assert driver.bank is not None
        for layer in range(plan.model.n_layer):
            check_equal(found.experts[layer], composer.experts[layer])
            fitted, expected = dict(found.fitted[layer]), dict(composer.fitted[layer])
            assert fitted.pop("error") == pytest.approx(
                expected.pop("error"), rel=1e-4
            )  # measured again by the gateway
            check_equal(fitted, expected)
            assert (driver.bank.a[layer] == bank.a[layer]).all()
            assert (driver.bank.b[layer] == bank.b[layer]).all()
        assert not found.rows[0].gates.any()  # it remembers none
    fits = [s for s in cluster.told if isinstance(s, mm.ImproveExperts) and s.fits]
    assert {s.progress for s in fits} == {1, 3, 5, 7}
    shards = cluster.lines[-1].own.shards
    assert all(shard.surrogate_error is not None and 0 < shard.surrogate_error < 1 for shard in shards)


@pytest.mark.slow
def test_successor_of_an_expertless_state_gets_the_newest(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=24, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=2)
    a, _, _ = cluster.start("a"), cluster.start("b"), cluster.start("w")
    held = cluster.controller.state.experts
    cluster.until(lambda: held[0, 0].version >= 3 and held[1, 0].version >= 3)
    shard = a.machine.shard
    cluster.kill(a)
    newest = held[shard, 0].version
    again = cluster.start("a")
    cluster.until(lambda: again.machine.composes)
    assert again.machine.shard == shard
    assert min(again.machine.expert_versions) >= newest >= 3
    assert all({name: v.shape for name, v in one.items()} for one in again.driver.state.experts)
    assert cluster.finish().ok
    for kept in cluster.controller.state.shards:
        _, arrays = unpack_arrays(cluster.store.get(kept.payload), "shard")
        assert {path.split("/")[0] for path in arrays} == {"slots", "dense", "moments"}
    check_streams(cluster)


def test_experts_of_the_last_model_are_final(tmp_path: Path) -> None:
    """So a later reader of the run finds the model that was evaluated."""
    plan = make_plan(tmp_path, steps=16, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=4)
    for name in ("a", "b", "w"):
        cluster.start(name)
    assert cluster.finish().ok
    asked = [instruction for instruction in cluster.asked if isinstance(instruction, AssembleModel)]
    state = cluster.controller.state
    assert asked[-1].round == state.rounds
    assert asked[-1].experts == tuple(state.experts_of(shard) for shard in range(len(state.shards)))
    left = [lease for lease in cluster.told if isinstance(lease, mm.ImproveExperts)]
    assert len(left) >= len(of_kind(cluster, ExpertsAdvanced)) > 0


def test_ternary_experts_take_two_bits_a_weight() -> None:
    rng = np.random.default_rng(0)
    weights = {
        "up": rng.standard_normal((3, 16, 64)).astype(np.float32),
        "down": rng.standard_normal((3, 64, 16)).astype(np.float32),
    }
    held = HeldExperts(weights, {"adam.count": np.array(1, np.int32)})
    plain = weights_bytes(held, TINY)
    config = replace(TINY, ternary=True)
    packed = weights_bytes(held, config)
    assert len(plain) > 3 * 2 * 16 * 64 * 4
    assert len(packed) < 3 * 2 * 16 * 64 / 4 + 1000  # names and shapes
    found, surrogates = weights_from(packed)
    check_equal(found, computed_weights(weights, config))
    assert not surrogates


@pytest.mark.slow
def test_offloaded_surrogates_reach_changing_composers(tmp_path: Path) -> None:
    options = {"sketches": "owner", "precision": "4bit", "acceptance": Policy(norm_ratio=10), "update_form": "4bit"}
    plan = make_plan(tmp_path, steps=32, fitted_by="expert-workers", **options)
    cluster = MixtureStage(tmp_path, plan, seed=11)
    a, b, w = cluster.start("a"), cluster.start("b"), cluster.start("w")
    cluster.until(lambda: a.machine.done >= 8)
    cluster.kill(a)
    again = cluster.start("a")
    cluster.until(lambda: again.machine.composes and all(again.driver.state.fitted))
    cluster.kill(w)
    cluster.until(lambda: b.machine.done >= 20)
    published = of_kind(cluster, SurrogatesRefreshed)
    assert len({record.payload for record in published}) == len(published)
    for shard in (0, 1):  # after the updates in flight nothing is new
        updates = [record for record in of_kind(cluster, ExpertsAdvanced) if record.shard == shard]
        assert len([record for record in published if record.shard == shard]) <= len(updates)
    cluster.start("w")
    assert cluster.finish().ok
    assert len(of_kind(cluster, SurrogatesRefreshed)) > len(published)
    check_steps(cluster)
    check_streams(cluster)


@pytest.mark.slow
def test_refused_surrogates_are_published_again(tmp_path: Path) -> None:
    options = {"sketches": "owner", "precision": "4bit", "acceptance": Policy(norm_ratio=10)}
    plan = make_plan(tmp_path, steps=40, fitted_by="expert-workers", **options)
    cluster = MixtureStage(tmp_path, plan, seed=11)
    a, _, w = cluster.start("a"), cluster.start("b"), cluster.start("w")
    cluster.until(lambda: len(of_kind(cluster, SurrogatesRefreshed)) >= 2)
    cluster.until(lambda: all(a.driver.state.fitted) and min(int(f["progress"]) for f in a.driver.state.fitted) >= 6)
    shard = a.machine.shard
    published = [s.step for s in cluster.sent if isinstance(s, mm.PublishSurrogates) and s.of == shard]
    cluster.store_away = True
    cluster.until(
        lambda: [s.step for s in cluster.sent if isinstance(s, mm.PublishSurrogates) and s.of == shard] != published
    )
    cluster.kill(w)
    cluster.settle()
    refused = cluster.controller.state.shards[shard].surrogate_step
    cluster.store_away = False
    cluster.until(lambda: cluster.controller.state.shards[shard].surrogate_step > refused)
    assert cluster.finish().ok


@pytest.mark.parametrize(
    "value",
    [np.array(2**62, np.int64), pytest.param(np.array(np.nan, np.float32), marks=pytest.mark.slow)],
    ids=["huge", "nan"],
)
def test_the_gateway_dates_fits_of_surrogates(tmp_path: Path, value: np.ndarray) -> None:
    options = {"sketches": "owner", "precision": "4bit", "acceptance": Policy(norm_ratio=10)}
    plan = make_plan(tmp_path, steps=24, fitted_by="expert-workers", **options)
    cluster = MixtureStage(tmp_path, plan, seed=11)
    _, _, w = cluster.start("a"), cluster.start("b"), cluster.start("w")

    def lying(message: m.Message, payload: Packed) -> Packed:
        if not isinstance(message, mm.ExpertsImproved):
            return payload
        improved = improved_from(payload, HeldExperts({}, {}))
        if improved.surrogates:
            improved.surrogates["progress"] = value
        return improved_bytes(improved)

    w.change_sent(lying)
    assert cluster.finish().ok
    for held in cluster.controller.state.experts.values():
        found = experts_from(cluster.store.get(held.payload)).surrogates["progress"]
        assert found.dtype == np.int64
        assert 0 <= found < 24


@pytest.mark.slow
def test_useless_surrogates_are_refused_with_their_update(tmp_path: Path) -> None:
    """Useless surrogates are refused with the update that they came with."""
    plan = make_plan(
        tmp_path,
        steps=24,
        sketches="owner",
        acceptance=Policy(norm_ratio=10),
        fitted_by="expert-workers",
    )
    cluster = MixtureStage(tmp_path, plan, seed=17)
    a, _, w = cluster.start("a"), cluster.start("b"), cluster.start("w")
    factors = itertools.cycle([10.0, np.nan])

    def worse(message: m.Message, payload: Packed) -> Packed:
        if not isinstance(message, mm.ExpertsImproved):
            return payload
        improved = improved_from(payload, HeldExperts({}, {}))
        if improved.surrogates:
            improved.surrogates["b"] *= np.float32(next(factors))
        return improved_bytes(improved)

    w.change_sent(worse)
    cluster.until(lambda: a.machine.done >= 20)
    first = cluster.prepared.initial().composers
    for (shard, layer), held in cluster.controller.state.experts.items():
        found = experts_from(cluster.store.get(held.payload)).surrogates
        assert all((found[name] == first[shard].fitted[layer][name]).all() for name in ("a", "b"))
    counts: dict[str, int] = {}
    for record in of_kind(cluster, ExpertsAdvanced):
        for reason, count in record.refused.items():
            counts[reason] = counts.get(reason, 0) + count
    assert counts.keys() >= {"poor surrogate", "not finite"}
    assert any(record.accepted for record in of_kind(cluster, ExpertsAdvanced))  # where none was asked for
    assert cluster.finish().ok


@pytest.mark.parametrize("form", [pytest.param("bf16", marks=pytest.mark.slow), "4bit"])
def test_lossy_updates_reach_composers_that_come_and_go(tmp_path: Path, form: Form) -> None:
    """A change is only of use to who has what it changes; who comes back gets the weights whole."""
    options = {"sketches": "owner", "precision": "4bit", "acceptance": Policy(norm_ratio=10), "update_form": form}
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=24, **options), seed=11)
    a, _, w = cluster.start("a"), cluster.start("b"), cluster.start("w")
    cluster.until(lambda: a.machine.done >= 5)
    cluster.cut(a)
    cluster.connect(a)
    cluster.until(lambda: a.machine.done >= 9)
    cluster.kill(a)
    again = cluster.start("a")
    cluster.until(lambda: again.machine.composes)
    cluster.restart_gateway()
    assert cluster.finish().ok
    assert w.machine.shard == -1
    check_streams(cluster)
    for worker in (again, cluster.workers["b"]):
        state, machine = worker.driver.state, worker.machine
        assert state is not None
        for layer, version in enumerate(machine.expert_versions):
            newest = cluster.controller.state.experts[machine.shard, layer]
            held = experts_from(cluster.store.get(newest.payload))
            assert held.residuals
            if version == newest.version:
                check_equal(state.experts[layer], held.weights)


@pytest.mark.slow
def test_composers_never_wait_for_dead_expert_workers(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=40, sketches="owner", precision="4bit", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=8)
    a, _ = cluster.start("a"), cluster.start("b")
    for _ in range(3):
        worker = cluster.start("w")
        done = len(of_kind(cluster, ExpertsAdvanced))
        cluster.until(lambda: len(of_kind(cluster, ExpertsAdvanced)) > done + 1)  # noqa: B023
        cluster.kill(worker)
    before = a.machine.done
    cluster.until(lambda: a.machine.done >= min(before + 6, 40))  # no worker improves experts, and it goes on
    assert cluster.finish().ok
    check_streams(cluster)


@pytest.mark.parametrize(
    ("factor", "reason"), [(np.nan, "not finite"), pytest.param(1e6, "too large", marks=pytest.mark.slow)]
)
def test_nan_or_huge_expert_updates_are_counted_and_dropped(tmp_path: Path, factor: float, reason: str) -> None:
    """An expert worker that returns NaN or huge updates changes nothing and is counted."""
    plan = make_plan(tmp_path, steps=24, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=9)
    for name in ("a", "b", "w"):
        cluster.start(name)

    def spoil(message: m.Message, payload: Packed) -> Packed:
        if not isinstance(message, mm.ExpertsImproved):
            return payload
        improved = improved_from(payload, HeldExperts({}, {}))
        improved.weights["up"][:] *= factor
        return improved_bytes(improved)

    for worker in cluster.workers.values():
        worker.change_sent(spoil)
    assert cluster.finish().ok
    updates = of_kind(cluster, ExpertsAdvanced)
    assert len(updates) > 3
    assert not any(record.accepted for record in updates)
    assert {reason for record in updates for reason in record.refused} == {reason}
    assert all(np.isfinite(line.eval_loss) for line in cluster.lines)


@pytest.mark.slow
def test_a_corrupt_sketch_is_refused_with_its_digests(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=24, sketches="owner", precision="4bit", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=9)
    a, _, _ = (cluster.start(name) for name in ("a", "b", "w"))

    def damage(message: m.Message, payload: Packed) -> Packed:
        if not isinstance(message, mm.OfferSketches):
            return payload
        return bytes(payload[:-3]) + bytes([payload[-3] ^ 1]) + bytes(payload[-2:])

    a.change_sent(damage)
    assert cluster.finish().ok
    refused = [note.why for note in of_kind(cluster, SyncNote) if note.what == "unusable"]
    assert refused
    assert all("OfferSketches of a: the sketch of composer" in why and "is damaged: expected" in why for why in refused)
    assert {record.shard for record in of_kind(cluster, ExpertsAdvanced)} == {1 - a.machine.shard}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: replace(s, ids=s.ids + TINY.n_expert), f"of {TINY.n_expert}"),
        (lambda s: replace(s, inputs=s.inputs[:, :-1]), "it has arrays"),
        (lambda s: replace(s, gates=s.gates[:, :1]), "it has arrays"),
    ],
)
def test_a_sketch_that_workers_would_fail_on_is_refused(tmp_path: Path, change: Any, why: str) -> None:
    plan = make_plan(tmp_path, steps=4, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=9)
    cluster.start("a")
    cluster.start("b")
    cluster.until(lambda: waiting_work(cluster))
    offer = next(s for s in cluster.sent if isinstance(s, mm.OfferSketches))
    sound = decode(sketch_from(cluster.store.get(offer.payload)))
    data = sketch_bytes(encode(sound, "f32", TINY.n_expert))
    assert cluster.checks.defect(offer, data) == ""
    assert why in cluster.checks.defect(offer, sketch_bytes(encode(change(sound), "f32", TINY.n_expert + 99)))


@pytest.mark.slow
def test_messages_about_unknown_layers_and_shards_are_refused(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=16, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=9)
    a, _, _ = (cluster.start(name) for name in ("a", "b", "w"))
    cluster.until(lambda: any(work.shard == a.machine.shard for work in waiting_work(cluster)))
    shard, epoch = a.machine.shard, a.machine.epoch
    offer = next(s for s in cluster.sent if isinstance(s, mm.OfferSketches) and s.shard == shard)
    sound = decode(sketch_from(cluster.store.get(offer.payload)))
    elsewhere = sketch_bytes(encode(replace(sound, layer=7), "f32", TINY.n_expert))
    named = {"epoch": epoch, "layer": 7, "payload": f"sketch/{digest_of(elsewhere)}"}
    a.say(replace(offer, **named), elsewhere)
    nothing = surrogates_bytes([])
    known = {"shard": shard, "epoch": epoch, "step": 3, "progress": 3.0, "error": None}
    a.say(mm.PublishSurrogates(**known, of=9, payload=f"surrogate/{digest_of(nothing)}"), nothing)
    cluster.settle()
    cluster.until(lambda: sum(note.what == "unusable" for note in of_kind(cluster, SyncNote)) == 2)
    assert [note.why.split(": ", 1)[1] for note in of_kind(cluster, SyncNote) if note.what == "unusable"] == [
        "it is of layer 7 of 1",
        "it has surrogates of shard 9 of 2",
    ]
    assert cluster.finish().ok


@pytest.mark.slow
def test_results_of_an_earlier_gateways_work_are_dropped(tmp_path: Path) -> None:
    """A worker that was at it meanwhile sends it on its next connection, when it may have other work already."""
    plan = make_plan(tmp_path, steps=24, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=9)
    w = [cluster.start(name) for name in ("a", "b", "w")][-1]
    cluster.until(lambda: any(isinstance(s, mm.ExpertsImproved) for s in cluster.sent))
    old = next(s for s in cluster.sent if isinstance(s, mm.ExpertsImproved))
    cluster.restart_gateway()
    cluster.until(lambda: bool(cluster.controller.board.loans(w.session)))
    (under_way,) = cluster.controller.board.loans(w.session)
    told = len(of_kind(cluster, ExpertsAdvanced))
    w.say(old, b"whatever it was")
    cluster.settle()
    assert cluster.controller.board.loans(w.session) == [under_way]
    assert len(of_kind(cluster, ExpertsAdvanced)) == told
    assert cluster.gateway is not None
    assert not cluster.gateway.run_parts.run.kept_results
    assert cluster.finish().ok
    assert "unusable" not in {why for line in cluster.lines for why in line.own.updates}


@pytest.mark.slow
def test_work_whose_sketches_are_gone_is_given_up(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=24, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=10)
    for name in ("a", "b"):
        cluster.start(name)
    cluster.until(lambda: any(isinstance(s, mm.OfferSketches) for s in cluster.sent))
    gone = next(s for s in cluster.sent if isinstance(s, mm.OfferSketches))
    cluster.until(lambda: (gone.shard, gone.step) in {(work.shard, work.step) for work in waiting_work(cluster)})
    cluster.store.remove(gone.payload)
    cluster.start("w")
    assert cluster.finish().ok
    check_steps(cluster)
    assert of_kind(cluster, ExpertsAdvanced)  # of other work
    assert not any(
        (r.shard, r.layer, r.step) == (gone.shard, gone.layer, gone.step) for r in of_kind(cluster, ExpertsAdvanced)
    )


def test_an_unjudged_result_is_dropped(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=16), seed=7)
    a = cluster.start("a")
    cluster.until(lambda: a.session in cluster.controller.desk.workers)
    answer = mm.ExpertsImproved(task=1, payload="x")
    gone = cluster.controller.handle(e.Received(999, answer, "", 7, ""), cluster.now)
    assert e.DropAttachment(7) in gone  # the session ended before its result was read
    unasked = cluster.controller.handle(e.Received(a.session, answer, "", 8, ""), cluster.now)
    assert e.DropAttachment(8) in unasked  # this run has no expert workers


@pytest.mark.slow
def test_hanging_expert_worker_is_restarted_and_replaced(tmp_path: Path) -> None:
    """An expert worker that hangs is restarted and another does its work."""
    plan = make_plan(tmp_path, steps=120, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureStage(tmp_path, plan, seed=41)
    cluster.controller.board.times = TaskTimes(5.0, 100.0, apart=False)
    a, b, w = (cluster.start(name) for name in ("a", "b", "w"))
    cluster.until(lambda: sum(cluster.controller.rounds.updates.values()) > 0 or len(cluster.lines) > 0)
    cluster.until(lambda: len(cluster.controller.board.loans()) == 1)
    w.hang()
    cluster.until(lambda: bool(cluster.controller.board.loans(w.session)))
    session = w.session
    hung_at = max(a.machine.done, b.machine.done)
    cluster.until(lambda: session not in cluster.controller.desk.workers)
    reason = of_kind(cluster, WorkerLost)[-1].reason
    assert "it had no answer to its work for" in reason
    cluster.kill(w)
    cluster.start("w")
    assert cluster.finish().ok
    assert max(record.step for record in of_kind(cluster, ExpertsAdvanced)) > hung_at
    check_streams(cluster)


def test_hanging_evaluation_is_restarted_and_the_run_ends(tmp_path: Path) -> None:
    """A worker that hangs while it evaluates is restarted and the run ends."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=8), seed=42)
    cluster.controller.board.times = TaskTimes(5.0, 100.0, apart=False)
    a, b = (cluster.start(name) for name in ("a", "b"))
    cluster.until(lambda: len(of_kind(cluster, ShardGranted)) == 2)  # the third worker evaluates
    w = cluster.start("w")
    w.hang()
    cluster.until(lambda: cluster.controller.state.round == 2 and a.machine.finished and b.machine.finished)
    assert cluster.finished is None
    session = w.session
    cluster.until(lambda: session not in cluster.controller.desk.workers)
    assert "it had no answer to its evaluation for" in of_kind(cluster, WorkerLost)[-1].reason
    assert cluster.finish().ok
    assert cluster.lines[-1].eval_loss is not None
