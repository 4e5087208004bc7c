"""A kind of run in one file: workers are asked for their names, and the run is done when enough have answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from planetary.core.configuration.honoured import HonouredKeys
from planetary.core.configuration.schema import Config
from planetary.fleet.controller.controller import RunController
from planetary.fleet.controller.desk import Desk
from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
from planetary.fleet.gateway.parts import Parts, Setup
from planetary.fleet.gateway.run_files import write_config
from planetary.fleet.gateway.status import base_status
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.kind_reader import FORMAT, KindReader
from planetary.fleet.protocol.policy import FabricPolicy
from planetary.fleet.protocol.records import AnyRecord, EndKind, RunStarted
from planetary.fleet.protocol.run_fold import RunFold
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.fleet.protocol.status import RunStatus
from planetary.fleet.worker.role import Roles
from planetary.machine.journal import Record
from planetary.run.kinds import RunKind
from planetary.wire.limits import MIB, Limits


class RollCall(m.RoleJob, frozen=True, kw_only=True):
    """A worker is asked for its name."""


class Present(m.RoleMessage, frozen=True, kw_only=True):
    """A worker's answer."""

    name: str


PROTOCOL = m.FABRIC.extended(RollCall, Present)


class Answered(Record, frozen=True, kw_only=True, tag="answered"):
    """A worker has said its name."""

    name: str


class ToyState(RunFold):
    """Everything that the journal determines."""

    names: list[str] = msgspec.field(default_factory=list)

    def _apply_own(self, record: Record) -> None:
        if isinstance(record, Answered):
            self.names.append(record.name)


READER = KindReader(name="toy", records=AnyRecord | Answered, fold=ToyState, status=RunStatus)


class ToyPolicy(FabricPolicy, frozen=True, kw_only=True):
    """The constants."""

    answers: int

    def job(self, artifact: str, reference: str) -> m.Message:
        return RollCall(run=self.run, artifact=artifact, plan="")


class ToyController(RunController[Desk[ToyPolicy, ToyState, WorkerSession], WorkerSession]):
    """Ends the run when enough workers have answered."""

    def _take_message(self, worker: WorkerSession, event: e.Received, now: float) -> None:
        if isinstance(event.message, Present):
            self.membership.ready(worker, now)
            self.desk.append(Answered(name=event.message.name))

    def _take_failure(self, worker: WorkerSession, failure: m.TaskFailed, now: float) -> None:
        self._strike(worker, failure.reason, self._record_failure(worker, failure, 0), now)

    def _go_on(self, now: float) -> None:
        """Answers alone carry the run on."""

    def _why_nothing_goes_on(self) -> str:
        return "" if self.desk.workers else self.membership.whom_we_wait_for()

    def _is_done(self) -> tuple[EndKind, str] | None:
        return ("done", "all have answered") if len(self.desk.state.names) >= self.desk.policy.answers else None

    def _deadlines(self) -> Iterable[float | None]:
        return ()


class ToySetup(Setup[Any, None]):
    """Prepares and compiles nothing."""

    protocol = PROTOCOL

    def prepare(self, gateway: Gateway[None]) -> Any:
        return SimpleNamespace(config=gateway.config, param_count=0, data=None)

    def begin(self, gateway: Gateway[None], prepared: Any) -> Parts[None]:
        write_config(gateway.options.folder, gateway.config, gateway.system.files)
        timings = gateway.config.timings
        policy = ToyPolicy(
            run="toy",
            startup_grace_s=timings.startup_grace_s,
            abandon_after_s=60.0,
            heartbeat_s=timings.heartbeat_s,
            silent_after_s=timings.silent_after_s,
            iree_version="",
            answers=gateway.config.fabric.workers,
        )
        return Parts(
            run=None,
            controller=ToyController(Desk(policy, ToyState()), timings.grace_s, gateway.clock.monotonic()),
            records=[RunStarted(kind="toy", format=FORMAT, run="toy", config_hash="", model="", params=0)],
            status=lambda: base_status(gateway),
            compile_for=nothing_compiled,
            limits=lambda: Limits(tensor_bytes=MIB, tensors=1, messages_under_way=1),
            expects=lambda message, spec: False,
        )


async def nothing_compiled(target: CompileTarget) -> PublishedArtifact:
    """Return an artifact of no bytes."""
    return PublishedArtifact("f" * 64, 0, "nothing to verify")


class Toy(RunKind):
    """A kind of run that counts."""

    name = "toy"

    def claims(self, config: Config) -> bool:
        return config.run.name.startswith("toy")

    def declared(self) -> Sequence[HonouredKeys]:
        named = ("model.source", "model.weights", "data.source", "data.tokenizer", "sinks")  # of files and addresses
        return (HonouredKeys("toy", ("run.*", "fabric.workers", "moe.*", *named), {}),)

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any]:
        return Gateway(config, options, security, ToySetup())

    def has_code(self, config: Config) -> bool:
        return False

    def worker_roles(self) -> Roles:
        return {}
