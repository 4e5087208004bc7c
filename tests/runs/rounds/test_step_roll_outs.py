"""A run goes on with another training step at the end of a round, whatever is killed meanwhile, and goes back."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
from fault_schedules import SCHEDULES as RUNS
from fault_schedules import check, recorded_deltas
from small_training import STEPS, small_training

from planetary.core.errors import ClosedError, UserError
from planetary.fleet.protocol.records import ArtifactPublished
from planetary.runs.rounds.records import RoundMerged, RoundsRecord, RoundsResumed, RoundStarted, StepReplaced
from planetary.runs.rounds.roll_out import BEFORE, RollOut, StepWanted, stage_of, steps_of
from planetary.simulation.faults import draw_plan
from planetary.simulation.rounds.cluster import SimCluster

FIRST, SECOND, THIRD, _ = STEPS
LIMIT_S = 2000.0


def cluster_of(seed: int, *, rounds: int = 6, plan: tuple = (), **options: object) -> SimCluster:
    return SimCluster(seed, small_training(rounds=rounds, workers=3, **options), 3, plan)  # type: ignore[arg-type]


def ask(cluster: SimCluster, *overrides: str, back_to: str = "") -> None:
    """Ask the gateway that runs for another step, if it can be asked."""
    gateway, wanted = cluster.gateway, StepWanted(overrides=overrides, back_to=back_to, by="test", why="a trial")
    if gateway is not None:
        with contextlib.suppress(ClosedError, UserError):
            cluster.process.in_context(lambda: steps_of(gateway).roll_out(wanted))


def finish(cluster: SimCluster) -> list[RoundsRecord]:
    assert cluster.run(LIMIT_S), f"hangs: {cluster.waits_for}"
    check(cluster)
    return cluster.journal


def replaced(journal: list[RoundsRecord]) -> list[StepReplaced]:
    return [record for record in journal if isinstance(record, StepReplaced)]


def test_rounds_after_a_roll_out_are_trained_with_the_new_step() -> None:
    """`check` computes all parameters from the journal: each lease with the step of its round."""
    cluster = cluster_of(1)
    stages: list[RollOut] = []
    cluster.world.at(5.0, lambda: ask(cluster, SECOND))
    for second in (6.5, 40.0):
        cluster.world.at(second, lambda: stages.append(stage_of(cluster.gateway)) if cluster.gateway else None)
    journal = finish(cluster)
    [record] = replaced(journal)
    assert (record.before, record.model, record.back) == (FIRST, SECOND, False)
    assert (record.by, record.why) == ("test", f"a trial; {SECOND}")
    assert 0 < record.round < 6
    assert stages[0].state == "preparing"
    place = journal.index(record)
    assert isinstance(journal[place + 1], ArtifactPublished)  # it was verified before
    under_way = sum(isinstance(r, RoundStarted) - isinstance(r, RoundMerged) for r in journal[:place])
    assert under_way == 0
    assert cluster.controller.state.steps == [FIRST, SECOND]
    assert cluster.controller.policy.spec.stablehlo_digest == SECOND


def test_a_roll_back_drops_the_later_steps() -> None:
    cluster = cluster_of(2, rounds=24)
    for second, name, back_to in ((5.0, SECOND, ""), (13.0, THIRD, ""), (21.0, "", FIRST[:8])):
        cluster.world.at(second, lambda n=name, b=back_to: ask(cluster, back_to=b) if b else ask(cluster, n))
    journal = finish(cluster)
    assert [(r.before, r.model, r.back) for r in replaced(journal)] == [
        (FIRST, SECOND, False),
        (SECOND, THIRD, False),
        (THIRD, FIRST, True),
    ]
    assert cluster.controller.state.steps == [FIRST]


@pytest.mark.slow
def test_gateway_killed_at_the_border_keeps_the_journals_step() -> None:
    """Killed before the record the run has the old step, and the roll-out is forgotten; after it, the new one."""
    outcomes = set()
    for second in (10.5, 11.5, 12.0, 12.5, 13.5):
        cluster = cluster_of(3, rounds=8)
        cluster.world.at(5.0, lambda c=cluster: ask(c, SECOND))
        cluster.world.at(second, cluster.kill_gateway)
        journal = finish(cluster)
        assert cluster.struck == ["kill_gateway"]
        resumed = next(i for i, r in enumerate(journal) if isinstance(r, RoundsResumed))
        found = [journal.index(record) < resumed for record in replaced(journal)]
        outcomes.add(tuple(found))
        expected = [FIRST, SECOND] if found else [FIRST]
        assert cluster.controller.state.steps == expected
        assert cluster.controller.policy.spec.stablehlo_digest == expected[-1]
    assert outcomes == {(), (True,)}


@contextlib.contextmanager
def rolled_out(seed: int, *, given: Sequence[str] = ()) -> Iterator[SimCluster]:
    """Make a run whose operator asks for other steps at random times."""
    source = random.Random(seed)
    plan = draw_plan(seed, workers=3, horizon_s=25.0, most=8)
    cluster = cluster_of(seed, rounds=8, plan=tuple(plan), given=given)
    for _ in range(source.randint(1, 4)):
        back = source.random() < 0.3
        step, second = source.choice([*STEPS]), source.uniform(4.0, 30.0)
        cluster.world.at(second, lambda s=step, b=back: ask(cluster, back_to=BEFORE) if b else ask(cluster, s))
    with recorded_deltas(cluster):
        yield cluster


def check_the_newest_step_is_used(cluster: SimCluster) -> None:
    found, state = replaced(cluster.journal), cluster.controller.state
    assert state.steps[-1] == (found[-1].model if found else FIRST)
    assert cluster.controller.policy.spec.stablehlo_digest == state.steps[-1]


SCHEDULES = dataclasses.replace(
    RUNS,
    kind="steps",
    build=rolled_out,
    invariants=(*RUNS.invariants, check_the_newest_step_is_used),
    options={"--set": RUNS.options["--set"]},
)


def test_roll_outs_under_faults() -> None:
    SCHEDULES.run(0)


@pytest.mark.slow
def test_more_roll_outs_under_faults() -> None:
    assert SCHEDULES.sweep(range(100, 116)).records[StepReplaced] > 5
    SCHEDULES.sweep(range(2), given=("sync.compression='int8'",))


def test_impossible_step_is_refused_and_the_run_goes_on() -> None:
    cluster = cluster_of(5)
    cluster.world.at(8.0, lambda: ask(cluster, "no such step"))
    journal = finish(cluster)
    assert not replaced(journal)
    assert cluster.gateway is not None
    assert stage_of(cluster.gateway).state == "refused"
    assert "there is no step 'no such step'" in stage_of(cluster.gateway).reason
    assert any("the training step is not replaced" in note for note in cluster.gateway.notes)


def test_what_cannot_be_rolled_out_is_refused_at_once() -> None:
    said: list[str] = []

    def refused(cluster: SimCluster, **wanted: object) -> None:
        gateway = cluster.gateway
        assert gateway is not None
        try:
            cluster.process.in_context(lambda: steps_of(gateway).roll_out(StepWanted(**wanted)))  # type: ignore[arg-type]
        except (ClosedError, UserError) as error:
            said.append(str(error))

    star, ring = cluster_of(6), cluster_of(6, ring=True)
    star.world.at(8.0, lambda: refused(star, back_to=BEFORE))
    star.world.at(8.1, lambda: refused(star, overrides=(SECOND,)))
    star.world.at(8.2, lambda: refused(star, overrides=(THIRD,)))
    ring.world.at(8.0, lambda: refused(ring, overrides=(SECOND,)))
    finish(star)
    finish(ring)
    assert [text.split(":")[0] for text in said] == [
        "no earlier step of the run is 'before'; there are none",
        "another step is being rolled out",
        "in a ring workers hold the outer state, which a worker that loads another step loses",
    ]
