"""The gateway of a hub and the topology: a run in rounds in a star, whose workers are the gateways of sites."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import msgspec

from planetary.artifacts.store import write_atomically
from planetary.core.errors import ConflictError, TrustError
from planetary.core.tensors import TensorSpec
from planetary.fleet.gateway.roll_out import StepWanted
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.protocol import events as e
from planetary.fleet.protocol import messages as m
from planetary.fleet.protocol.sessions import WorkerSession
from planetary.fleet.protocol.status import RunStatus, WorkerStatus
from planetary.fleet.shell.shell import TensorSource
from planetary.fleet.shell.system import System
from planetary.machine.events import Payload
from planetary.runs.federation.hub_policy import SITE, HubPolicy, hub_policy
from planetary.runs.federation.messages import FEDERATION, masters_of
from planetary.runs.federation.status import HUB_READER, FederatedSite, FederationStanding
from planetary.runs.rounds import messages as rm
from planetary.runs.rounds.controller.controller import Controller
from planetary.runs.rounds.controller.desk import RoundsDesk
from planetary.runs.rounds.controller.star import Star
from planetary.runs.rounds.controller.topology import Topology
from planetary.runs.rounds.events import ParametersOf
from planetary.runs.rounds.gateway.gateway import RoundsGateway
from planetary.runs.rounds.gateway.start import RoundsStart
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.state import OpenRound
from planetary.sync.contributions import capped
from planetary.sync.outer import published_params

HUB = "hub"  # folder in the run folder


class HubController(Controller):
    """A controller whose workers are sites."""

    def _topology_of(self, policy: ControllerPolicy) -> Topology:
        assert isinstance(policy, HubPolicy)
        return Sites(self.desk, policy)

    def _beyond_task(self, worker: WorkerSession, message: m.Message) -> str:
        """No result of a site begins before the end of those that count; tokens of lost versions are given up."""
        train = worker.train
        if isinstance(message, rm.TrainResult) and train is not None and train.task == message.task:
            counted = self.state.counted.get(worker.worker, 0)
            if message.through - message.tokens < counted:
                begins = message.through - message.tokens
                return f"a result of {message.tokens} tokens behind {begins}, and {counted} count already"
        return super()._beyond_task(worker, message)

    def _go_on(self, now: float) -> None:
        if self.evaluation.versions and not self.topology.is_evaluated:
            self.evaluation.give_up()  # the worker that would have done it is gone
        super()._go_on(now)


class HubGateway(RoundsGateway):
    """The gateway of a hub."""

    protocol = FEDERATION
    reader = HUB_READER
    compiles = "the terms of the federation"

    def _begin(self, prepared: Prepared) -> RoundsStart:
        start = super()._begin(prepared)
        hub = f"{self.config.run.name}-{_identity(self.options.folder, self._system)}"
        start.policy = hub_policy(start.policy, self.config, prepared, hub)
        masters, mark = masters_of(prepared.step.spec.params), start.state.round
        start.parameters = ParameterVersions(masters, start.parameters.state, mark, optimizer=start.policy.outer)
        return start

    @cached_property
    def _accepted(self) -> Mapping[str, TensorSpec]:
        assert self.prepared is not None
        return {spec.name: spec for spec in masters_of(self.prepared.step.spec.params)}

    def _control(self, prepared: Prepared, start: RoundsStart) -> Controller:
        return HubController(start.policy, start.state, self._clock.monotonic(), start.unreported)

    def _is_on_loan(self, hello: m.Hello) -> bool:
        """A site's run ends with the hub's, whatever other runs the hub has."""
        return super()._is_on_loan(hello) and hello.backend != SITE

    def roll_out(self, wanted: StepWanted) -> None:
        raise ConflictError(
            "a hub has no training step: roll it out at its sites, whose parameters stay those of the hub",
            code="step_fixed",
        )

    def status(self) -> RunStatus:
        """A site of the configuration that has not come is listed, too."""
        status, start = super().status(), self._start
        if start is None:
            return status
        assert isinstance(start.policy, HubPolicy)
        absent = start.policy.sites.keys() - {worker.name for worker in status.workers}
        awaited = [WorkerStatus(name=name, node=name, pid=0, state="starting") for name in absent]
        workers = sorted([*status.workers, *awaited], key=lambda worker: worker.name)
        return msgspec.structs.replace(status, workers=tuple(workers))

    def federation(self) -> FederationStanding:
        """Return the federation as it is now. Called on the event loop."""
        controller, start = self.controller, self._start
        if controller is None or start is None:
            return FederationStanding(
                role="hub", hub="", version=None, tokens_total=0, uncounted=0, waits=self.stage, sites=()
            )
        policy, state = start.policy, controller.state
        assert isinstance(policy, HubPolicy)
        here = {site.worker: site for site in controller.desk.workers.values()}
        sites = [
            FederatedSite(
                terms=terms.entry,
                part=terms.part,
                parts=terms.parts,
                connected=name in here,
                joined=name in here and here[name].ready,
                tokens=state.counted.get(name, 0),
                task_rounds=train.step if name in here and (train := here[name].train) is not None else None,
                lost=state.losses.get(name, 0),
                banned=controller.membership.banned.get(name, ""),
            )
            for name, terms in policy.sites.items()
        ]
        return FederationStanding(
            role="hub",
            hub=policy.hub,
            version=state.version,
            tokens_total=state.tokens_total,
            uncounted=0,
            waits=controller.stalls.why,
            sites=tuple(sites),
        )

    async def _compile_for(self, target: CompileTarget) -> PublishedArtifact:
        """Sites compile for their own workers, so nothing is made for them; for a worker of the hub it is."""
        assert self._start is not None
        policy = self._start.policy
        assert isinstance(policy, HubPolicy)
        if target.backend != SITE:
            return await super()._compile_for(target)
        return PublishedArtifact(policy.site_artifact, 0, "sites compare models and compile for themselves")

    def _source(self, payload: e.Payload | None) -> TensorSource | None:
        if isinstance(payload, PublishedOf):
            assert self.prepared is not None
            specs, masters = self.prepared.step.spec.params, self.parameters.of_version(payload.version)
            return lambda: published_params(specs, masters)
        return super()._source(payload)


def _identity(folder: Path, system: System) -> str:
    """Return the unique identity of this run of a hub; made once."""
    path = folder / HUB
    try:
        return msgspec.json.decode(path.read_bytes(), type=str)
    except FileNotFoundError:
        identity = system.entropy(6).hex()
        write_atomically(path, msgspec.json.encode(identity), system.files)
        return identity
    except msgspec.MsgspecError as error:
        raise TrustError(f"{path} is damaged: {error}; its sites would take this hub for another one") from error


class PublishedOf(Payload, frozen=True):
    """The parameters of one version in the model's own element types, as workers take them."""

    version: int


class Sites(Star):
    """A version is sent when it outlasts the hub, together with how many of the site's tokens are in it.

    A site puts the remaining tokens on top: it has to know which version lacks them, and the hub must never go back
    behind that version by itself.
    """

    def __init__(self, desk: RoundsDesk, policy: HubPolicy) -> None:
        super().__init__(desk)
        self._hub = policy

    def able_workers(self) -> list[WorkerSession]:
        """A site contributes once to a round, since only the next version shows the counted tokens."""
        opened = self._desk.state.open
        done = set() if opened is None else {c.worker for c in opened.contributions}
        return [
            site
            for site in super().able_workers()
            if site.backend == SITE and site.worker not in done and self._hub.sites[site.worker].entry.role == "trainer"
        ]

    def announce(self, round_: int) -> None:
        """Nothing leaves before the checkpoint is written."""

    def finished(self, round_: int) -> None:
        for site in self._desk.ready_workers():
            if site.backend == SITE:
                self.send_parameters(site, round_)

    def evaluators(self) -> list[WorkerSession]:
        """Sites evaluate for themselves."""
        return [worker for worker in super().evaluators() if worker.backend != SITE]

    def reports_steps(self, worker: WorkerSession) -> bool:
        """A site reports rounds, and keeps no queue of versions."""
        return worker.backend != SITE

    @property
    def is_evaluated(self) -> bool:
        return any(worker.backend != SITE for worker in self._desk.workers.values())

    def send_parameters(self, worker: WorkerSession, version: int) -> None:
        if worker.version == version:
            return
        worker.version = version
        if worker.backend != SITE:
            self._desk.send(worker.session, rm.Parameters(version=version), PublishedOf(version))
        else:
            counted = self._desk.state.counted.get(worker.worker, 0)
            self._desk.send(worker.session, rm.Parameters(version=version, counted=counted), ParametersOf(version))

    def _weights(self, ended: OpenRound) -> dict[int, int]:
        """No site weighs more than the configured share."""
        sites = {c.worker: c for c in ended.contributions}
        shares = {name: self._hub.sites[name].entry.most_share for name in sites}
        weights = capped({name: c.tokens for name, c in sites.items()}, shares)
        return {sites[name].task: weight for name, weight in weights.items()}
