"""What a worker does is made of its job; an operator may say what it is to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input_support import events, gateway, node_flags, run, started, write_config
from controller_bench import Bench
from small_training import SPEC

from planetary.core.errors import UserError
from planetary.core.schedules import Schedule
from planetary.fleet.protocol import messages as m
from planetary.fleet.worker.role import NothingToDo, loader_of
from planetary.run.kinds import worker_roles
from planetary.runs.mixture.loader import MixtureLoader
from planetary.runs.mixture.messages import MixtureJob
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.worker.backend_candidate import candidate_roles
from planetary.runs.rounds.worker.role import TrainingLoader
from waiting import HANG_S, wait_until

JOB = rm.TrainingJob(
    run="r", artifact="a", buffers="b", reference="c", spec=SPEC, inner_state="reset", schedule=Schedule()
)
MIXTURE = MixtureJob(run="r", artifact="a", reference="c", plan="{}", functions={})


class OtherJob(m.RoleJob, frozen=True, kw_only=True):
    """Of a kind of run that is not known here."""


def test_every_kind_of_run_says_what_makes_the_role_of_its_jobs() -> None:
    roles = worker_roles()
    training, mixture = loader_of(roles, JOB), loader_of(roles, MIXTURE)
    assert isinstance(training, TrainingLoader)
    assert isinstance(mixture, MixtureLoader)
    assert (training.blobs(JOB), mixture.blobs(MIXTURE)) == (("a", "b", "c"), ("a", "c"))
    known = "jobs of the kind OtherJob, and this worker knows MixtureJob, PolicyJob, ServingJob, TrainingJob: use"
    with pytest.raises(UserError, match=known):
        loader_of(roles, OtherJob(run="r", artifact="a", plan=""))


def test_a_lengthened_run_loads_nothing_and_another_plan_does() -> None:
    longer = rm.TrainingJob(**{**_fields(JOB), "schedule": Schedule(total_steps=99)})
    assert longer.loads == JOB.loads
    assert MixtureJob(**{**_fields(MIXTURE), "plan": "{1}"}).loads != MIXTURE.loads


def _fields(message: m.Message) -> dict:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_candidate_of_a_backends_choice_has_no_role(tmp_path: Path) -> None:
    """It says which step the job is about before it fetches anything; where there is none, it ends."""
    roles = candidate_roles(tmp_path)
    assert loader_of(roles, JOB).blobs(JOB) == ("a", "b", "c")
    assert SPEC.stablehlo_digest in (tmp_path / "job").read_text()
    for job in (MIXTURE, rm.TrainingJob(**{**_fields(JOB), "reference": ""})):
        with pytest.raises(NothingToDo, match=r"no step in a .*Job that could be timed"):
            loader_of(roles, job).blobs(job)
        assert (tmp_path / "job").read_text() == '{"step":""}'


def test_a_run_of_rounds_has_trainers_only() -> None:
    bench = Bench()
    bench.connect("e", roles=("expert",))
    (refused,) = [message for _, message in bench.sent if isinstance(message, m.Refused)]
    assert "worker e/0 was started with --role expert, and the roles of this run are trainer" in refused.reason
    bench.connect("t", roles=("expert", "trainer"))
    assert [session.worker for session in bench.controller.desk.workers.values()] == ["t/0"]


@pytest.mark.processes
@pytest.mark.compiles
def test_node_with_a_foreign_role_ends_and_a_known_one_trains(tmp_path: Path, shared_cache: Path) -> None:
    """A node with a role that the run does not have ends and one that has it trains."""
    config = write_config(tmp_path)
    with gateway(config, tmp_path, shared_cache, plain=True) as (process, announced):
        wait_until(lambda: events(tmp_path / "run"), "the run began", process=process)
        flags = node_flags(announced, tmp_path, shared_cache)
        odd = run("node-manager", *flags, "--role=expert", "--role=composer", "--node-name=odd", cwd=tmp_path)
        assert odd.code == 2, odd.err
        assert "started with --role expert --role composer, and the roles of this run are trainer" in odd.err
        with started("node-manager", *flags, "--role=trainer", cwd=tmp_path):
            assert process.wait(HANG_S) == 0, (tmp_path / "gateway.log").read_text()
    assert events(tmp_path / "run")[-1]["ok"]
