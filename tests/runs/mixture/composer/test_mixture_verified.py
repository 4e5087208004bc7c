"""A mixture's program is checked on the device that runs it, before its worker is ready."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mixture_checks import of_kind
from mixture_stage import MixtureStage, SharedProgram, make_plan

from planetary.artifacts.store import BlobStore
from planetary.core.errors import CompileError, ResourceError, TrustError
from planetary.core.step import ProgramSpec
from planetary.core.tensors import Tensors
from planetary.core.trials.program import encode_program_reference, make_reference
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.records import WorkerJoined, WorkerRefused
from planetary.fleet.shell.shell import Address
from planetary.fleet.shell.system import SYSTEM
from planetary.fleet.worker.role import Role, WorkerOptions, Workplace
from planetary.runs.mixture import messages as mm
from planetary.runs.mixture.loader import MixtureLoader
from planetary.runs.mixture.methods.acceptance import Policy
from planetary.runs.mixture.plan import MixturePlan
from planetary.runtime.device_program import WrappedProgram


class Device(WrappedProgram):
    """The shared program on a device that counts what it runs, and may be wrong in one function."""

    def __init__(self, plan: MixturePlan, wrong: str = "") -> None:
        super().__init__(SharedProgram(plan))
        self.calls: list[str] = []
        self.lie_in(wrong)

    def lie_in(self, function: str) -> None:
        """Be wrong in a function from now on; "": in none."""
        self.wrong = function
        self.device_name = f"a {'lying' if function else 'good'} device"

    def invoke(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        self.calls.append(function)
        results = super().invoke(function, arguments)
        if function == self.wrong:
            results[0] = -results[0]
        return results


@functools.cache
def reference_of(plan: str) -> bytes:
    """Return the results of a mixture's functions, encoded; the tests of a plan share them."""
    made = msgspec.json.decode(plan, type=MixturePlan)
    device = Device(made)
    spec = ProgramSpec("latent_moe", dict(device.program.functions), made.model.vocab_size, "c" * 64)
    return encode_program_reference(make_reference(spec, device, factor_rounding=2.0**-23, against="XLA"))


class Machine:
    """A worker's machine: its store, its job, and the device that its role opens."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.plan = make_plan(folder, steps=8, **options)
        self.store = BlobStore(folder / "blobs")
        self.device = Device(self.plan)
        plan = msgspec.json.encode(self.plan).decode()
        self.job = mm.MixtureJob(
            run="r",
            artifact=self.store.put(b"the artifact"),
            reference=self.store.put(reference_of(plan)),
            functions=dict(self.device.program.functions),
            plan=plan,
        )
        self.sent: list[m.Message] = []

    def ready(self, *allowed: str) -> mm.MixtureReady:
        """Make the role and connect it; return what it says."""
        role = self.role(*allowed)
        for instruction in role.machine.connected(1, self.job):
            role.carry_out(instruction)
        role.close()
        (ready,) = self.sent
        assert isinstance(ready, mm.MixtureReady)
        return ready

    def role(self, *allowed: str) -> Role:
        """Make the role, as the worker does when all blobs are here."""

        def send(message: m.Message, tensors: Tensors | None) -> None:
            self.sent.append(message)

        options = WorkerOptions(
            address=Address("::1", 1, ""),
            name="n/0",
            node="n",
            backend="cpu",
            target="host",
            device_id=0,
            island=1,
            threads=1,
            cache=self.store.root,
            state=self.store.root,
            give_up_s=0,
            roles=allowed,
        )
        place = Workplace(
            options=options,
            store=self.store,
            post=lambda _: None,
            send=send,
            is_ending=lambda: False,
            system=SYSTEM,
        )
        return MixtureLoader(lambda *_, **__: self.device).load(self.job, place)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
def test_a_role_reports_the_device_of_its_verified_program(machine: Machine) -> None:
    ready = machine.ready()
    assert (ready.artifact, ready.device) == (machine.job.artifact, "a good device")
    assert ready.verified.startswith("verified on a good device: the worst tensor, ")
    assert ready.roles == ("composer",)
    assert set(machine.device.calls) == set(machine.job.functions)
    assert ready.composer_s > 0


@pytest.fixture
def offloading(tmp_path: Path) -> Machine:
    return Machine(tmp_path, sketches="all", acceptance=Policy(norm_ratio=10))


@pytest.mark.slow
def test_a_device_that_is_wrong_in_one_role_has_the_others(offloading: Machine) -> None:
    offloading.device.lie_in("composer_gradients")
    ready = offloading.ready()
    assert ready.roles == ("expert",)
    found, _, lacking = ready.verified.partition("; not as composer: ")
    assert found.startswith("verified on a lying device")
    assert lacking.startswith("the program is wrong on a lying device: ")
    assert "of composer_gradients' is" in lacking


@pytest.mark.slow
def test_device_short_of_memory_can_be_an_expert_worker(offloading: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without the memory for a composer can be an expert worker."""
    invoke = offloading.device.invoke

    def small(function: str, arguments: Sequence[Any]) -> list[Any]:
        if function == "composer_update":
            raise ResourceError("out of memory")
        return invoke(function, arguments)

    monkeypatch.setattr(offloading.device, "invoke", small)
    ready = offloading.ready()
    assert ready.roles == ("expert",)
    assert ready.verified.endswith("; not as composer: out of memory")


@pytest.mark.slow
@pytest.mark.parametrize("role", ["composer", "expert"])
def test_a_worker_runs_the_functions_of_its_roles_only(offloading: Machine, role: str) -> None:
    offloading.device.lie_in({"composer": "expert_update", "expert": "composer_update"}[role])
    assert offloading.ready(role).roles == (role,)
    assert {call.partition("_")[0] for call in offloading.device.calls} == {role, "whole"}


@pytest.mark.slow
def test_second_start_on_a_device_skips_the_check(machine: Machine) -> None:
    machine.role().close()
    machine.device.calls.clear()
    machine.role().close()
    assert not machine.device.calls


@pytest.mark.slow
@pytest.mark.parametrize("function", ["composer_gradients", "composer_update", "expert_update", "whole_evaluate"])
def test_a_device_that_computes_something_else_gets_no_role(machine: Machine, function: str) -> None:
    machine.device.lie_in(function)
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(CompileError, match=f"the program is wrong on a lying device: '.* of {function}' is .* XLA"):
            machine.role()
    assert not machine.sent


@pytest.mark.slow
def test_a_reference_of_another_program_is_refused(machine: Machine) -> None:
    machine.job = msgspec.structs.replace(machine.job, reference=machine.store.put(b"of something else"))
    with pytest.raises(TrustError, match="reference results of the program cannot be read"):
        machine.role()


def test_a_liar_is_refused_and_the_others_train_to_the_end(tmp_path: Path, machine: Machine) -> None:
    machine.device.lie_in("composer_gradients")
    with pytest.raises(CompileError) as error:
        machine.role()
    cluster = MixtureStage(tmp_path, machine.plan)
    cluster.start("liar", wrong=str(error.value))
    cluster.start("a")
    cluster.until(lambda: bool(of_kind(cluster, WorkerRefused)))
    cluster.start("b")
    assert cluster.finish().ok
    (refused,) = of_kind(cluster, WorkerRefused)
    assert refused.worker == "liar"
    assert "the program is wrong on a lying device" in refused.reason
    assert {joined.worker for joined in of_kind(cluster, WorkerJoined)} == {"a", "b"}
    assert [*cluster.controller.membership.banned] == ["liar"]
