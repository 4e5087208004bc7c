"""Rounds of leases as a kind of run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from planetary.run.kinds import RunKind

if TYPE_CHECKING:
    from planetary.core.config import Config
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fleet.worker.role import Roles
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
        from planetary.runs.rounds.config import RING, STAR

        return STAR, RING

    def keys(self, config: Config) -> HonouredKeys:
        star, ring = self.declared()
        return ring if config.sync.topology == "ring" else star

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
