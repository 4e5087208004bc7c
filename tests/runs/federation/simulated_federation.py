"""A simulated federation: a hub and the clusters of the sites in one world, all with production shells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from planetary.core.configuration.schema import Config, OuterConfig
from planetary.fleet.shell.shell import Address
from planetary.runs.federation.config import FederationConfig, SiteEntry
from planetary.runs.federation.hub.gateway import HubSetup
from planetary.runs.federation.site.gateway import SiteSetup
from planetary.runs.federation.site.uplink import UplinkOptions
from planetary.simulation.rounds.cluster import SimCluster
from planetary.simulation.rounds.training import Training
from planetary.simulation.simulated_cluster import PORT, SimPlace
from planetary.simulation.simulated_network import HOST
from planetary.simulation.world import World


class SimFederation:
    """A simulated federation.

    Attributes:
        hub: a cluster whose workers are the sites.
        sites: by name.
    """

    def __init__(
        self, seed: int, hub: Training, sites: Mapping[str, Training], workers: Callable[[str], int] = lambda name: 1
    ) -> None:
        """Start everything at time 0.

        Args:
            seed: of everything random.
            hub: training; `hub_config` makes the configuration.
            sites: by name; `site_config` makes their configurations.
            workers: how many a site has.
        """
        self.world = World(seed)
        self.hub = SimCluster(seed, hub, 0, place=SimPlace(self.world, "hub-"), setup=HubSetup)
        self.hub.contributors = len(sites)
        self.sites: dict[str, SimCluster] = {}
        for number, (name, training) in enumerate(sites.items(), start=1):
            place = SimPlace(self.world, f"{name}-", PORT + number)
            timings = training.prepared.config.timings
            options = UplinkOptions(
                address=Address(HOST, PORT, "", timings.connect_s),
                name=name,
                cache=self.hub.folder / "sites" / name,
            )
            setup = partial(SiteSetup, site=options)
            self.sites[name] = SimCluster(seed, training, workers(name), place=place, setup=setup)

    def run(self, limit_s: float, follow: Callable[[], object] = lambda: None) -> bool:
        """Run until all runs have ended; false when they did not within `limit_s` simulated seconds."""
        clusters = [self.hub, *self.sites.values()]

        def until() -> bool:
            follow()
            return all(c.finished is not None for c in clusters) or any(c.failures for c in clusters)

        try:
            ended = self.world.run(until, limit_s)
        finally:
            for cluster in clusters:
                cluster.leave()
            self.world.close()
        for cluster in clusters:
            if cluster.failures:
                raise cluster.failures[0]
        assert not self.world.loop.errors, self.world.loop.errors
        return ended

    # --- faults -----------------------------------------------------------------------------------------------

    def cut_off(self, name: str, seconds: float) -> None:
        """Cut a site off from the hub, in both directions; the site's workers stay with it."""
        hub, site = self.hub.place.node, self.sites[name].place.node
        self.world.network.cut(hub, site, seconds)
        self.world.network.cut(site, hub, seconds)


def hub_config(config: Config, sites: tuple[SiteEntry, ...], *, rounds: int, every_rounds: int = 1) -> Config:
    """Return the configuration of a hub over sites training by `config`, with the outer step of `config`."""
    federation = FederationConfig(sites=sites, every_rounds=every_rounds)
    replace = msgspec.structs.replace
    return replace(config, train=replace(config.train, rounds=rounds)).having(federation)


def site_config(config: Config, name: str, *, workers: int = 1, outer: OuterConfig, patience_s: float = 60.0) -> Config:
    """Return the configuration of a site whose outer step is `outer`."""
    replace = msgspec.structs.replace
    return replace(
        config,
        run=replace(config.run, name=name),
        fabric=replace(config.fabric, workers=workers),
        outer=outer,
    ).having(FederationConfig(hub=f"{HOST}:{PORT}", site=name, patience_s=patience_s))
