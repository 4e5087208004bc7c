"""Composers, syncer and network in one process: equal to the trainer in lock step, and losses at a free pace."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace as replace_dataclass
from pathlib import Path

import numpy as np
import pytest
from lockstep_trainer import MoeTrainer
from mixture_checks import check_equal, check_steps, check_streams, check_window, composing, of_kind, stale, trained
from mixture_stage import MixtureStage, Worker, make_plan
from moe_support import TINY, model_of
from msgspec.structs import replace

from planetary.artifacts.store import digest_of
from planetary.data.reader import batches, read_slice
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import TaskAborted
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture import plan as plan_module
from planetary.runs.mixture.controller.events import AssembleModel
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.methods.averaging import FragmentMergeRule
from planetary.runs.mixture.methods.tiers import Cadence, Tier
from planetary.runs.mixture.payloads.payloads import fragment_from
from planetary.runs.mixture.payloads.shard import shard_bytes, shard_from
from planetary.runs.mixture.records import (
    FragmentAdvanced,
    ShardGranted,
    SpeakerChanged,
    SurrogatesRefreshed,
    SyncNote,
)
from planetary.runs.mixture.training.participant_states import merged_model

TWICE = {"composers": 3, "batch_size": 6, "replicas": 2}
CHANGES = {"delta_rank": 1}  # of surrogates of 8 by 3
COPIES = {"rank": TINY.n_hidden, "refresh_form": "4bit"}


SLOW = {"slow": 4.0}  # seconds that a state of one composer takes
OFFLOADED = {"sketches": "all", "acceptance": Policy(norm_ratio=10, redundant=0.3, audited=0.3)}
OUTER = {"merge": FragmentMergeRule(rate=0.9, momentum=0.4)}


@pytest.mark.parametrize(
    "options",
    [{}, TWICE, CHANGES, pytest.param(COPIES, marks=pytest.mark.slow), OUTER],
    ids=["once", "twice", "changes", "copies", "outer"],
)
def test_networked_lock_step_equals_the_trainer_bit_for_bit(tmp_path: Path, options: dict) -> None:
    """A run in lock step over the network equals the trainer bit for bit."""
    plan = make_plan(tmp_path, steps=8, pace="lockstep", **options)
    # Any map will do, not only that of the report.
    plan = replace(plan, owners=(tuple((e + 1) % plan.training.composers for e in range(plan.model.n_expert)),))
    cluster = MixtureStage(tmp_path, plan)
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
        found = next(w.driver for w in cluster.workers.values() if w.machine.shard == composer.number)
        assert found.state is not None
        assert found.bank is not None
        assert state.surrogates is not None
        assert all((found.state.dense[n] == value).all() for n, value in composer.dense.items())
        assert all((found.state.dense_moments[n] == value).all() for n, value in composer.dense_moments.items())
        for mine, theirs in zip(found.state.experts, composer.experts, strict=True):
            assert all((mine[n] == value).all() for n, value in theirs.items())
        assert all((x == y).all() for x, y in zip(found.bank.a, state.surrogates.a, strict=True))
        assert all((x == y).all() for x, y in zip(found.bank.b, state.surrogates.b, strict=True))
    assert [line.loss for line in cluster.lines] == pytest.approx(
        [np.mean([r.cross_entropy for r in reports[i : i + 4]]) for i in (0, 4)]
    )
    check_streams(cluster)
    held_out = [next(batches(read_slice(piece), 2, 8)) for piece in plan.held_out]
    assert cluster.lines[-1].eval_loss == pytest.approx(trainer.evaluate(state, held_out))
    assert model_of(state).keys() == {*model_of(trainer.initial())}


def test_progress_since_a_publication_is_carried_over(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=16), seed=1, grace_s=30.0)
    for name in ("a", "b"):
        cluster.start(name)
    assert cluster.finish().ok
    check_streams(cluster)
    assert [line.round for line in cluster.lines] == [1, 2, 3, 4]
    assert all(line.eval_loss is not None and np.isfinite(line.eval_loss) for line in cluster.lines)
    last = cluster.lines[-1].own
    assert last.merges["router"] >= 1
    assert 0 < last.routing_overlap <= 1
    assert last.routing_divergence >= 0
    assert all(np.isfinite([shard.mixed_loss, shard.surrogate_loss]).all() for shard in last.shards)
    assert all(shard.surrogate_error is not None for shard in cluster.lines[-1].own.shards)
    assert {len(record.shards) for record in of_kind(cluster, FragmentAdvanced)} == {2}


@pytest.mark.slow
def test_killed_composer_returns_at_most_one_refresh_behind(
    tmp_path: Path,
) -> None:
    """A killed composer comes back with a state at most one refresh old while the other goes on."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=24), seed=2)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.done >= 7 and b.machine.done >= 3)
    had, shard, before = a.machine.done, a.machine.shard, b.machine.done
    cluster.kill(a)
    cluster.until(lambda: b.machine.done >= before + 4)  # with surrogates of the lost one's experts
    again = cluster.start("a")
    cluster.until(lambda: again.machine.composes)
    assert again.machine.shard == shard
    grant = of_kind(cluster, ShardGranted)[-1]
    assert had - cluster.plan.training.cadence.refresh <= grant.step <= had
    assert cluster.finish().ok
    check_streams(cluster)


@pytest.mark.slow
def test_cut_off_composer_goes_on_and_keeps_its_state(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=24), seed=3)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.composes and b.machine.composes)
    a.node.health.step_s, b.node.health.step_s = 0.8, 1.2
    cluster.until(lambda: a.machine.done >= 4)
    cluster.cut(a)
    cluster.until(lambda: a.machine.done >= 10)
    cluster.connect(a)
    done = a.machine.done
    cluster.until(lambda: a.machine.epoch == 2)
    assert a.machine.done >= done
    assert of_kind(cluster, ShardGranted)[-1].step >= done
    assert cluster.finish().ok
    check_steps(cluster)
    assert b.machine.done < a.machine.done  # which is faster, and took steps while it was cut off
    check_streams(cluster)


@pytest.mark.slow
def test_others_take_missed_steps_and_share_their_rate(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=40), seed=21)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: b.machine.done >= 4)
    shard = b.machine.shard
    cluster.kill(b)
    cluster.until(lambda: a.machine.done >= 40)
    b = cluster.start("b")
    cluster.until(lambda: b.machine.composes)
    machine = b.machine
    assert (machine.shard, machine.done <= 4) == (shard, True)
    assert a.machine.progress <= machine.progress + 1
    assert machine.progress >= 20
    assert cluster.finish().ok
    check_steps(cluster)
    check_streams(cluster)
    assert sorted(line.round for line in cluster.lines) == list(range(1, 11))
    steps = [shard.step for shard in cluster.controller.state.shards]
    assert steps[1 - shard] > 50 > steps[shard]


def test_the_last_steps_are_taken_by_the_composers_left(tmp_path: Path) -> None:
    """A shard whose composer comes back after the end has no step left, and its last state ends the run."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=12), seed=22)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: b.machine.done >= 4)
    cluster.kill(b)
    cluster.until(lambda: a.machine.finished)
    assert cluster.controller.state.round < 3
    b = cluster.start("b")
    assert cluster.finish().ok
    assert b.machine.done <= 4
    check_steps(cluster)
    assert [line.round for line in cluster.lines] == [1, 2, 3]
    last = cluster.lines[-1].own
    assert all(s.mixed_loss is not None for s in last.shards)


@pytest.mark.slow
def test_a_speaker_may_have_fewer_steps_than_the_owner(tmp_path: Path) -> None:
    """With several owners: one that was away for long, and then has to speak for a shard that was ahead of it."""
    plan = make_plan(tmp_path, steps=152, **TWICE)
    cluster = MixtureStage(tmp_path, plan, seed=21, grace_s=2.0)
    workers = [cluster.start(name) for name in "abc"]
    cluster.until(lambda: min(w.machine.done for w in workers) >= 6)
    by = {w.machine.shard: w for w in workers}
    cluster.kill(by[1])
    cluster.until(lambda: by[0].machine.done >= 100)
    again = cluster.start(by[1].name)
    cluster.until(lambda: cluster.controller.state.shards[1].speaker == 1)  # it has caught up
    before = cluster.controller.state.shards[0].surrogate_step
    assert again.machine.done < before
    cluster.kill(by[0])
    cluster.until(lambda: cluster.controller.state.shards[0].surrogate_step > before)
    assert [s.speaker for s in cluster.controller.state.shards] == [1, 1, 2]
    cluster.start(by[0].name)
    assert cluster.finish().ok
    check_steps(cluster)
    check_streams(cluster)


@pytest.mark.slow
def test_shard_goes_to_a_standby_and_its_old_owner_is_fenced(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=60), seed=4, grace_s=2.0)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.composes and b.machine.composes)
    c = cluster.start("c")
    cluster.until(lambda: a.machine.done >= 4 and c.session > 0)
    assert c.machine.shard == -1
    shard = a.machine.shard
    cluster.cut(a)
    cluster.until(lambda: c.machine.composes)
    assert c.machine.shard == shard
    cluster.connect(a)  # it still believes that the shard is its own, and says so
    cluster.until(lambda: a.machine.shard == -1)
    assert cluster.controller.owner_of(shard).worker == "c"  # type: ignore[union-attr]
    assert cluster.finish().ok
    check_streams(cluster)


def surrogates_of(cluster: MixtureStage, shard: int) -> list[SurrogatesRefreshed]:
    return [record for record in of_kind(cluster, SurrogatesRefreshed) if record.shard == shard]


@pytest.mark.slow
def test_experts_of_a_lost_owner_go_on_with_the_next_one(
    tmp_path: Path,
) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=60, **TWICE), seed=21, grace_s=2.0)
    for name in ("a", "b", "c"):
        cluster.start(name)
    by_shard = {w.machine.shard: w for w in cluster.workers.values()}
    cluster.until(lambda: all(w.machine.done >= 6 for w in cluster.workers.values()))
    by_shard = {w.machine.shard: w for w in cluster.workers.values()}
    first, second = by_shard[0], by_shard[1]
    cluster.kill(first)
    cluster.until(lambda: surrogates_of(cluster, 0)[-1].by == 1)
    assert 0 in second.machine.speaks
    key = (Tier.EXPERTS, 0)
    alone = cluster.controller.state.fragments[key].version
    cluster.until(lambda: cluster.controller.state.fragments[key].version >= alone + 2)
    assert cluster.controller.state.fragments[key].shards == (1,)
    again = cluster.start(first.name)
    cluster.until(lambda: again.machine.composes)
    assert again.machine.shard == 0
    assert again.machine.done < second.machine.done
    cluster.until(lambda: again.machine.held[key].base >= alone + 2)
    newest = fragment_from(cluster.store.get(cluster.controller.state.fragments[key].payload))
    assert again.driver.state is not None
    assert len(again.driver.state.named(newest)) == len(newest)
    assert surrogates_of(cluster, 0)[-1].by == 1  # what the first has to say is still older
    go_on = second.take_no_step()  # it is overtaken
    cluster.until(lambda: surrogates_of(cluster, 0)[-1].by is None)
    go_on()
    assert cluster.finish().ok
    assert [(change.shard, change.by) for change in of_kind(cluster, SpeakerChanged)] == [(0, 1), (0, 0)]
    check_streams(cluster)
    steps = [record.step for record in surrogates_of(cluster, 0)]
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_replacement_starts_from_kept_state_and_newest_merge(tmp_path: Path) -> None:
    """A replacement starts from the kept state and the newest merge of its experts."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=60, **TWICE), seed=22, grace_s=2.0)
    for name in ("a", "b", "c"):
        cluster.start(name)
    cluster.until(lambda: all(w.machine.done >= 6 for w in cluster.workers.values()))
    lost = next(w for w in cluster.workers.values() if w.machine.shard == 0)
    cluster.kill(lost)
    fragments = cluster.controller.state.fragments
    version = fragments[Tier.EXPERTS, 0].version
    cluster.until(lambda: fragments[Tier.EXPERTS, 0].version >= version + 2)
    heir = cluster.start("d")
    cluster.until(lambda: heir.role is not None)
    go_on = heir.take_no_step()  # it does not train yet
    cluster.until(lambda: heir.machine.composes)
    cluster.settle()
    machine, state = heir.machine, heir.driver.state
    assert state is not None
    assert machine.done == of_kind(cluster, ShardGranted)[-1].step
    for shard in (0, 2):
        held = fragments[Tier.EXPERTS, shard]
        merged = fragment_from(cluster.store.get(held.payload))
        assert machine.held[Tier.EXPERTS, shard].base == held.version
        check_equal(state.named(merged), merged)
    go_on()
    assert cluster.finish().ok
    check_streams(cluster)


@pytest.mark.slow
def test_surrogates_of_other_shards_are_refused(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=24, **TWICE), seed=23)
    for name in ("a", "b", "c"):
        cluster.start(name)
    cluster.until(lambda: all(w.machine.done >= 5 for w in cluster.workers.values()))
    first, second = (next(w for w in cluster.workers.values() if w.machine.shard == n) for n in (0, 1))
    said = [s for s in cluster.sent if isinstance(s, mm.PublishSurrogates) and s.shard == 0][-1]
    of_another = replace(said, shard=1, epoch=second.machine.epoch, step=said.step + 1)
    second.say(of_another, cluster.store.get(said.payload))
    first.say(replace(said, of=1), cluster.store.get(said.payload))
    kept = [s for s in cluster.sent if isinstance(s, mm.SaveShard) and s.shard == 1][-1]
    state, step, held = shard_from(cluster.store.get(kept.payload), cluster.plan)
    wrong = shard_bytes(replace(state, slots=state.slots[:, ::-1]), step, held, cluster.plan)
    second.say(replace(kept, payload=f"shard/{digest_of(wrong)}"), wrong)
    cluster.settle()
    cluster.until(lambda: len(of_kind(cluster, SyncNote)) >= 3)
    notes = [note.why for note in of_kind(cluster, SyncNote)]
    for expected in (
        "the composer of shard 1 speaks for shard 0, for which 0 does",
        "not the surrogates of all experts of shard 1",
        "owns other experts than those of shard 1",
    ):
        assert sum(expected in note for note in notes) == 1
    assert cluster.finish().ok
    check_streams(cluster)


def test_the_syncer_goes_on_from_its_journal(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=20), seed=5)
    a, _ = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.done >= 6)
    versions = {key: fragment.version for key, fragment in cluster.controller.state.fragments.items()}
    cluster.restart_gateway()
    assert {key: f.version for key, f in cluster.controller.state.fragments.items()} == versions
    assert cluster.finish().ok
    check_streams(cluster)
    check_steps(cluster)


@pytest.mark.slow
def test_connected_composers_keep_shards_across_a_restart(
    tmp_path: Path,
) -> None:
    """They have newer states than the store; compiling may take longer than any grace time."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=60), seed=13)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.composes and b.machine.composes)
    cluster.start("w")
    cluster.until(lambda: a.machine.done >= 6)
    cluster.compiling = True
    cluster.restart_gateway()
    shards = {x.name: x.machine.shard for x in (a, b)}
    cluster.until(lambda: a.machine.done >= 50)
    assert cluster.now > 15  # the grace time is 4 s
    done = a.machine.done
    cluster.compiling = False
    cluster.until(lambda: a.machine.epoch == 2 and b.machine.epoch == 2)
    assert {x.name: x.machine.shard for x in (a, b)} == shards
    assert all(grant.step >= min(done, b.machine.done) - 2 for grant in of_kind(cluster, ShardGranted)[2:])
    assert cluster.finish().ok
    assert not any(note.what == "fenced" for note in of_kind(cluster, SyncNote))


@pytest.mark.slow
def test_absent_store_costs_no_round_and_no_loss(tmp_path: Path) -> None:
    """A store that is away until all steps are taken costs no round and no loss."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=16), seed=14)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: min(a.machine.done, b.machine.done) >= 5)
    cluster.store_away = True
    cluster.controller.policy = replace(cluster.controller.policy, stuck_after_s=5.0)
    cluster.until(lambda: a.machine.finished and b.machine.finished)
    ended = cluster.now
    cluster.until(lambda: cluster.now > ended + 30)
    assert all(worker.alive and worker.session for worker in (a, b))  # none is restarted for taking no step
    cluster.store_away = False
    assert cluster.finish().ok
    assert [line.round for line in cluster.lines] == [1, 2, 3, 4]
    assert all(np.isfinite(line.loss) for line in cluster.lines)
    check_steps(cluster)
    check_streams(cluster)


def test_last_state_is_void_after_another_lost_its_steps(tmp_path: Path) -> None:
    """A saves its last state, as B has taken the other steps; no state of B is saved, and both processes end."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=8), seed=14)
    a, b = cluster.start("a"), cluster.start("b")

    def save_nothing(worker: Worker) -> None:
        send = worker.driver.post.send
        worker.driver.post.send = lambda one, data: None if isinstance(one, mm.SaveShard) else send(one, data)

    b.when_loaded(save_nothing)
    cluster.until(lambda: a.machine.shard >= 0 and cluster.controller.rounds.has_ended(a.machine.shard))
    state = cluster.controller.state
    assert state.shards[b.machine.shard].step == 0
    assert state.round == 0
    cluster.kill(b)
    cluster.kill(a)
    cluster.start("a")
    cluster.start("b")
    assert cluster.finish().ok
    check_steps(cluster)
    last = next(asked for asked in cluster.asked if isinstance(asked, AssembleModel) and asked.round == 2)
    steps = [shard_from(cluster.store.get(payload), cluster.plan)[1] for payload in last.shards]
    assert sum(steps) >= cluster.plan.most_steps, steps


def test_unusable_and_stale_messages_are_counted(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=16), seed=6)
    a, _ = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.done >= 5)
    machine = a.machine
    common = {"shard": machine.shard, "epoch": machine.epoch}
    bad = mm.PublishFragment(**common, tier="router", fragment=0, base=0, tokens=1, steps=1, payload="x")
    a.say(bad, b"nonsense")
    a.say(mm.StepTaken(shard=machine.shard, epoch=9, step=1, loss=1.0, seconds=0.1), None)
    for kind in (mm.SaveShard, mm.PublishSurrogates):
        old = next(s for s in cluster.sent if isinstance(s, kind) and s.shard == machine.shard)
        a.say(old, cluster.store.get(old.payload))
    a.say(mm.RequestTokens(**common, first=26, count=7), None)
    before = dict(cluster.controller.rounds.refused)
    cluster.settle()
    cluster.until(lambda: len(of_kind(cluster, SyncNote)) == 4)
    notes = [note.what for note in of_kind(cluster, SyncNote)]
    assert Counter(notes) == {"unusable": 2, "fenced": 1, "regression": 1}
    counts = cluster.controller.rounds.refused
    cluster.until(lambda: counts.get("regression", 0) > before.get("regression", 0) + 1)
    assert counts["regression"] == before.get("regression", 0) + 2  # of the shard's state and of its surrogates
    assert cluster.finish().ok


@pytest.mark.parametrize("forged", ["step", "negative", "progress"])
def test_impossible_number_counts_nowhere(tmp_path: Path, forged: str) -> None:
    """A step beyond all leases is noted; one below zero is no number of a step, and ends the connection."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=16), seed=6)
    a, _ = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.done >= 5)
    machine, session = a.machine, a.session
    if forged == "progress":
        kept = next(s for s in cluster.sent if isinstance(s, mm.SaveShard) and s.shard == machine.shard)
        a.say(replace(kept, epoch=machine.epoch, progress=10**15), cluster.store.get(kept.payload))
    else:
        step = 10**12 if forged == "step" else -(10**12)
        a.say(mm.StepTaken(shard=machine.shard, epoch=machine.epoch, step=step, loss=1.0, seconds=0.1), None)
    cluster.settle()
    if forged == "negative":
        cluster.until(lambda: a.session != session)
    else:
        cluster.until(lambda: any(note.what == "unusable" for note in of_kind(cluster, SyncNote)))
        assert a.session == session
    assert cluster.finish().ok
    assert max(shard.step for shard in cluster.controller.state.shards) <= 2 * 16  # all steps of the run


@pytest.mark.slow
def test_composer_with_three_infinite_losses_hands_its_shard_on(tmp_path: Path) -> None:
    """A composer whose loss is not finite three times hands its shard on."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=24), seed=6)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.composes and b.machine.composes)
    spare = cluster.start("c")
    cluster.until(lambda: a.machine.done >= 3 and spare.session > 0)
    shard = a.machine.shard
    for times in (1, 2, 3):
        cluster.until(lambda: a.session in cluster.controller.composing)
        failed = m.TaskFailed(task=0, kind="numerics", reason="the loss became nan", step=4)
        a.say(failed, None)
        cluster.until(lambda times=times: len(of_kind(cluster, TaskAborted)) == times)
    cluster.until(lambda: spare.machine.shard == shard)
    assert cluster.finish().ok
    assert {record.reason for record in of_kind(cluster, TaskAborted)} == {"the loss became nan"}
    assert of_kind(cluster, ShardGranted)[-1].worker == "c"
    assert "3 failed tasks in a row" in cluster.controller.membership.banned["a"]
    check_streams(cluster)


@pytest.mark.slow
def test_composers_without_the_data_get_tokens_from_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composers without access to the data get their tokens from the gateway."""
    monkeypatch.setattr(plan_module, "AHEAD_BYTES", 0)  # 8 steps ahead
    plan = make_plan(tmp_path, steps=24, pace="lockstep", delivery="gateway")
    assert plan.steps_ahead == 8
    cluster = MixtureStage(tmp_path, plan)
    nowhere = replace(plan.order, file=replace(plan.order.file, url="/nowhere"))
    cluster.told_plan = replace(plan, order=nowhere, held_out=tuple(replace(x, url="/nowhere") for x in plan.held_out))
    for name in ("a", "b"):
        cluster.start(name)
    assert cluster.finish().ok
    for composer in trained(plan).composers:
        check_equal(composing(cluster, composer.number).dense, composer.dense)
    assert cluster.lines[-1].eval_loss is not None


@pytest.mark.slow
def test_composer_goes_on_while_its_gateway_tokens_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "AHEAD_BYTES", 0)
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=40, delivery="gateway"), seed=12)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: a.machine.done >= 6)
    cluster.cut(a)
    done = a.machine.done
    cluster.until(lambda: b.machine.done >= 30)
    assert done + 4 <= a.machine.done <= done + 8
    cluster.connect(a)
    cluster.kill(b)
    cluster.start("b")
    assert cluster.finish().ok
    check_streams(cluster)


@pytest.mark.slow
def test_free_pace_horizon_of_1_publishes_after_every_merge(
    tmp_path: Path,
) -> None:
    merges = []
    for horizon in (1, 2):
        folder = tmp_path / str(horizon)
        folder.mkdir()
        plan = make_plan(folder, steps=40, cadence=Cadence(horizon, horizon, 4, refresh=2))
        cluster = MixtureStage(folder, plan, seed=3)
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
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=4))
    drawn = merged_model(cluster.prepared.initial(), cluster.plan.model)
    given = {name: value + 1 for name, value in drawn.items()}
    start = replace_dataclass(cluster.prepared, given=lambda: given).initial()
    check_equal(merged_model(start, cluster.plan.model), given)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        pytest.param(3, OFFLOADED, marks=pytest.mark.slow),
        *(
            pytest.param(n, options, marks=pytest.mark.soak)
            for n in range(1, 20)
            for options in (
                {},
                TWICE | CHANGES,
                CHANGES,
                COPIES,
                TWICE | CHANGES | SLOW,
                COPIES | SLOW,
                OFFLOADED | SLOW,
            )
        ),
    ],
)
def test_random_losses_keep_the_window_of_sketches(tmp_path: Path, seed: int, options: dict) -> None:
    """More kinds of faults, and more runs: test_mixture_schedules.py."""
    grace_s = 1.0 if "replicas" in options else 4.0  # so short that others speak for who is lost
    options = dict(options)
    slow_s = options.pop("slow", None)
    plan = make_plan(tmp_path, steps=24, **options)
    cluster = MixtureStage(tmp_path, plan, seed=seed, grace_s=grace_s)
    rng = random.Random(seed)

    def start(name: str) -> None:
        worker = cluster.start(name)
        if name == "a":
            worker.slow(up_s=slow_s, down_s=slow_s)

    for name in ("a", "b", "c"):
        start(name)

    def watch(seconds: float) -> None:
        end = cluster.now + seconds
        cluster.advance(lambda: check_window(cluster, exactly=False) or cluster.finished is not None, end)

    for _ in range(12):
        watch(rng.uniform(1, 8))
        if cluster.finished is not None:
            break
        what, name = rng.choice(["kill", "cut", "gateway"]), rng.choice(sorted(cluster.workers))
        if what == "gateway":
            cluster.restart_gateway()
            continue
        worker = cluster.workers[name]
        cluster.cut(worker) if what == "cut" else cluster.kill(worker)
        watch(rng.uniform(0, 3))
        cluster.connect(worker) if what == "cut" else start(name)
    cluster.until(lambda: check_window(cluster, exactly=False) or cluster.finished is not None)
    assert cluster.finish().ok
    assert stale(cluster) == 0
    check_streams(cluster, all_moved=slow_s is None)  # the others may have taken all steps before a slow one had begun
    assert all(np.isfinite(line.loss) for line in cluster.lines)
    assert sorted(line.round for line in cluster.lines) == list(range(1, cluster.policy.rounds + 1))
    assert next(line for line in cluster.lines if line.round == cluster.policy.rounds).eval_loss is not None
