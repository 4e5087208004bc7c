"""Rounds of leases as a kind of run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planetary.core.extension_points import TOPOLOGIES
from planetary.run.kinds import RunKind

if TYPE_CHECKING:
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.core.configuration.schema import Config
    from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fleet.worker.role import Roles
    from planetary.runs.rounds.controller.topology import Topology
    from planetary.wire.protocol import Protocol


class Rounds(RunKind):
    """Rounds of leases with one outer step each (DiLoCo)."""

    name = "rounds"
    roles = ("trainer",)
    simulated = "planetary.run.simulations:SimulatedRounds"

    def claims(self, config: Config) -> bool:
        """Every configuration no other kind claims."""
        return True

    def declared(self) -> Sequence[HonouredKeys]:
        return [_honoured(topology) for topology in TOPOLOGIES.built_in.values()]

    def keys(self, config: Config) -> HonouredKeys:
        """A topology in a file of the user is not run for its keys: it has those of the star, its base."""
        return _honoured(TOPOLOGIES.declared(config.sync.topology) or TOPOLOGIES.find("star"))

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any]:
        from planetary.fleet.gateway.gateway import Gateway
        from planetary.runs.rounds.gateway.gateway import RoundsSetup

        return Gateway(config, options, security, RoundsSetup())

    def protocol(self) -> Protocol:
        from planetary.runs.rounds.messages import ROUNDS

        return ROUNDS

    def worker_roles(self) -> Roles:
        from planetary.runs.rounds.messages import TrainingJob
        from planetary.runs.rounds.worker.role import TrainingLoader

        return {TrainingJob: TrainingLoader()}

    def check_baseline(self, config: Config) -> None: ...


def _honoured(topology: type[Topology]) -> HonouredKeys:
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.runs.rounds.config import SECTIONS

    kind = "rounds in a ring" if topology.in_ring else "rounds"
    return HonouredKeys(kind=kind, keys=(*SECTIONS, "sync.*", "sinks"), without=topology.without)
