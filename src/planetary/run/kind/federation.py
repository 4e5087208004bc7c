"""Rounds of a hub and of the sites as kinds of run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from planetary.core.errors import UserError
from planetary.run.kind.rounds import Rounds
from planetary.run.kinds import RunKind

if TYPE_CHECKING:
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.core.configuration.schema import Config
    from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fleet.worker.role import Roles
    from planetary.wire.protocol import Protocol


class Hub(Rounds):
    """Rounds whose workers are the gateways of sites (`docs/federation.md`)."""

    name = "hub"
    roles = ("site",)
    simulated = ""
    sections: ClassVar[Mapping[str, str]] = {
        "federation": "federation.hub and federation.sites are empty, so that the run belongs to no federation"
    }
    controller = ""

    def claims(self, config: Config) -> bool:
        from planetary.runs.federation.config import FederationConfig

        return bool(config.of(FederationConfig).sites)

    def declared(self) -> Sequence[HonouredKeys]:
        from planetary.runs.federation.config import HUB

        return (HUB,)

    def keys(self, config: Config) -> HonouredKeys:
        return RunKind.keys(self, config)

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any]:
        from planetary.fleet.gateway.gateway import Gateway
        from planetary.runs.federation.hub.gateway import HubSetup
        from planetary.runs.rounds.gateway.gateway import RoundsSetup

        if options.local_threads is not None:
            raise UserError(
                "train: a hub has no workers of its own, its sites have; start it with planetary federation-hub, and "
                "each site with planetary gateway --hub HOST:PORT"
            )
        return Gateway(config, options, security, HubSetup(RoundsSetup()))

    def protocol(self) -> Protocol:
        from planetary.runs.federation.messages import FEDERATION

        return FEDERATION

    def worker_roles(self) -> Roles:
        """The gateway of a site plays the role itself."""
        return {}

    def check_baseline(self, config: Config) -> None:
        RunKind.check_baseline(self, config)


class SiteRounds(Rounds):
    """Rounds of a gateway that belongs to a hub (`docs/federation.md`)."""

    name = "site"
    roles = ()
    simulated = ""

    def claims(self, config: Config) -> bool:
        from planetary.runs.federation.config import FederationConfig

        return bool(config.of(FederationConfig).hub)

    def declared(self) -> Sequence[HonouredKeys]:
        from planetary.runs.federation.config import SITE

        return (SITE,)

    def keys(self, config: Config) -> HonouredKeys:
        return RunKind.keys(self, config)

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any]:
        from planetary.fleet.gateway.gateway import Gateway
        from planetary.runs.federation.config import FederationConfig
        from planetary.runs.federation.site.gateway import SiteSetup
        from planetary.runs.federation.site.uplink import UplinkOptions, hub_address, hub_invite_in
        from planetary.runs.rounds.gateway.gateway import RoundsSetup

        federation, address = config.of(FederationConfig), options.uplink
        name = federation.site or config.run.name
        if address is None:
            token, key = hub_invite_in(federation.token_file), options.cache / "sites" / name / "identity.key"
            address = hub_address(federation.hub, token, key, config.timings.connect_s)
        site = UplinkOptions(address=address, name=name, cache=options.cache / "blobs", run=federation.run)
        return Gateway(config, options, security, SiteSetup(RoundsSetup(), site=site))

    def prepare(self, config: Config, options: GatewayOptions, stage: Callable[[str], None]) -> None:
        """The hub has no part in it."""
        Rounds().prepare(config, options, stage)
