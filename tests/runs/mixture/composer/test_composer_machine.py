"""When a composer publishes, adopts, refreshes and saves: single situations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mixture_stage import make_plan
from msgspec.structs import replace

from planetary.runs.mixture.composer.events import (
    Adopt,
    ConnectionLost,
    EvaluateView,
    ExpertsArrived,
    Fit,
    GrantArrived,
    Keep,
    MergeArrived,
    Publish,
    SketchesAnswered,
    SketchSent,
    SpeakerAssigned,
    StepBoundary,
    StepCompleted,
    StepsReported,
    StoodDown,
    SurrogatesInstalled,
    TakeStep,
)
from planetary.runs.mixture.composer.machine import ComposerMachine
from planetary.runs.mixture.methods.tiers import Tier
from planetary.runs.mixture.records import FORGET_STEPS

ROUTER, LATENT, BACKBONE = (Tier.ROUTER, 0), (Tier.LATENT, 0), (Tier.BACKBONE, 0)


def machine(folder: Path, **options: Any) -> ComposerMachine:
    """A composer of shard 0 that is connected and has everything, before its first step; merges every 2, 2, 4 steps."""
    made = ComposerMachine(make_plan(folder, steps=40, per_round=10, **options), [ROUTER, LATENT, BACKBONE])
    made.handle(GrantArrived(0, 1, 0, {}))
    for shard in range(2):
        made.handle(SurrogatesInstalled(shard, 0, 0))
    for layer in range(len(made.expert_versions)):
        made.handle(ExpertsArrived(layer, 0, -1))
    assert made.handle(StepBoundary()) == [Keep(), TakeStep()]
    return made


def take(made: ComposerMachine, steps: int) -> list:
    """Take steps; return what the boundary after the last asks for."""
    found: list = []
    for _ in range(steps):
        made.handle(StepCompleted())
        found = made.handle(StepBoundary())
    return found


def test_composer_publishes_and_saves_on_time_without_waits(tmp_path: Path) -> None:
    made = machine(tmp_path)
    assert take(made, 1) == [TakeStep()]
    assert take(made, 1) == [Fit(), Publish(ROUTER, 0, 2), Publish(LATENT, 0, 2), Keep(), TakeStep()]
    assert take(made, 1) == [TakeStep()]
    # The first two are still being merged; only what is not under way is published.
    assert take(made, 1) == [Fit(), Publish(BACKBONE, 0, 4), Keep(), TakeStep()]


def test_late_merge_keeps_later_progress_for_the_next(tmp_path: Path) -> None:
    """A merge that comes late keeps what was learned since and the next counts those steps."""
    made = machine(tmp_path)
    take(made, 3)
    assert made.handle(MergeArrived(ROUTER, 1, (0, 1)))
    assert made.handle(StepBoundary())[0] == Adopt(ROUTER, 1, carry=True)
    assert Publish(ROUTER, 1, 2) in take(made, 1)  # steps 3 and 4: those since the publication


def test_merge_without_own_publication_replaces_ones_own(tmp_path: Path) -> None:
    made = machine(tmp_path)
    take(made, 3)
    assert made.handle(MergeArrived(ROUTER, 1, (1,)))
    assert made.handle(StepBoundary())[0] == Adopt(ROUTER, 1, carry=False)
    # Two versions on: what is in it was published from another base.
    assert made.handle(MergeArrived(LATENT, 2, (0, 1)))
    assert made.handle(StepBoundary())[0] == Adopt(LATENT, 2, carry=False)


def test_older_and_repeated_versions_do_not_count(tmp_path: Path) -> None:
    made = machine(tmp_path)
    take(made, 2)
    assert made.handle(MergeArrived(ROUTER, 1, (0, 1)))
    assert not made.handle(MergeArrived(ROUTER, 1, (0, 1)))
    made.handle(StepBoundary())
    assert not made.handle(MergeArrived(ROUTER, 1, (0, 1)))
    assert not made.handle(MergeArrived(ROUTER, 0, ()))
    made.handle(SurrogatesInstalled(1, 5, 5))
    made.handle(SurrogatesInstalled(1, 3, 3))
    assert made.versions == [0, 5]


@pytest.mark.parametrize("how", ["reconnected", "told that nothing is under way"])
def test_a_publication_that_may_be_lost_is_repeated(tmp_path: Path, how: str) -> None:
    made = machine(tmp_path)
    take(made, 2)
    assert Publish(ROUTER, 0, 4) not in take(made, 2)
    if how == "reconnected":
        made.handle(ConnectionLost())
        made.handle(GrantArrived(0, 2, made.done, None))
    else:
        assert not made.handle(MergeArrived(ROUTER, 0, ()))
    assert Publish(ROUTER, 0, 6) in take(made, 2)


def test_disconnected_composer_goes_on_and_saves_later(tmp_path: Path) -> None:
    """Without a connection it goes on and saves its state as soon as there is one."""
    made = machine(tmp_path)
    made.handle(ConnectionLost())
    assert take(made, 2) == [Fit(), TakeStep()]
    assert take(made, 1) == [TakeStep()]
    made.handle(GrantArrived(0, 2, made.done, None))
    assert made.handle(StepBoundary()) == [Keep(), TakeStep()]


def test_it_ends_when_the_gateway_reports_all_steps(
    tmp_path: Path,
) -> None:
    made = machine(tmp_path)
    assert TakeStep() in take(made, 39)
    assert not made.seems_done
    assert take(made, 1) == [Fit(), Keep()]
    assert made.seems_done
    assert not made.finished
    made.handle(StepsReported((40, 40)))
    assert made.handle(StepBoundary()) == [EvaluateView(), Keep()]
    assert (made.finished, made.progress) == (True, 40)
    assert made.handle(StepBoundary()) == []
    made.handle(StoodDown())
    assert made.handle(StepBoundary()) == []


def test_lock_step_waits_for_merges_and_surrogates(tmp_path: Path) -> None:
    """In lock step it waits for merges and surrogates and saves after them."""
    made = machine(tmp_path, pace="lockstep")
    assert take(made, 2) == [Fit(), Publish(ROUTER, 0, 2), Publish(LATENT, 0, 2)]
    assert made.waits_for() == "the merge of router fragment 0"
    made.handle(MergeArrived(ROUTER, 1, (0, 1)))
    made.handle(MergeArrived(LATENT, 1, (0, 1)))
    assert made.handle(StepBoundary()) == [Adopt(ROUTER, 1, False), Adopt(LATENT, 1, False)]
    made.handle(SurrogatesInstalled(0, 2, 2))
    assert made.waits_for() == "the surrogates of shard 1"
    made.handle(SurrogatesInstalled(1, 2, 2))
    assert made.handle(StepBoundary()) == [Keep(), TakeStep()]


def test_lock_step_fits_surrogates_from_merged_copies(tmp_path: Path) -> None:
    twice = {"composers": 3, "batch_size": 6, "replicas": 2}
    copies = [(Tier.EXPERTS, shard) for shard in range(3)]
    for pace in ("free", "lockstep"):
        made = ComposerMachine(make_plan(tmp_path, steps=40, pace=pace, **twice), [ROUTER, *copies])
        made.handle(GrantArrived(0, 1, 0, {}))
        assert list(made.held) == [ROUTER, copies[0], copies[2]]  # its own shard, and the one before
        for shard in range(3):
            made.handle(SurrogatesInstalled(shard, 0, 0))
        made.handle(StepBoundary())
        publications = [Publish(key, 0, 2) for key in made.held]
        if pace == "free":
            assert take(made, 2) == [Fit(), *publications, Keep(), TakeStep()]
            continue
        assert take(made, 2) == publications
        for key in made.held:
            made.handle(MergeArrived(key, 1, (0, 1)))
            found = made.handle(StepBoundary())
            assert found[0] == Adopt(key, 1, False)
        assert found == [Adopt(copies[2], 1, False), Fit()]
        assert made.handle(StepBoundary()) == []  # the others' surrogates, and its own


@pytest.mark.parametrize(("fitted", "age"), [(10, 50.0), (59.5, 0.5), (64, -4.0)])
def test_surrogates_are_as_old_as_their_fit_whenever_they_came(tmp_path: Path, fitted: float, age: float) -> None:
    made = ComposerMachine(make_plan(tmp_path, steps=100), [ROUTER])
    made.handle(GrantArrived(0, 1, 0, {}))
    for _ in range(60):
        made.handle(StepCompleted())
    made.handle(SurrogatesInstalled(0, 60, 60))  # its own do not count
    made.handle(SurrogatesInstalled(1, 10, fitted))
    assert (made.progress, made.surrogate_age) == (60, age)
    made.handle(StepCompleted())
    made.handle(SurrogatesInstalled(1, 10, fitted))  # once more, as after a lost connection
    assert made.surrogate_age == age + 1


def test_age_counts_surrogates_of_foreign_experts_only(
    tmp_path: Path,
) -> None:
    """The age is of surrogates of experts that are not its own where these have several owners."""
    made = ComposerMachine(make_plan(tmp_path, steps=100, composers=4, batch_size=8, replicas=2), [ROUTER])
    made.handle(GrantArrived(1, 1, 0, {}))
    for _ in range(20):
        made.handle(StepCompleted())
    for shard, fitted in enumerate((20, 20, 6, 12)):
        made.handle(SurrogatesInstalled(shard, 20, fitted))
    assert made.surrogate_age == 11.0  # of shards 2 and 3: it owns those of 1 and 0
    without = ComposerMachine(make_plan(tmp_path, steps=100, rank=0), [ROUTER])
    without.handle(GrantArrived(0, 1, 0, {}))
    assert without.surrogate_age is None


def test_one_fit_serves_all_shards_that_a_composer_speaks_for(tmp_path: Path) -> None:
    made = machine(tmp_path)
    made.handle(SpeakerAssigned(()))
    assert Fit() not in take(made, 2)
    made.handle(GrantArrived(0, 2, made.done, None, (0, 1)))
    assert take(made, 2).count(Fit()) == 1
    assert made.speaks == (0, 1)


def test_offloading_composer_waits_for_first_of_each_layer(tmp_path: Path) -> None:
    """A composer whose experts are improved elsewhere waits for the first of every layer."""
    plan = make_plan(tmp_path, steps=40, per_round=10, sketches="owner", rank=0)
    made = ComposerMachine(replace(plan, model=replace(plan.model, n_layer=2)), [ROUTER, LATENT, BACKBONE])
    made.handle(GrantArrived(0, 1, 0, {}))
    assert made.handle(ExpertsArrived(1, 3, 2))
    assert not made.composes
    assert made.handle(StepBoundary()) == []
    assert made.handle(ExpertsArrived(0, 0, -1))
    assert made.handle(StepBoundary()) == [Keep(), TakeStep()]
    made.handle(ConnectionLost())
    assert made.handle(StepBoundary()) == [TakeStep()]  # what is here is enough
    made.handle(GrantArrived(1, 2, 0, {}))
    assert made.handle(StepBoundary()) == []


def test_sketches_wait_for_expert_workers_and_steps_do_not(tmp_path: Path) -> None:
    made = machine(tmp_path, sketches="owner")
    assert made.plan.window == 2
    assert not made.may_offer(0)  # the gateway has not said what waits
    made.handle(SketchesAnswered(0, -1, ()))
    for _ in range(2):
        assert made.may_offer(0)
        made.handle(SketchSent(0))
        assert take(made, 1) == [TakeStep()] or made.done == 2
    assert not made.may_offer(0)
    assert not made.handle(ExpertsArrived(0, 0, -1))  # sent for another reason
    made.handle(SketchesAnswered(0, 1, (0, 1)))
    assert not made.may_offer(0)
    assert made.handle(ExpertsArrived(0, 1, 0))
    made.handle(SketchesAnswered(0, 1, (1,)))
    assert made.may_offer(0)
    made.handle(SketchSent(0))
    assert not made.handle(ExpertsArrived(0, 1, 1))  # a refused update: the version that is here
    made.handle(SketchesAnswered(0, 1, ()))  # the sketch of step 2 is on its way
    assert made.may_offer(0)
    take(made, 1)
    made.handle(SketchSent(0))
    assert not made.may_offer(0)
    take(made, 2 * FORGET_STEPS)
    assert not made.may_offer(0)  # the gateway says when they are too old
    made.handle(SketchesAnswered(0, 3, ()))
    assert made.may_offer(0)


@pytest.mark.parametrize("pace", ["free", "lockstep"])
def test_sketches_wait_for_the_report_after_a_lost_link(tmp_path: Path, pace: str) -> None:
    made = machine(tmp_path, sketches="owner", pace=pace)
    made.handle(SketchesAnswered(0, -1, ()))
    made.handle(ConnectionLost())
    assert not made.may_offer(0)
    made.handle(GrantArrived(0, 2, 0, None))
    assert made.may_offer(0) == (pace == "lockstep")
    made.handle(SketchesAnswered(0, -1, (5,)))
    assert made.may_offer(0)
    made.handle(SketchSent(0))
    assert made.may_offer(0) == (pace == "lockstep")
    made.handle(GrantArrived(0, 2, 0, None))  # its state is wanted again, on the same connection
    assert made.may_offer(0) == (pace == "lockstep")
    made.handle(SketchesAnswered(0, 0, ()))
    assert made.may_offer(0)
