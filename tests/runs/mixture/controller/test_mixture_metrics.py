"""Times, ages, steps and bytes of a mixture, in its metrics and its status."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from mixture_checks import of_kind
from mixture_stage import MixtureStage, Worker, make_plan

from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.gateway.gateway import worker_status
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.records import FragmentAdvanced, ShardKept, SurrogatesRefreshed
from planetary.runs.mixture.training.replicas import held_shards
from planetary.runs.rounds.training_status import TrainerStatus


@pytest.mark.slow
def test_merge_time_does_not_begin_with_a_refused_publication(tmp_path: Path) -> None:
    """The time that a merge takes does not begin with a publication that was refused."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=24), seed=6)
    a, _ = cluster.start("a"), cluster.start("b")
    held = cluster.controller.state.fragments
    cluster.until(lambda: held[Tier.ROUTER, 0].version == 1)
    published = [s for s in cluster.sent if isinstance(s, mm.PublishFragment) and s.tier == "router"]
    old = next(s for s in published if (s.shard, s.base) == (a.machine.shard, 0))
    stale = cluster.controller.rounds.refused.get("stale", 0)
    a.say(old, cluster.store.get(old.payload))
    cluster.settle()
    cluster.until(lambda: cluster.controller.rounds.refused.get("stale", 0) == stale + 1)
    newest = held[Tier.ROUTER, 0].version
    for worker in cluster.workers.values():
        worker.hang()
    cluster.settle(60.0)
    for worker in cluster.workers.values():
        worker.go_on()
    cluster.until(lambda: held[Tier.ROUTER, 0].version > newest)
    assert all(record.seconds < 50 for record in of_kind(cluster, FragmentAdvanced) if record.tier is Tier.ROUTER)
    assert cluster.finish().ok


def steps_reported(cluster: MixtureStage, shard: int) -> list[mm.StepTaken]:
    return [s for s in cluster.sent if isinstance(s, mm.StepTaken) and s.shard == shard]


TWICE = {"composers": 3, "batch_size": 6, "replicas": 2}


def expected_age(cluster: MixtureStage, worker: Worker) -> float:
    """From the journal: the progress at the fit of the version that a composer has of every shard but its own."""
    machine, training = worker.machine, cluster.plan.training
    mine = held_shards(machine.shard, training.composers, training.replicas)
    fitted = {(r.shard, r.step): r.progress for r in of_kind(cluster, SurrogatesRefreshed)}
    others = [fitted.get((n, step), 0.0) for n, step in enumerate(machine.versions) if n not in mine]
    return machine.progress - sum(others) / len(others)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, TWICE], ids=["one owner", "two owners"])
def test_the_same_surrogates_once_more_are_no_younger(tmp_path: Path, options: dict) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=60, **options), seed=3, grace_s=1000.0)
    workers = [cluster.start(name) for name in "abc"[: cluster.plan.training.composers]]
    cluster.until(lambda: min(w.machine.done for w in workers) >= 6)
    one = workers[0]
    shard = one.machine.shard
    for other in workers[1:]:
        cluster.kill(other)  # from now on its copies of the others are not fitted
    cluster.until(lambda: one.machine.done >= 26)
    before = len([s for s in cluster.told if isinstance(s, mm.SurrogatesReady)])
    cluster.cut(one)
    cluster.connect(one)
    cluster.until(lambda: one.machine.epoch == 2)
    taken = one.machine.done
    cluster.until(lambda: one.machine.done >= taken + 2)
    cluster.until(lambda: steps_reported(cluster, shard)[-1].surrogate_age == one.machine.surrogate_age)
    again = [s for s in cluster.told if isinstance(s, mm.SurrogatesReady)][before:]
    assert any(s.shard != shard and s.step > 0 for s in again)
    age = one.machine.surrogate_age
    assert age is not None
    assert age == expected_age(cluster, one) > 5
    assert steps_reported(cluster, shard)[-1].surrogate_age == age


@pytest.mark.slow
def test_a_speaker_reports_the_progress_at_its_fit(tmp_path: Path) -> None:
    """With several owners: a speaker may have taken fewer steps than whom it speaks for; versions rise all the same."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=80, **TWICE), seed=21, grace_s=2.0)
    workers = [cluster.start(name) for name in "abc"]
    cluster.until(lambda: min(w.machine.done for w in workers) >= 6)
    by = {w.machine.shard: w for w in workers}
    cluster.kill(by[0])
    found = cluster.controller.state.shards
    cluster.until(lambda: found[0].speaker == 1 and found[0].surrogate_step > 30)
    cluster.settle()
    records = [r for r in of_kind(cluster, SurrogatesRefreshed) if r.by == 1]
    assert records
    assert all(0 < r.progress <= r.step for r in records)  # two thirds of the steps: one shard takes none
    assert records[-1].progress < records[-1].step
    for worker in (by[1], by[2]):
        assert worker.machine.surrogate_age == expected_age(cluster, worker)
    restarted = [s.surrogate_progress for s in found]
    cluster.restart_gateway()
    assert [s.surrogate_progress for s in cluster.controller.state.shards] == restarted


@pytest.mark.slow
def test_fitted_surrogates_are_as_old_as_their_sketches(tmp_path: Path) -> None:
    """Surrogates that expert workers fit are as old as the sketches that they used."""
    options = {"sketches": "owner", "precision": "4bit", "acceptance": Policy(norm_ratio=10)}
    plan = make_plan(tmp_path, steps=16, pace="lockstep", fitted_by="expert-workers", **options)
    cluster = MixtureStage(tmp_path, plan)
    for name in "abc":
        cluster.start(name)
    assert cluster.finish().ok
    # Lock step refreshes after every second step; the sketches of that step were taken when one less was done.
    assert {(r.step, r.progress) for r in of_kind(cluster, SurrogatesRefreshed)} == {
        (step, step - 1) for step in range(2, 17, 2)
    }


def shown(cluster: MixtureStage, worker: Worker) -> TrainerStatus:
    return worker_status(cluster.controller, cluster.controller.desk.workers[worker.session])


def steps_at_ends(cluster: MixtureStage, shard: int) -> list[int]:
    """Of a shard, at the ends of rounds, as the journal says: those of its first state at or after each."""
    kept = [record for record in of_kind(cluster, ShardKept) if record.shard == shard]
    ends = range(cluster.plan.steps_per_round, kept[-1].progress + 1, cluster.plan.steps_per_round)
    return [0, *(next(one.step for one in kept if one.progress >= end) for end in ends)]


@pytest.mark.slow
def test_status_and_rounds_have_each_composers_own_steps(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=40), seed=21)
    a, b = cluster.start("a"), cluster.start("b")
    cluster.until(lambda: min(w.machine.done for w in (a, b)) >= 5)
    cluster.kill(b)
    cluster.until(lambda: a.machine.done >= 25)
    b = cluster.start("b")
    cluster.until(lambda: b.machine.composes and b.machine.done >= 8)
    cluster.until(lambda: shown(cluster, a).step != shown(cluster, b).step)
    shown_steps = []
    for worker in (a, b):
        shard, found = worker.machine.shard, shown(cluster, worker)
        at = steps_at_ends(cluster, shard)
        told = cluster.controller.owner_of(shard)
        assert told is not None
        assert (found.round, found.step) == (len(at), told.step - at[-1])
        shown_steps.append(found.step)
    assert shown_steps[0] != shown_steps[1]
    cluster.restart_gateway()
    cluster.until(lambda: len(cluster.controller.composing) == 2)
    assert shown(cluster, a).step < cluster.plan.steps_per_round * 3  # not all that it took in the run
    assert cluster.finish().ok
    for shard in range(2):
        at = steps_at_ends(cluster, shard)
        taken = [line.own.shards[shard].steps for line in cluster.lines]
        assert taken == [after - before for before, after in itertools.pairwise(at)][: len(taken)]
    away, there = (sum(line.own.shards[w.machine.shard].steps for line in cluster.lines) for w in (b, a))
    assert there > away + 10
    assert {line.inner_steps for line in cluster.lines} == {4}  # the mean


@pytest.mark.slow
def test_stopped_evaluation_of_the_last_model_is_resumed(tmp_path: Path) -> None:
    """A run that is stopped while its last model is evaluated evaluates it when it goes on."""
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=8))
    for name in "ab":
        cluster.start(name)
    cluster.until(lambda: cluster.controller.state.round == cluster.policy.rounds)
    rounds = cluster.policy.rounds
    cluster.stop()
    last = cluster.lines[-1]
    assert (last.round, last.eval_loss) == (rounds, None)
    cluster.until(lambda: cluster.has_begun and last not in cluster.lines)  # it was resumed
    assert cluster.finish().ok
    assert [line.round for line in cluster.lines] == list(range(1, last.round + 1))
    again = cluster.lines[-1]
    assert again.eval_loss == cluster.controller.state.evals[last.round]
    assert (again.tokens, again.own.shards) == (last.tokens, last.own.shards)


@pytest.mark.slow
def test_bytes_of_sketches_are_counted_by_composer(tmp_path: Path) -> None:
    options = {"sketches": "owner", "precision": "4bit", "acceptance": Policy(norm_ratio=10)}
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=24, pace="lockstep", **options))
    for name in "abc":
        cluster.start(name)
    assert cluster.finish().ok
    sent = [0, 0]
    for message, nbytes in zip(cluster.sent, cluster.sent_bytes, strict=True):
        if isinstance(message, mm.OfferSketches):
            sent[message.shard] += nbytes
    lines = [line.own for line in cluster.lines]
    assert all(line.sketch_bytes == sum(one.sketch_bytes for one in line.shards) > 0 for line in lines)
    assert [sum(line.shards[n].sketch_bytes for line in lines) for n in range(2)] == sent
    assert min(sent) > 0
