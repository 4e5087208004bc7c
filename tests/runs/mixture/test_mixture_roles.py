"""Operators choose their workers' roles in a mixture: composers, expert workers, or any."""

from __future__ import annotations

from pathlib import Path

import pytest
from mixture_checks import of_kind
from mixture_stage import MixtureStage, make_plan

from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerJoined
from planetary.run.kind.mixture import Mixture
from planetary.run.kinds import all_kinds
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.plan import MixturePlan
from planetary.runs.mixture.records import ShardGranted
from planetary.runs.mixture.training.expert_optimizer import OFFLOADED
from planetary.runs.rounds.records import EvalFinished

OFFLOADED_OPTIONS = {"sketches": "all", "acceptance": Policy(norm_ratio=10)}


def offloaded(folder: Path, steps: int = 8) -> MixturePlan:
    return make_plan(folder, steps=steps, **OFFLOADED_OPTIONS)


def owners(cluster: MixtureStage) -> set[str]:
    return {record.worker for record in of_kind(cluster, ShardGranted)}


@pytest.mark.slow
def test_expert_workers_and_composers_keep_their_roles(tmp_path: Path) -> None:
    """The expert worker is the first to come, and one composer more than there are shards stands by."""
    cluster = MixtureStage(tmp_path, offloaded(tmp_path))
    for name, roles in (("e", ("expert",)), ("a", ("composer",)), ("b", ("composer",)), ("c", ("composer",))):
        cluster.start(name, roles=roles)
    cluster.until(lambda: cluster.workers["e"].session > 0)
    session = cluster.workers["e"].session
    assert cluster.finish().ok
    assert len(owners(cluster)) == 2
    assert owners(cluster) <= {"a", "b", "c"}
    improvers = {session for session, message in cluster.told_to if isinstance(message, mm.ImproveExperts)}
    assert improvers == {session}
    assert of_kind(cluster, EvalFinished)


@pytest.mark.slow
def test_run_without_composers_waits_for_one(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, offloaded(tmp_path))
    for name in "ef":
        cluster.start(name, roles=("expert",))
    cluster.until(lambda: cluster.controller.stalls.why.endswith("e, f may not or cannot compose"))
    assert cluster.controller.stalls.why.startswith("no composer for shard 0, 1")
    assert cluster.controller.stalls.why.endswith("e, f may not or cannot compose")
    assert not owners(cluster)
    cluster.start("a")  # without a role: whatever is needed
    cluster.start("b", roles=("composer", "expert"))
    assert cluster.finish().ok
    assert owners(cluster) == {"a", "b"}


@pytest.mark.parametrize("role", ["expert", "trainer"])
def test_unknown_role_is_refused_with_the_known_ones(tmp_path: Path, role: str) -> None:
    cluster = MixtureStage(tmp_path, make_plan(tmp_path, steps=8))
    cluster.start("e", roles=(role,))
    cluster.until(lambda: any(isinstance(message, m.Refused) for message in cluster.told))
    (refused,) = [message for message in cluster.told if isinstance(message, m.Refused)]
    assert (refused.code, refused.kind, refused.retry) == ("role", "data", False)
    assert refused.reason == (
        f"worker e was started with --role {role}, and the roles of this run are composer: start it with one of "
        "these, or without --role"
    )
    assert not of_kind(cluster, WorkerJoined)


def test_fastest_workers_compose_and_stand_by(tmp_path: Path) -> None:
    """The slowest is the first to come; of the others one is lost for good in the middle of the run."""
    cluster = MixtureStage(tmp_path, offloaded(tmp_path, steps=16), workers=4)
    for name, seconds in (("slow", 0.9), ("lost", 0.2), ("fast", 0.1), ("next", 0.3)):
        cluster.start(name, composer_s=seconds)
    cluster.until(lambda: len(owners(cluster)) == 2)
    assert owners(cluster) == {"fast", "lost"}
    cluster.kill(cluster.workers["lost"])
    assert cluster.finish().ok
    assert owners(cluster) == {"fast", "lost", "next"}


def test_choice_of_composers_waits_no_longer_than_a_start(
    tmp_path: Path,
) -> None:
    """The choice of composers waits for a worker that never comes as long as a start may take."""
    cluster = MixtureStage(tmp_path, offloaded(tmp_path), workers=3)
    for name in "ab":
        cluster.start(name)
    cluster.until(lambda: len(cluster.controller.desk.ready_workers()) == 2)
    ready_at = cluster.world.now
    cluster.until(lambda: len(owners(cluster)) == 2)
    assert cluster.world.now - ready_at == pytest.approx(cluster.policy.startup_grace_s, rel=0.1)
    assert cluster.finish().ok


def test_a_device_that_composes_wrongly_improves_experts(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, offloaded(tmp_path))
    cluster.start("e", can=("expert",))
    for name in "ab":
        cluster.start(name)
    assert cluster.finish().ok
    assert owners(cluster) == {"a", "b"}


def test_local_run_without_capable_devices_ends_with_a_reason(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, offloaded(tmp_path), local=True)
    for name in "ef":
        cluster.start(name, can=("expert",))
    cluster.until(lambda: cluster.finished is not None)
    assert cluster.finished is not None
    assert (cluster.finished.ok, cluster.finished.kind) == (False, "compile")
    assert "too few usable workers are left for the composers" in cluster.finished.reason
    assert "as found" in cluster.finished.reason


def test_the_flag_takes_the_names_that_the_kinds_of_run_have() -> None:
    assert Mixture.roles == tuple(OFFLOADED.roles)
    names = [role for kind in all_kinds() for role in kind.roles]
    assert len(set(names)) == len(names)


def test_the_start_reports_no_missing_composers(tmp_path: Path) -> None:
    cluster = MixtureStage(tmp_path, offloaded(tmp_path))
    cluster.settle()
    assert cluster.controller.stalls.why == "waiting for a worker to connect"
    for name in "ab":
        cluster.start(name)
    assert cluster.finish().ok
    granted = of_kind(cluster, ShardGranted)
    assert [record.news for record in granted if not record.step] == [""] * len(granted)
