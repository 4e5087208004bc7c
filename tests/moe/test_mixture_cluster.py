"""Composers, syncer and network in one process: equal to the trainer in lock step, and losses at a free pace."""

from __future__ import annotations

from dataclasses import replace as replace_dataclass
from pathlib import Path

import numpy as np
import pytest
from mixture_checks import check_equal, check_steps, check_streams, check_window, composing, of_kind, stale, trained
from mixture_cluster import MixtureCluster, make_plan
from moe_support import TINY, model_of
from msgspec.structs import replace

from planetary.artifacts.store import digest_of
from planetary.data.reader import batches, read_slice
from planetary.fabric.protocol import messages as m
from planetary.fabric.protocol.records import TaskAborted
from planetary.moe.controller.records import (
    FragmentAdvanced,
    ShardGranted,
    SpeakerChanged,
    SurrogatesRefreshed,
    SyncNote,
)
from planetary.moe.methods.acceptance import Policy
from planetary.moe.methods.averaging import FragmentMergeRule
from planetary.moe.methods.tiers import Cadence, Tier
from planetary.moe.payloads.payloads import fragment_from
from planetary.moe.payloads.shard_payload import shard_bytes, shard_from
from planetary.moe.plan import plan as plan_module
from planetary.moe.protocol import mixture_messages as mm
from planetary.moe.training.states import merged_model
from planetary.moe.training.trainer import MoeTrainer

TWICE = {"composers": 3, "batch_size": 6, "replicas": 2}
CHANGES = {"delta_rank": 1}  # of surrogates of 8 by 3
COPIES = {"rank": TINY.n_hidden, "refresh_form": "4bit"}


SLOW = {"slow": 0.2}  # the share of turns in which a payload of one composer comes through
BESIDE = {"beside": True}  # surrogates are taken beside the steps
OFFLOADED = {"sketches": "all", "acceptance": Policy(norm_ratio=10, redundant=0.3, audited=0.3)}
OUTER = {"merge": FragmentMergeRule(rate=0.9, momentum=0.4)}


@pytest.mark.parametrize(
    "options", [{}, TWICE, CHANGES, COPIES, OUTER], ids=["once", "twice", "changes", "copies", "outer"]
)
def test_a_run_in_lock_step_over_the_network_equals_the_trainer_bit_for_bit(tmp_path: Path, options: dict) -> None:
    plan = make_plan(tmp_path, steps=8, pace="lockstep", **options)
    # Any map will do, not only that of the report.
    plan = replace(plan, owners=(tuple((e + 1) % plan.training.composers for e in range(plan.model.n_expert)),))
    cluster = MixtureCluster(tmp_path, plan)
    for name in "abc"[: plan.training.composers]:
        cluster.start(name)
    assert cluster.finish().ok
    trainer = MoeTrainer(plan.model, plan.training, optimise=False, owners=plan.owner_map)
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
    check_streams(cluster)
    held_out = [next(batches(read_slice(piece), 2, 8)) for piece in plan.held_out]
    assert cluster.metrics[-1].eval_loss == pytest.approx(trainer.evaluate(state, held_out))
    assert model_of(state).keys() == {*model_of(trainer.initial())}


def test_at_a_free_pace_nobody_waits_and_what_was_done_since_a_publication_is_carried_over(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=16), seed=1)
    for name in ("a", "b"):
        cluster.start(name)
    assert cluster.finish().ok
    check_streams(cluster)
    assert [line.round for line in cluster.metrics] == [1, 2, 3, 4]
    assert all(line.eval_loss is not None and np.isfinite(line.eval_loss) for line in cluster.metrics)
    last = cluster.metrics[-1].mixture
    assert last.merges["router"] >= 1
    assert 0 < last.routing_overlap <= 1
    assert last.routing_divergence >= 0
    assert all(np.isfinite([shard.mixed_loss, shard.surrogate_loss]).all() for shard in last.shards)
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
    check_steps(cluster)
    assert b.driver.machine.done < a.driver.machine.done  # which took what the gateway's word for it had not come for
    check_streams(cluster)


def test_what_a_composer_misses_the_others_take_over_and_it_goes_on_at_their_learning_rate(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=40), seed=21)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: b.driver.machine.done >= 4)
    shard = b.driver.machine.shard
    cluster.kill(b)
    cluster.until(lambda: a.driver.machine.done >= 40)
    b = cluster.start("b")
    cluster.until(lambda: b.driver.machine.composes)
    machine = b.driver.machine
    assert (machine.shard, machine.done <= 4) == (shard, True)
    assert a.driver.machine.progress <= machine.progress + 1
    assert machine.progress >= 20
    assert cluster.finish().ok
    check_steps(cluster)
    check_streams(cluster)
    assert sorted(line.round for line in cluster.metrics) == list(range(1, 11))
    steps = [shard.step for shard in cluster.controller.state.shards]
    assert steps[1 - shard] > 50 > steps[shard]


def test_the_last_steps_are_taken_by_who_is_left(tmp_path: Path) -> None:
    """A shard whose composer comes back after the end has no step left, and its last state ends the run."""
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=12), seed=22)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: b.driver.machine.done >= 4)
    cluster.kill(b)
    cluster.until(lambda: a.driver.machine.finished)
    assert cluster.controller.state.round < 3
    b = cluster.start("b")
    assert cluster.finish().ok
    assert b.driver.machine.done <= 4
    check_steps(cluster)
    assert [line.round for line in cluster.metrics] == [1, 2, 3]
    last = cluster.metrics[-1].mixture
    assert all(s.mixed_loss is not None for s in last.shards)


@pytest.mark.slow
def test_who_has_taken_fewer_steps_than_others_may_speak_for_their_experts(tmp_path: Path) -> None:
    """With several owners: one that was away for long, and then has to speak for a shard that was ahead of it."""
    plan = make_plan(tmp_path, steps=152, **TWICE)
    cluster = MixtureCluster(tmp_path, plan, seed=21, grace_s=2.0)
    workers = [cluster.start(name) for name in "abc"]
    cluster.until(lambda: min(w.driver.machine.done for w in workers) >= 6)
    by = {w.driver.machine.shard: w for w in workers}
    cluster.kill(by[1])
    cluster.until(lambda: by[0].driver.machine.done >= 100)
    again = cluster.start(by[1].name)
    cluster.until(lambda: cluster.controller.state.shards[1].speaker == 1)  # it has caught up
    before = cluster.controller.state.shards[0].surrogate_step
    assert again.driver.machine.done < before
    cluster.kill(by[0])
    cluster.until(lambda: cluster.controller.state.shards[0].surrogate_step > before)
    assert [s.speaker for s in cluster.controller.state.shards] == [1, 1, 2]
    cluster.start(by[0].name)
    assert cluster.finish().ok
    check_steps(cluster)
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


def surrogates_of(cluster: MixtureCluster, shard: int) -> list[SurrogatesRefreshed]:
    return [record for record in of_kind(cluster, SurrogatesRefreshed) if record.shard == shard]


def test_experts_whose_first_owner_is_lost_go_on_with_the_next_and_it_learns_from_that_when_it_comes_back(
    tmp_path: Path,
) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=60, **TWICE), seed=21, grace_s=2.0)
    for name in ("a", "b", "c"):
        cluster.start(name)
    by_shard = {w.driver.machine.shard: w for w in cluster.workers.values()}
    cluster.until(lambda: all(w.driver.machine.done >= 6 for w in cluster.workers.values()))
    by_shard = {w.driver.machine.shard: w for w in cluster.workers.values()}
    first, second = by_shard[0], by_shard[1]
    cluster.kill(first)
    cluster.until(lambda: surrogates_of(cluster, 0)[-1].by == 1)
    assert 0 in second.driver.machine.speaks
    key = (Tier.EXPERTS, 0)
    alone = cluster.controller.state.fragments[key].version
    cluster.until(lambda: cluster.controller.state.fragments[key].version >= alone + 2)
    assert cluster.controller.state.fragments[key].shards == (1,)
    again = cluster.start(first.name)
    cluster.until(lambda: again.driver.machine.composes)
    assert again.driver.machine.shard == 0
    assert again.driver.machine.done < second.driver.machine.done
    cluster.until(lambda: again.driver.machine.held[key].base >= alone + 2)
    newest = fragment_from(cluster.store.get(cluster.controller.state.fragments[key].payload))
    assert again.driver.state is not None
    assert len(again.driver.state.named(newest)) == len(newest)
    assert surrogates_of(cluster, 0)[-1].by == 1  # what the first has to say is still older
    take_step, second.driver._step = second.driver._step, lambda: None  # it is overtaken
    cluster.until(lambda: surrogates_of(cluster, 0)[-1].by is None)
    second.driver._step = take_step
    assert cluster.finish().ok
    assert [(change.shard, change.by) for change in of_kind(cluster, SpeakerChanged)] == [(0, 1), (0, 0)]
    check_streams(cluster)
    steps = [record.step for record in surrogates_of(cluster, 0)]
    assert steps == sorted(set(steps))


def test_a_replacement_starts_from_the_kept_state_and_the_newest_merge_of_its_experts(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=60, **TWICE), seed=22, grace_s=2.0)
    for name in ("a", "b", "c"):
        cluster.start(name)
    cluster.until(lambda: all(w.driver.machine.done >= 6 for w in cluster.workers.values()))
    lost = next(w for w in cluster.workers.values() if w.driver.machine.shard == 0)
    cluster.kill(lost)
    fragments = cluster.controller.state.fragments
    version = fragments[Tier.EXPERTS, 0].version
    cluster.until(lambda: fragments[Tier.EXPERTS, 0].version >= version + 2)
    heir = cluster.start("d")
    take_step, heir.driver._step = heir.driver._step, lambda: None  # it does not train yet
    cluster.until(lambda: heir.driver.machine.composes)
    heir.driver.turn()
    machine, state = heir.driver.machine, heir.driver.state
    assert state is not None
    assert machine.done == of_kind(cluster, ShardGranted)[-1].step
    for shard in (0, 2):
        held = fragments[Tier.EXPERTS, shard]
        merged = fragment_from(cluster.store.get(held.payload))
        assert machine.held[Tier.EXPERTS, shard].base == held.version
        check_equal(state.named(merged), merged)
    heir.driver._step = take_step
    assert cluster.finish().ok
    check_streams(cluster)


def test_who_does_not_speak_for_a_shard_or_sends_other_experts_than_its_own_is_refused(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=24, **TWICE), seed=23)
    for name in ("a", "b", "c"):
        cluster.start(name)
    cluster.until(lambda: all(w.driver.machine.done >= 5 for w in cluster.workers.values()))
    first, second = (next(w for w in cluster.workers.values() if w.driver.machine.shard == n) for n in (0, 1))
    said = [s for s in cluster.sent if isinstance(s, mm.PublishSurrogates) and s.shard == 0][-1]
    of_another = replace(said, shard=1, epoch=second.driver.machine.epoch, step=said.step + 1)
    cluster._arrive(second.session, of_another, cluster.store.get(said.payload))
    cluster._arrive(first.session, replace(said, of=1), cluster.store.get(said.payload))
    kept = [s for s in cluster.sent if isinstance(s, mm.SaveShard) and s.shard == 1][-1]
    state, step, held = shard_from(cluster.store.get(kept.payload), cluster.plan)
    wrong = shard_bytes(replace(state, slots=state.slots[:, ::-1]), step, held, cluster.plan)
    cluster._arrive(second.session, replace(kept, payload=f"shard/{digest_of(wrong)}"), wrong)
    cluster._gateway()
    notes = [note.why for note in of_kind(cluster, SyncNote)]
    assert "the composer of shard 1 speaks for shard 0, for which 0 does" in notes[0]
    assert "not the surrogates of all experts of shard 1" in notes[1]
    assert "owns other experts than those of shard 1" in notes[2]
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
    check_steps(cluster)


def test_shards_are_kept_for_composers_that_are_connected_while_a_restarted_gateway_is_not_ready(
    tmp_path: Path,
) -> None:
    """They have newer states than the store; compiling may take longer than any grace time."""
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=60), seed=13)
    a, b, _ = cluster.start("a"), cluster.start("b"), cluster.start("w")
    cluster.until(lambda: a.driver.machine.done >= 6)
    cluster.compiling = True
    cluster.restart_gateway()
    shards = {x.name: x.driver.machine.shard for x in (a, b)}
    cluster.until(lambda: a.driver.machine.done >= 50)
    assert cluster.now > 15  # the grace time is 4 s
    done = a.driver.machine.done
    cluster.compiled()
    cluster.until(lambda: a.driver.machine.epoch == 2 and b.driver.machine.epoch == 2)
    assert {x.name: x.driver.machine.shard for x in (a, b)} == shards
    assert all(grant.step >= min(done, b.driver.machine.done) - 2 for grant in of_kind(cluster, ShardGranted)[2:])
    assert cluster.finish().ok
    assert not any(note.what == "fenced" for note in of_kind(cluster, SyncNote))


def test_a_store_that_is_away_until_all_steps_are_taken_costs_no_round_and_no_loss(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=16), seed=14)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: min(a.driver.machine.done, b.driver.machine.done) >= 5)
    cluster.store_away = True
    cluster.controller.policy = replace(cluster.controller.policy, stuck_after_s=5.0)
    cluster.until(lambda: a.driver.machine.finished and b.driver.machine.finished)
    ended = cluster.now
    cluster.until(lambda: cluster.now > ended + 30)
    assert all(worker.alive and worker.session for worker in (a, b))  # nobody is restarted for taking no step
    cluster.store_away = False
    assert cluster.finish().ok
    assert [line.round for line in cluster.metrics] == [1, 2, 3, 4]
    assert all(np.isfinite(line.loss) for line in cluster.metrics)
    check_steps(cluster)
    check_streams(cluster)


def test_unusable_and_stale_messages_are_counted_and_harm_nobody(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=16), seed=6)
    a, _ = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.driver.machine.done >= 5)
    machine = a.driver.machine
    common = {"shard": machine.shard, "epoch": machine.epoch}
    bad = mm.PublishFragment(**common, tier="router", fragment=0, base=0, tokens=1, steps=1, payload="x")
    cluster._arrive(a.session, bad, b"nonsense")
    cluster._arrive(a.session, mm.StepTaken(shard=machine.shard, epoch=9, step=1, loss=1.0, seconds=0.1), None)
    for kind in (mm.SaveShard, mm.PublishSurrogates):
        old = next(s for s in cluster.sent if isinstance(s, kind) and s.shard == machine.shard)
        cluster._arrive(a.session, old, cluster.store.get(old.payload))
    cluster._arrive(a.session, mm.RequestTokens(**common, first=26, count=7), None)
    for step in (10**12, -(10**12)):
        cluster._arrive(a.session, mm.StepTaken(**common, step=step, loss=1.0, seconds=0.1), None)
    kept = next(s for s in cluster.sent if isinstance(s, mm.SaveShard) and s.shard == machine.shard)
    payload = cluster.store.get(kept.payload)
    cluster._arrive(a.session, replace(kept, epoch=machine.epoch, progress=10**15), payload)
    before = dict(cluster.controller.rounds.refused)
    cluster._gateway()
    notes = [note.what for note in of_kind(cluster, SyncNote)]
    assert notes == ["unusable", "fenced", "regression", *["unusable"] * 4]
    counts = cluster.controller.rounds.refused
    assert counts["regression"] == before.get("regression", 0) + 2  # of the shard's state and of its surrogates
    assert cluster.finish().ok


def test_a_composer_whose_loss_is_not_finite_three_times_hands_its_shard_on(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=24), seed=6)
    a, _, spare = (cluster.start(name) for name in ("a", "b", "c"))
    cluster.until(lambda: a.driver.machine.done >= 3)
    shard = a.driver.machine.shard
    for times in (1, 2, 3):
        cluster.until(lambda: a.session in cluster.controller.composing)
        failed = m.TaskFailed(task=0, kind="numerics", reason="the loss became nan", step=4)
        cluster._arrive(a.session, failed, None)
        if times == 3:
            cluster.kill(a)  # what its process does when it is told to end
        cluster._gateway()
        assert len(of_kind(cluster, TaskAborted)) == times
    cluster.until(lambda: spare.driver.machine.shard == shard)
    assert cluster.finish().ok
    assert {record.reason for record in of_kind(cluster, TaskAborted)} == {"the loss became nan"}
    assert of_kind(cluster, ShardGranted)[-1].worker == "c"
    assert "3 failed tasks in a row" in cluster.controller.membership.banned["a"]
    check_streams(cluster)


def test_composers_without_access_to_the_data_get_their_tokens_from_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "AHEAD_BYTES", 0)  # 8 steps ahead
    plan = make_plan(tmp_path, steps=24, pace="lockstep", delivery="gateway")
    assert plan.steps_ahead == 8
    cluster = MixtureCluster(tmp_path, plan)
    nowhere = replace(plan.order, file=replace(plan.order.file, url="/nowhere"))
    cluster.told_plan = replace(plan, order=nowhere, held_out=tuple(replace(x, url="/nowhere") for x in plan.held_out))
    for name in ("a", "b"):
        cluster.start(name)
    assert cluster.finish().ok
    for composer in trained(plan).composers:
        check_equal(composing(cluster, composer.number).dense, composer.dense)
    assert cluster.metrics[-1].eval_loss is not None


def test_a_composer_with_tokens_from_the_gateway_goes_on_while_they_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "AHEAD_BYTES", 0)
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=40, delivery="gateway"), seed=12)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.driver.machine.done >= 6)
    cluster.cut(a)
    done = a.driver.machine.done
    cluster.until(lambda: b.driver.machine.done >= 30)
    assert done + 4 <= a.driver.machine.done <= done + 8
    cluster.connect(a)
    cluster.kill(b)
    cluster.start("b")
    assert cluster.finish().ok
    check_streams(cluster)


def test_where_nobody_waits_a_horizon_of_1_publishes_after_every_step_that_finds_the_last_merge_done(
    tmp_path: Path,
) -> None:
    merges = []
    for horizon in (1, 2):
        folder = tmp_path / str(horizon)
        folder.mkdir()
        plan = make_plan(folder, steps=40, cadence=Cadence(horizon, horizon, 4, refresh=2))
        cluster = MixtureCluster(folder, plan, seed=3)
        cluster.start("a")
        cluster.start("b")
        assert cluster.finish().ok
        check_steps(cluster)
        check_streams(cluster)
        done = of_kind(cluster, FragmentAdvanced)
        assert any(record.shards == (0, 1) for record in done if record.tier is Tier.ROUTER)
        merges.append(sum(record.tier is Tier.ROUTER for record in done))
    assert merges[0] > merges[1] > 10


def test_a_mixture_starts_from_given_weights(tmp_path: Path) -> None:
    cluster = MixtureCluster(tmp_path, make_plan(tmp_path, steps=4))
    drawn = merged_model(cluster.prepared.initial(), cluster.plan.model)
    given = {name: value + 1 for name, value in drawn.items()}
    start = replace_dataclass(cluster.prepared, given=lambda: given).initial()
    check_equal(merged_model(start, cluster.plan.model), given)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (0, {}),
        (16, TWICE | CHANGES),
        (5, CHANGES | SLOW),
        (7, COPIES | SLOW),
        (2, COPIES | BESIDE),
        (16, TWICE | CHANGES | BESIDE),
        (3, OFFLOADED | SLOW),
        *(
            pytest.param(n, options, marks=pytest.mark.soak)
            for n in range(1, 40)
            for options in (
                {},
                CHANGES,
                COPIES,
                TWICE,
                TWICE | CHANGES,
                SLOW,
                TWICE | CHANGES | SLOW,
                CHANGES | BESIDE,
                COPIES | BESIDE | SLOW,
                TWICE | CHANGES | BESIDE | SLOW,
                OFFLOADED,
                OFFLOADED | SLOW,
            )
        ),
    ],
)
def test_composers_and_syncer_lost_at_random_times_and_the_run_ends_all_the_same(
    tmp_path: Path, seed: int, options: dict
) -> None:
    grace_s = 1.0 if "replicas" in options else 4.0  # so short that others speak for who is lost
    options = dict(options)
    share, beside = options.pop("slow", 1.0), options.pop("beside", False)
    plan = make_plan(tmp_path, steps=24, **options)
    cluster = MixtureCluster(tmp_path, plan, seed=seed, grace_s=grace_s, beside=beside)

    def start(name: str) -> None:
        worker = cluster.start(name)
        worker.up.share = worker.down.share = share if name == "a" else 1.0

    for name in ("a", "b", "c"):
        start(name)
    rng = cluster.rng
    lost = 0
    while cluster.finished is None:
        cluster.turn()
        check_window(cluster)
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
                check_window(cluster)
            cluster.connect(worker) if what == "cut" else start(name)
        assert cluster.now < 2000
    assert cluster.finished.ok
    assert stale(cluster) == 0
    check_streams(cluster, all_moved=share == 1)  # the others may have taken all steps before a slow one had begun
    assert all(np.isfinite(line.loss) for line in cluster.metrics)
    assert sorted(line.round for line in cluster.metrics) == list(range(1, cluster.policy.rounds + 1))
    assert next(line for line in cluster.metrics if line.round == cluster.policy.rounds).eval_loss is not None
