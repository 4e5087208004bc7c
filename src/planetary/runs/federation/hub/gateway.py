"""A hub at its gateway: a run in rounds in a star, whose workers are the gateways of sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from planetary.artifacts.store import write_atomically
from planetary.core import decoding
from planetary.core.errors import ConflictError, TrustError
from planetary.core.tensors import TensorSpec
from planetary.fleet.gateway.gateway import Gateway
from planetary.fleet.gateway.parts import Parts, Setup
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.fleet.shell.shell import TensorSource
from planetary.fleet.shell.system import System
from planetary.runs.federation.hub.controller import HubController, PublishedOf
from planetary.runs.federation.hub.policy import HubPolicy, hub_policy
from planetary.runs.federation.messages import FEDERATION, SITE, masters_of
from planetary.runs.federation.status import HUB_READER, FederatedSite, FederationStanding
from planetary.runs.rounds.gateway.gateway import RoundsRun, RoundsSetup
from planetary.runs.rounds.gateway.status import status_of
from planetary.runs.rounds.gateway.topology import StarGateway
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.roll_out import RollOut, StepWanted
from planetary.runs.rounds.training_status import TrainerStatus, TrainingStatus
from planetary.sync.outer import published_params

HUB = "hub"  # folder in the run folder


class HubStar(StarGateway):
    """Sites send the masters of their parameters."""

    def accepted(self, params: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        return masters_of(params)


class HubSetup(Setup[Prepared, "HubRun"]):
    """How a hub begins: as a run in rounds, with terms for its sites."""

    protocol = FEDERATION
    traffic_of, news_of, synced = RoundsSetup.traffic_of, RoundsSetup.news_of, RoundsSetup.synced
    compiles = "the terms of the federation"

    def __init__(self, rounds: RoundsSetup) -> None:
        self._rounds = rounds

    def prepare(self, gateway: Gateway[Any]) -> Prepared:
        return self._rounds.prepare(gateway)

    def status(self, gateway: Gateway[Any]) -> TrainingStatus:
        return self._rounds.status(gateway, HUB_READER.name)

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
            # A site's run ends with the hub's, whatever other runs the hub has.
            may_be_on_loan=lambda hello: hello.backend != SITE,
        )


class HubRun:
    """A hub that has begun; `rounds` is the run it has as every run in rounds."""

    def __init__(self, rounds: RoundsRun, policy: HubPolicy) -> None:
        self.rounds, self._policy, self.stage = rounds, policy, RollOut()

    @property
    def parameters(self) -> ParameterVersions:
        """The federation's parameters."""
        return self.rounds.parameters

    def roll_out(self, wanted: StepWanted) -> None:
        raise ConflictError(
            "a hub has no training step: roll it out at its sites, whose parameters stay those of the hub",
            code="step_fixed",
        )

    def status(self) -> TrainingStatus:
        """A site of the configuration that has not come is listed, too."""
        status = status_of(self.rounds, HUB_READER.name)
        absent = self._policy.sites.keys() - {worker.name for worker in status.workers}
        awaited = [TrainerStatus(name=name, node=name, pid=0, state="starting") for name in absent]
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
        return decoding.from_json(path.read_bytes(), str)
    except FileNotFoundError:
        identity = system.entropy(6).hex()
        write_atomically(path, msgspec.json.encode(identity), system.files)
        return identity
    except msgspec.MsgspecError as error:
        raise TrustError(f"{path} is damaged: {error}; its sites would take this hub for another one") from error
