"""The kinds of run: which one a configuration asks for, and the behaviour that depends on it outside of its gateway.

A new kind is one file with a class like those below and one line in `KINDS`. Nothing else asks for the kind of a
configuration; an operation that only some kinds support is a method of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from planetary.core.errors import PlanetaryError, UserError

if TYPE_CHECKING:  # supervisors and node managers, which import this, have no configuration
    from planetary.core.config import Config
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fleet.protocol.events import Finish
    from planetary.fleet.worker.role import Roles
    from planetary.run.simulations import Simulation
    from planetary.wire.protocol import Protocol


class RunKind(ABC):
    """A kind of run: its gateway, its roles, its end.

    Attributes:
        name: of the kind, in messages.
        roles: of its workers, by the names that `--role` takes; empty: there is one role only.
        controller: of a gateway with several, the one that runs it: "training", "inference" or "rl"; "": none does.
        command: that has such a run on this machine.
        sections: of the configuration, that the kind alone has -> why a run of another kind has no effect of them.
        loads_code: whether the gateway's process loads the model's code, although its preparation is in the cache.
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]] = ()
    controller: ClassVar[str] = "training"
    loads_code: ClassVar[bool] = False
    command: ClassVar[str] = "train"
    sections: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def claims(self, config: Config) -> bool:
        """Whether a configuration asks for this kind."""

    @abstractmethod
    def keys(self, config: Config) -> HonouredKeys:
        """Return the keys a run of this configuration honours. Every other key with a value is refused."""

    @abstractmethod
    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        """Make the gateway; it is not started."""

    def prepare(self, config: Config, options: GatewayOptions, stage: Callable[[str], None]) -> None:
        """Fill the cache with what a gateway prepares; `stage` is called with each activity. Blocks for minutes.

        Raises whatever is wrong with the user's data or model.
        """
        from planetary.fleet.gateway.gateway import Security

        self.gateway(config, options, Security()).prepare(stage)

    def has_code(self, config: Config) -> bool:
        """Whether a preparation runs code or reads graphs of a user, which a site has a separate process do first."""
        return True

    def protocol(self) -> Protocol:
        """Return its protocol; without JAX or a compiler."""
        from planetary.fleet.protocol.messages import FABRIC

        return FABRIC

    @abstractmethod
    def worker_roles(self) -> Roles:
        """Return the loader of a worker's role for the kind's jobs; without JAX or a compiler."""

    def check(self, config: Config) -> list[str]:
        """Return warnings of a configuration, before a folder or a port is taken.

        Raises:
            UserError: it cannot be run.
        """
        absent = {section: why for kind in KINDS for section, why in kind.sections.items()}
        self.keys(config).refuse_others(config, absent)
        return []

    def progress(self, folder: Path) -> int:
        """Return a number that grows as the run in `folder` gets further: here, with its finished rounds."""
        from planetary.fleet.gateway.run_files import METRICS

        return _line_count(folder / METRICS)

    async def results_after(self, running: Awaitable[Finish], folder: Path, again: str = "") -> Finish:
        """Write a run's report and picture, and return how it ended; raises a failed run's error.

        `again`: command that resumes the run; "": `planetary train`.
        """
        from planetary.run.results import results_after

        return await results_after(running, folder, again)

    def failure(self, end: Finish, folder: Path, again: str = "") -> PlanetaryError:
        """Return the error of a run in `folder` that did not finish; its class decides the exit code."""
        from planetary.run.results import failure_of

        return failure_of(end.kind, end.reason, folder, again)

    def check_baseline(self, config: Config) -> None:
        """Raise `UserError` unless the tokens of a run can be trained on one worker for comparison."""
        raise UserError(
            f'train: --baseline trains the tokens of a run in rounds on one worker; found the kind "{self.name}"'
        )

    def simulation(self, config: Config, cache: Path) -> Simulation:
        """Prepare a run for `planetary.simulate`; `cache`: of prepared data and functions.

        Raises:
            UserError: this kind is not simulated, or the configuration is wrong.
        """
        raise UserError(
            f'simulate: expected a configuration of a run in rounds or of a mixture, found the kind "{self.name}"'
        )

    def check_surrogates(self, folder: Path) -> None:
        """Raise `UserError` unless composers save their shards and surrogates in the run's folder."""
        raise UserError(
            f"the run in {folder} has no composers and no surrogates: it trains the whole model (moe.composers = 0). "
            "Surrogates of an exported model are beside its weights: name these with --checkpoint"
        )


class Mixture(RunKind):
    """A sparse mixture of experts, divided among composers (PARALLAX)."""

    name = "mixture"
    roles = ("composer", "expert")
    sections: ClassVar[Mapping[str, str]] = {"moe": "moe.composers = 0, so that every worker trains the whole model"}

    def claims(self, config: Config) -> bool:
        return config.moe.composers > 0

    def keys(self, config: Config) -> HonouredKeys:
        from planetary.runs.mixture.config import HONOURED

        return HONOURED

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        from planetary.runs.mixture.gateway.gateway import MixtureGateway

        if options.resume_from is not None:
            raise UserError("a mixture goes on from its payloads, not from a checkpoint")
        return MixtureGateway(config, options, security)

    def protocol(self) -> Protocol:
        from planetary.runs.mixture.messages import MIXTURES

        return MIXTURES

    def worker_roles(self) -> Roles:
        from planetary.runs.mixture.composer.loader import MixtureLoader
        from planetary.runs.mixture.messages import MixtureJob

        return {MixtureJob: MixtureLoader()}

    def check(self, config: Config) -> list[str]:
        from planetary.runs.mixture.config import check_mixture

        super().check(config)
        return check_mixture(config)

    def check_baseline(self, config: Config) -> None:
        raise UserError(
            "train: --baseline trains the tokens of a run in rounds on one worker; for a mixture, train another run "
            "of the whole model: --set moe={} --set fabric.workers=1 --set "
            f"train.batch_size={config.moe.composers * config.train.batch_size}"
        )

    def simulation(self, config: Config, cache: Path) -> Simulation:
        from planetary.run.simulations import SimulatedMixture

        return SimulatedMixture(config, cache)

    def check_surrogates(self, folder: Path) -> None: ...


class Serving(RunKind):
    """A trained model behind an HTTP endpoint."""

    name = "serving"
    roles = ("server",)
    controller = "inference"
    command = "serve"
    sections: ClassVar[Mapping[str, str]] = {"serve": "serve.model is empty, so that nothing is served"}
    loads_code = True

    def claims(self, config: Config) -> bool:
        return bool(config.serve.model)

    def keys(self, config: Config) -> HonouredKeys:
        from planetary.runs.serve.config import honoured

        return honoured(config)

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        from planetary.run.model.served import load_served
        from planetary.runs.serve.gateway import ServingGateway

        return ServingGateway(config, options, security, load_served)

    def has_code(self, config: Config) -> bool:
        return _has_code(Path(config.serve.model))

    def progress(self, folder: Path) -> int:
        """There are no rounds, and the journal grows once the model is prepared."""
        from planetary.fleet.gateway.run_files import EVENTS

        return _line_count(folder / EVENTS)

    async def results_after(self, running: Awaitable[Finish], folder: Path, again: str = "") -> Finish:
        """Nothing is left."""
        return await running

    def failure(self, end: Finish, folder: Path, again: str = "") -> PlanetaryError:
        """Nothing goes on."""
        from planetary.fleet.protocol.records import error_class

        return error_class(end.kind)(end.reason)

    def protocol(self) -> Protocol:
        from planetary.runs.serve.messages import SERVING

        return SERVING

    def worker_roles(self) -> Roles:
        from planetary.runs.serve.loader import ServingLoader
        from planetary.runs.serve.messages import ServingJob

        return {ServingJob: ServingLoader()}


class Reinforcement(RunKind):
    """A policy that learns from the rewards of its own texts."""

    name = "reinforcement"
    roles = ("actor", "learner")
    controller = "rl"
    command = "rl"
    sections: ClassVar[Mapping[str, str]] = {"rl": "rl.task is empty, so that nothing is learned from rewards"}
    loads_code = True

    def claims(self, config: Config) -> bool:
        return bool(config.rl.task)

    def keys(self, config: Config) -> HonouredKeys:
        from planetary.runs.rl.config import honoured

        return honoured(config)

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        from planetary.run.model.served import load_folder, new_model
        from planetary.runs.rl.gateway import PolicyGateway
        from planetary.runs.rl.preparation import prepare_policy

        prepare = partial(prepare_policy, load=new_model, load_folder=load_folder)
        return PolicyGateway(config, options, security, prepare=prepare)

    def protocol(self) -> Protocol:
        from planetary.runs.rl.messages import REINFORCEMENT

        return REINFORCEMENT

    def worker_roles(self) -> Roles:
        from planetary.runs.rl.loader import PolicyLoader
        from planetary.runs.rl.messages import PolicyJob

        return {PolicyJob: PolicyLoader()}

    def check(self, config: Config) -> list[str]:
        from planetary.runs.rl.config import check_keys

        super().check(config)
        check_keys(config)
        return []

    def has_code(self, config: Config) -> bool:
        folders = [Path(one) for one in (config.rl.start, config.rl.teacher) if one]
        return any(map(_has_code, folders)) or not (config.rl.start or _is_ours(config.model.source))


class Rounds(RunKind):
    """Rounds of leases with one outer step each (DiLoCo)."""

    name = "rounds"
    roles = ("trainer",)

    def claims(self, config: Config) -> bool:
        """Every configuration no other kind claims."""
        return True

    def keys(self, config: Config) -> HonouredKeys:
        from planetary.runs.rounds.config import RING, STAR

        return RING if config.sync.topology == "ring" else STAR

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        from planetary.runs.rounds.gateway.gateway import RoundsGateway

        return RoundsGateway(config, options, security)

    def worker_roles(self) -> Roles:
        from planetary.fleet.protocol.messages import TrainingJob
        from planetary.runs.rounds.worker.role import TrainingLoader

        return {TrainingJob: TrainingLoader()}

    def check_baseline(self, config: Config) -> None: ...

    def simulation(self, config: Config, cache: Path) -> Simulation:
        from planetary.run.simulations import SimulatedRounds

        return SimulatedRounds(config, cache)


class Hub(Rounds):
    """Rounds whose workers are the gateways of sites (`docs/federation.md`)."""

    name = "hub"
    roles = ("site",)
    sections: ClassVar[Mapping[str, str]] = {
        "federation": "federation.hub and federation.sites are empty, so that the run belongs to no federation"
    }
    controller = ""

    def claims(self, config: Config) -> bool:
        return bool(config.federation.sites)

    def keys(self, config: Config) -> HonouredKeys:
        from planetary.runs.federation.config import HUB

        return HUB

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        from planetary.runs.federation.hub_gateway import HubGateway

        if options.local_threads is not None:
            raise UserError(
                "train: a hub has no workers of its own, its sites have; start it with planetary federation-hub, and "
                "each site with planetary gateway --hub HOST:PORT"
            )
        return HubGateway(config, options, security)

    def protocol(self) -> Protocol:
        from planetary.runs.federation.messages import FEDERATION

        return FEDERATION

    def worker_roles(self) -> Roles:
        """The gateway of a site plays its role itself."""
        return {}

    def check_baseline(self, config: Config) -> None:
        RunKind.check_baseline(self, config)

    def simulation(self, config: Config, cache: Path) -> Simulation:
        return RunKind.simulation(self, config, cache)


class SiteRounds(Rounds):
    """Rounds of a gateway that belongs to a hub (`docs/federation.md`)."""

    name = "site"
    roles = ()

    def claims(self, config: Config) -> bool:
        return bool(config.federation.hub)

    def keys(self, config: Config) -> HonouredKeys:
        from planetary.runs.federation.config import SITE

        return SITE

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        from planetary.runs.federation.site_gateway import SiteGateway
        from planetary.runs.federation.uplink import UplinkOptions, hub_address, hub_invite_in

        federation, address = config.federation, options.uplink
        name = federation.site or config.run.name
        if address is None:
            token, key = hub_invite_in(federation.token_file), options.cache / "sites" / name / "identity.key"
            address = hub_address(federation.hub, token, key, config.timings.connect_s)
        site = UplinkOptions(address=address, name=name, cache=options.cache / "blobs", run=federation.run)
        return SiteGateway(config, options, security, site=site)

    def prepare(self, config: Config, options: GatewayOptions, stage: Callable[[str], None]) -> None:
        """The hub has no part in it."""
        Rounds().prepare(config, options, stage)

    def simulation(self, config: Config, cache: Path) -> Simulation:
        return RunKind.simulation(self, config, cache)


KINDS: tuple[RunKind, ...] = (Serving(), Mixture(), Reinforcement(), Hub(), SiteRounds(), Rounds())
"""In the order in which they are asked."""


def kind_of(config: Config) -> RunKind:
    """Return the kind of run a configuration asks for."""
    return next(kind for kind in KINDS if kind.claims(config))


def kind_named(name: str) -> RunKind:
    """Return the kind of a name in `KINDS`."""
    return next(kind for kind in KINDS if kind.name == name)


def _line_count(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def _is_ours(source: str) -> bool:
    return source.startswith("planetary.")


def _has_code(model: Path) -> bool:
    """Whether a model loaded from a folder or file is code of a user, or a graph."""
    from planetary.core.config import load_config
    from planetary.fleet.gateway.run_files import CONFIG

    run = next((one for one in (model, model.parent.parent) if (one / CONFIG).is_file()), None)
    return not _is_ours(load_config(run / CONFIG).model.source) if run is not None else model.is_file()


def worker_roles() -> Roles:
    """Return the loaders of a worker's roles, for every job a gateway may assign."""
    return {job: loader for kind in KINDS for job, loader in kind.worker_roles().items()}


def worker_protocol() -> Protocol:
    """Return a worker's protocol: the messages of every kind of run."""
    from planetary.fleet.protocol.messages import FABRIC

    messages = [message for kind in KINDS for message in kind.protocol().messages]
    return FABRIC.extended(*(message for message in dict.fromkeys(messages) if message not in FABRIC.messages))
