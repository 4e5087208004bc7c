"""A mixture over composers as a kind of run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from planetary.core.errors import UserError
from planetary.run.kinds import RunKind

if TYPE_CHECKING:
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.core.configuration.schema import Config
    from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fleet.worker.role import Roles
    from planetary.wire.protocol import Protocol


class Mixture(RunKind):
    """A sparse mixture of experts, divided among composers (PARALLAX)."""

    name = "mixture"
    roles = ("composer", "expert")
    simulated = "planetary.run.simulations:SimulatedMixture"
    sections: ClassVar[Mapping[str, str]] = {"moe": "moe.composers = 0, so that every worker trains the whole model"}

    def claims(self, config: Config) -> bool:
        from planetary.runs.mixture.config import MoeConfig

        return config.of(MoeConfig).composers > 0

    def declared(self) -> Sequence[HonouredKeys]:
        from planetary.runs.mixture.config import HONOURED

        return (HONOURED,)

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any]:
        from planetary.fleet.gateway.gateway import Gateway
        from planetary.runs.mixture.gateway.gateway import MixtureSetup

        if options.resume_from is not None:
            raise UserError("a mixture goes on from its payloads, not from a checkpoint")
        return Gateway(config, options, security, MixtureSetup())

    def protocol(self) -> Protocol:
        from planetary.runs.mixture.messages import MIXTURES

        return MIXTURES

    def worker_roles(self) -> Roles:
        from planetary.runs.mixture.loader import MixtureLoader
        from planetary.runs.mixture.messages import MixtureJob

        return {MixtureJob: MixtureLoader()}

    def check(self, config: Config) -> list[str]:
        from planetary.runs.mixture.checks import check_mixture

        super().check(config)
        return check_mixture(config)

    def check_baseline(self, config: Config) -> None:
        from planetary.runs.mixture.config import MoeConfig

        raise UserError(
            "train: --baseline trains the tokens of a run in rounds on one worker; for a mixture, train another run "
            "of the whole model: --set moe={} --set fabric.workers=1 --set "
            f"train.batch_size={config.of(MoeConfig).composers * config.train.batch_size}"
        )

    def check_surrogates(self, folder: Path) -> None: ...
