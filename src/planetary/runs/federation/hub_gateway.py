"""A hub at its gateway: a run in rounds in a star, whose workers are the gateways of sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.store import write_atomically
from planetary.core.errors import ConflictError, TrustError
from planetary.core.tensors import TensorSpec
from planetary.fleet.gateway.gateway import Gateway
from planetary.fleet.gateway.parts import Parts, Setup
from planetary.fleet.gateway.roll_out import StepWanted
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.protocol import messages as m
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
from planetary.runs.rounds.gateway.gateway import RoundsRun, RoundsSetup
from planetary.runs.rounds.gateway.status import status_of
from planetary.runs.rounds.gateway.topology import StarGateway
from planetary.runs.rounds.policy import ControllerPolicy
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.sessions import Trainer
from planetary.runs.rounds.state import OpenRound
from planetary.sync.contributions import capped
from planetary.sync.outer import published_params

HUB = "hub"  # folder in the run folder


class HubController(Controller):
    """A controller whose workers are sites."""

    def _topology_of(self, policy: ControllerPolicy) -> Topology:
        assert isinstance(policy, HubPolicy)
        return Sites(self.desk, policy)

    def _beyond_task(self, worker: Trainer, message: m.Message) -> str:
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


class HubStar(StarGateway):
    """Sites send the masters of their parameters."""

    def accepted(self, params: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return masters_of(params)


class HubSetup(Setup[Prepared, "HubRun"]):
    """How a hub begins: as a run in rounds, with terms for its sites."""

    protocol = FEDERATION
    traffic_of, synced = RoundsSetup.traffic_of, RoundsSetup.synced
    compiles = "the terms of the federation"

    def __init__(self, rounds: RoundsSetup) -> None:
        self._rounds = rounds

    def prepare(self, gateway: Gateway[Any]) -> Prepared:
        return self._rounds.prepare(gateway)

    async def fit(self, gateway: Gateway[Any], prepared: Prepared) -> Prepared | None:
        return await self._rounds.fit(gateway, prepared)

    def begin(self, gateway: Gateway[Any], prepared: Prepared) -> Parts[HubRun]:
        run = self._rounds.run(gateway, prepared, HUB_READER, HubStar())
        start = run.start
        name = f"{gateway.config.run.name}-{_identity(gateway.options.folder, gateway.system)}"
        policy = start.policy = hub_policy(start.policy, gateway.config, prepared, name)
        masters, mark = masters_of(prepared.step.spec.params), start.state.round
        start.parameters = ParameterVersions(masters, start.parameters.state, mark, optimizer=policy.outer)
        controller = HubController(policy, start.state, gateway.clock.monotonic(), start.unreported)
        rounds: Parts[Any] = run.parts(controller)
        hub = HubRun(run, policy)
        return replace(
            rounds,
            run=hub,
            status=hub.status,
            compile_for=hub.compile_for,
            sources={**rounds.sources, PublishedOf: hub.published},
            roll_out=_refuse_step,
            # A site's run ends with the hub's, whatever other runs the hub has.
            may_be_on_loan=lambda hello: hello.backend != SITE,
        )


def _refuse_step(wanted: StepWanted) -> None:
    raise ConflictError(
        "a hub has no training step: roll it out at its sites, whose parameters stay those of the hub",
        code="step_fixed",
    )


class HubRun:
    """A hub that has begun; `rounds` is the run it has as every run in rounds."""

    def __init__(self, rounds: RoundsRun, policy: HubPolicy) -> None:
        self.rounds, self._policy = rounds, policy

    @property
    def parameters(self) -> ParameterVersions:
        """The federation's parameters."""
        return self.rounds.parameters

    def status(self) -> RunStatus:
        """A site of the configuration that has not come is listed, too."""
        status = status_of(self.rounds)
        absent = self._policy.sites.keys() - {worker.name for worker in status.workers}
        awaited = [WorkerStatus(name=name, node=name, pid=0, state="starting") for name in absent]
        workers = sorted([*status.workers, *awaited], key=lambda worker: worker.name)
        return msgspec.structs.replace(status, workers=tuple(workers))

    def federation(self) -> FederationStanding:
        """Return the federation as it is now. Called on the event loop."""
        policy, controller = self._policy, self.rounds.controller
        state, here = controller.state, {site.worker: site for site in controller.desk.workers.values()}
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

    async def compile_for(self, target: CompileTarget) -> PublishedArtifact:
        """Compile for a worker of the hub; sites compile for their own workers."""
        if target.backend != SITE:
            return await self.rounds.compile_for(target)
        artifact = self._policy.site_artifact
        return PublishedArtifact(artifact, 0, "sites compare models and compile for themselves")

    def published(self, payload: PublishedOf) -> TensorSource:
        """Return the source of a version's published parameters."""
        specs, masters = self.rounds.prepared.step.spec.params, self.parameters.of_version(payload.version)
        return lambda: published_params(specs, masters)


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

    def able_workers(self) -> list[Trainer]:
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

    def evaluators(self) -> list[Trainer]:
        """Sites evaluate for themselves."""
        return [worker for worker in super().evaluators() if worker.backend != SITE]

    def reports_steps(self, worker: Trainer) -> bool:
        """A site reports rounds, and keeps no queue of versions."""
        return worker.backend != SITE

    @property
    def is_evaluated(self) -> bool:
        return any(worker.backend != SITE for worker in self._desk.workers.values())

    def send_parameters(self, worker: Trainer, version: int) -> None:
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
