"""Composers, syncer and network in one process: equal to the trainer in lock step, and losses at a free pace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from mixture_cluster import MixtureCluster, make_plan
from moe_support import model_of

from planetary.data.reader import batches, read_slice
from planetary.fabric import events as e
from planetary.moe.acceptance import Policy
from planetary.moe.expert_payloads import improved_bytes, improved_from
from planetary.moe.plan import MixturePlan
from planetary.moe.records import ExpertsAdvanced, FragmentAdvanced, MixtureRecord, ShardGranted, SyncNote
from planetary.moe.states import ComposerState, TrainingState
from planetary.moe.trainer import MoeTrainer
from planetary.wire import messages as m


def test_a_run_in_lock_step_over_the_network_equals_the_trainer_bit_for_bit(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=8, pace="lockstep")
    cluster = MixtureCluster(tmp_path, plan)
    for name in ("a", "b"):
        cluster.start(name)
    assert cluster.finish().ok
    trainer = MoeTrainer(plan.model, plan.training, optimise=False)
    state = trainer.initial()
    reports = []
    for step in range(plan.steps):
        tokens, targets = next(batches(read_slice(plan.order.locate(step)), plan.training.batch_size, 8))
        state, report = trainer.step(state, tokens, targets)
        reports.append(report)
    for composer in state.composers:
        found = next(w.driver for w in cluster.workers.values() if w.driver.machine.shard == composer.number)
        assert found.state is not None
        assert found.bank is not None
        assert state.surrogates is not None
        assert all((found.state.dense[n] == value).all() for n, value in composer.dense.items())
        assert all((found.state.dense_moments[n] == value).all() for n, value in composer.dense_moments.items())
        for mine, theirs in zip(found.state.experts, composer.experts, strict=True):
            assert all((mine[n] == value).all() for n, value in theirs.items())
        assert all((x == y).all() for x, y in zip(found.bank.a, state.surrogates.a, strict=True))
        assert all((x == y).all() for x, y in zip(found.bank.b, state.surrogates.b, strict=True))
    assert [line.loss for line in cluster.metrics] == pytest.approx(
        [np.mean([r.cross_entropy for r in reports[i : i + 4]]) for i in (0, 4)]
    )
    held_out = [next(batches(read_slice(piece), 2, 8)) for piece in plan.held_out]
    assert cluster.metrics[-1].eval_loss == pytest.approx(trainer.evaluate(state, held_out))
    assert model_of(state).keys() == {*model_of(trainer.initial())}


def test_expert_workers_in_lock_step_equal_the_trainer_bit_for_bit(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=4, pace="lockstep", sketches="all", acceptance=Policy(norm_ratio=10))
    cluster = MixtureCluster(tmp_path, plan)
    for name in ("a", "b", "c", "d"):
        cluster.start(name)
    assert cluster.finish().ok
    state = trained(plan)
    for composer in state.composers:
        found = composing(cluster, composer.number)
        for mine, theirs in zip(found.experts, composer.experts, strict=True):
            assert all((mine[n] == value).all() for n, value in theirs.items())
        assert all((found.dense[n] == value).all() for n, value in composer.dense.items())
    updates = cluster.metrics[-1].mixture.updates
    assert sum(updates.values()) == plan.steps * plan.model.n_layer * plan.model.n_expert
    assert updates["accepted"] > 0


def test_expert_workers_may_die_and_composers_never_wait_for_them(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=40, sketches="owner", precision="4bit", acceptance=Policy(norm_ratio=10))
    cluster = MixtureCluster(tmp_path, plan, seed=8)
    a, _ = cluster.start("a"), cluster.start("b")
    for _ in range(3):
        worker = cluster.start("w")
        done = len(of_kind(cluster, ExpertsAdvanced))
        cluster.until(lambda: len(of_kind(cluster, ExpertsAdvanced)) > done + 1)  # noqa: B023
        cluster.kill(worker)
    before = a.driver.machine.done
    cluster.until(lambda: a.driver.machine.done >= min(before + 6, 40))  # nobody improves experts, and it goes on
    assert cluster.finish().ok
    check_streams(cluster)


def test_an_expert_worker_that_returns_nan_changes_nothing_and_is_counted(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=24, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureCluster(tmp_path, plan, seed=9)
    for name in ("a", "b", "w"):
        cluster.start(name)
    for worker in cluster.workers.values():
        send = worker.driver._send

        def spoil(message: m.Message, payload: bytes | None, send: Callable[..., None] = send) -> None:
            if isinstance(message, m.ExpertsImproved) and payload is not None:
                improved = improved_from(payload)
                improved.weights["up"][:] = np.nan
                payload = improved_bytes(improved)
            send(message, payload)

        worker.driver._send = spoil
    assert cluster.finish().ok
    updates = of_kind(cluster, ExpertsAdvanced)
    assert len(updates) > 3
    assert not any(record.accepted for record in updates)
    assert {reason for record in updates for reason in record.refused} == {"not finite"}
    assert all(np.isfinite(line.eval_loss) for line in cluster.metrics)


def test_work_whose_sketches_are_gone_is_given_up(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=24, sketches="owner", acceptance=Policy(norm_ratio=10))
    cluster = MixtureCluster(tmp_path, plan, seed=10)
    a, _ = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: any(isinstance(s, m.OfferSketches) for s in cluster.sent))
    gone = next(s for s in cluster.sent if isinstance(s, m.OfferSketches))
    cluster.store.remove(gone.payload)
    cluster.start("w")
    assert cluster.finish().ok
    assert a.driver.machine.done == 24
    assert of_kind(cluster, ExpertsAdvanced)  # of other work
    assert not any(
        (r.shard, r.layer, r.step) == (gone.shard, gone.layer, gone.step) for r in of_kind(cluster, ExpertsAdvanced)
    )


def trained(plan: MixturePlan) -> TrainingState:
    """What the trainer makes of a plan."""
    trainer = MoeTrainer(plan.model, plan.training, optimise=False)
    state = trainer.initial()
    for step in range(plan.steps):
        state, _ = trainer.step(state, *next(batches(read_slice(plan.order.locate(step)), plan.training.batch_size, 8)))
    return state


def composing(cluster: MixtureCluster, shard: int) -> ComposerState:
    found = next(w.driver.state for w in cluster.workers.values() if w.driver.machine.shard == shard)
    assert found is not None
    return found


def of_kind(cluster: MixtureCluster, kind: type) -> list:
    records = [msgspec.json.decode(line, type=MixtureRecord) for line in cluster.journal]
    return [record for record in records if isinstance(record, kind)]


def check_streams(cluster: MixtureCluster) -> None:
    """Every fragment and every shard has one stream of versions or epochs, without gaps."""
    versions: dict[tuple, int] = {}
    for record in of_kind(cluster, FragmentAdvanced):
        key = (record.tier, record.fragment)
        assert record.version == versions.get(key, 0) + 1
        versions[key] = record.version
    for record in of_kind(cluster, ExpertsAdvanced):
        key = (record.shard, record.layer)
        assert record.version == versions.get(key, 0) + 1
        versions[key] = record.version
    epochs: dict[int, int] = {}
    for record in of_kind(cluster, ShardGranted):
        assert record.epoch == epochs.get(record.shard, 0) + 1
        epochs[record.shard] = record.epoch


def test_at_a_free_pace_nobody_waits_and_what_was_done_since_a_publication_is_carried_over(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=16), seed=1)
    for name in ("a", "b"):
        cluster.start(name)
    assert cluster.finish().ok
    check_streams(cluster)
    assert [line.round for line in cluster.metrics] == [1, 2, 3, 4]
    assert all(line.eval_loss is not None and np.isfinite(line.eval_loss) for line in cluster.metrics)
    assert cluster.metrics[-1].mixture.merges["router"] >= 1
    assert all(shard.surrogate_error is not None for shard in cluster.metrics[-1].mixture.shards)
    assert {len(record.shards) for record in of_kind(cluster, FragmentAdvanced)} == {2}


def test_a_killed_composer_comes_back_with_a_state_at_most_one_refresh_old_while_the_other_goes_on(
    tmp_path: Path,
) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=24), seed=2)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.driver.machine.done >= 7 and b.driver.machine.done >= 3)
    had, shard, before = a.driver.machine.done, a.driver.machine.shard, b.driver.machine.done
    cluster.kill(a)
    cluster.until(lambda: b.driver.machine.done >= before + 4)  # with surrogates of the lost one's experts
    again = cluster.start("a")
    cluster.until(lambda: again.driver.machine.composes)
    assert again.driver.machine.shard == shard
    grant = of_kind(cluster, ShardGranted)[-1]
    assert had - cluster.plan.training.cadence.refresh <= grant.step <= had
    assert cluster.finish().ok
    check_streams(cluster)


def test_a_composer_that_is_cut_off_goes_on_and_keeps_its_own_state(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=24), seed=3)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.driver.machine.done >= 4)
    cluster.cut(a)
    cluster.until(lambda: a.driver.machine.done >= 10)
    cluster.connect(a)
    done = a.driver.machine.done
    cluster.until(lambda: a.driver.machine.epoch == 2)
    assert a.driver.machine.done >= done
    assert of_kind(cluster, ShardGranted)[-1].step >= done
    assert cluster.finish().ok
    assert b.driver.machine.done == a.driver.machine.done == 24
    check_streams(cluster)


def test_a_shard_goes_to_who_stands_by_and_its_old_owner_is_fenced_off(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=60), seed=4, grace_s=2.0)
    a = cluster.start("a")
    cluster.start("b")
    c = cluster.start("c")
    cluster.until(lambda: a.driver.machine.done >= 4)
    assert c.driver.machine.shard == -1
    shard = a.driver.machine.shard
    cluster.cut(a)
    cluster.until(lambda: c.driver.machine.composes)
    assert c.driver.machine.shard == shard
    cluster.connect(a)  # it still believes that the shard is its own, and says so
    cluster.until(lambda: a.driver.machine.shard == -1)
    assert cluster.controller.owner_of(shard).worker == "c"  # type: ignore[union-attr]
    assert cluster.finish().ok
    check_streams(cluster)


def test_the_syncer_goes_on_from_its_journal(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=20), seed=5)
    a, _ = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.driver.machine.done >= 6)
    versions = {key: fragment.version for key, fragment in cluster.controller.state.fragments.items()}
    cluster.restart_gateway()
    assert {key: f.version for key, f in cluster.controller.state.fragments.items()} == versions
    assert cluster.finish().ok
    check_streams(cluster)
    assert a.driver.machine.done == 20


def test_unusable_and_stale_messages_are_counted_and_harm_nobody(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=16), seed=6)
    a, _ = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.driver.machine.done >= 5)
    machine = a.driver.machine
    common = {"shard": machine.shard, "epoch": machine.epoch}
    bad = m.PublishFragment(**common, tier="router", fragment=0, base=0, tokens=1, steps=1, payload="x")
    cluster._arrive(a.session, bad, b"nonsense")
    cluster._arrive(a.session, m.StepTaken(shard=machine.shard, epoch=9, step=1, loss=1.0, seconds=0.1), None)
    kept = next(s for s in cluster.sent if isinstance(s, m.KeepShard) and s.shard == machine.shard)
    cluster._arrive(a.session, kept, cluster.store.get(kept.payload))
    cluster._gateway()
    notes = [note.what for note in of_kind(cluster, SyncNote)]
    assert notes == ["unusable", "fenced", "regression"]
    assert cluster.finish().ok


def test_a_result_that_nobody_will_judge_is_forgotten(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=16), seed=7)
    a = cluster.start("a")
    cluster.until(lambda: a.driver is not None and a.session in cluster.controller.desk.workers)
    answer = m.ExpertsImproved(task=1, payload="x")
    gone = cluster.controller.handle(e.Received(999, answer, "", 7, ""), cluster.now)
    assert e.DropAttachment(7) in gone  # the session ended before its result was read
    unasked = cluster.controller.handle(e.Received(a.session, answer, "", 8, ""), cluster.now)
    assert e.DropAttachment(8) in unasked  # this run has no expert workers


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.soak) for n in range(2, 40))])
def test_composers_and_syncer_lost_at_random_times_and_the_run_ends_all_the_same(tmp_path: Path, seed: int) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=24), seed=seed)
    for name in ("a", "b", "c"):
        cluster.start(name)
    rng = cluster.rng
    lost = 0
    while cluster.finished is None:
        cluster.turn()
        if rng.random() < 0.15 and lost < 12:
            lost += 1
            what, name = rng.choice(["kill", "cut", "gateway"]), rng.choice(sorted(cluster.workers))
            if what == "gateway":
                cluster.restart_gateway()
                continue
            worker = cluster.workers[name]
            cluster.cut(worker) if what == "cut" else cluster.kill(worker)
            for _ in range(rng.randrange(6)):
                cluster.turn()
            cluster.connect(worker) if what == "cut" else cluster.start(name)
        assert cluster.now < 2000
    assert cluster.finished.ok
    check_streams(cluster)
    assert all(np.isfinite(line.loss) for line in cluster.metrics)
    assert sorted(line.round for line in cluster.metrics) == list(range(1, cluster.policy.rounds + 1))
    assert next(line for line in cluster.metrics if line.round == cluster.policy.rounds).eval_loss is not None
