"""Reinforcement learning as a kind of run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from planetary.run.kind.model_code import has_code, is_ours
from planetary.run.kinds import RunKind

if TYPE_CHECKING:
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.core.configuration.schema import Config
    from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fleet.worker.role import Roles
    from planetary.wire.protocol import Protocol


class Reinforcement(RunKind):
    """A policy that learns from the rewards of own rollouts."""

    name = "reinforcement"
    roles = ("actor", "learner")
    controller = "rl"
    command = "rl"
    sections: ClassVar[Mapping[str, str]] = {"rl": "rl.task is empty, so that nothing is learned from rewards"}
    loads_code = True

    def claims(self, config: Config) -> bool:
        from planetary.runs.rl.config import RlConfig

        return bool(config.of(RlConfig).task)

    def keys(self, config: Config) -> HonouredKeys:
        from planetary.runs.rl.config import honoured

        return honoured(config)

    def declared(self) -> Sequence[HonouredKeys]:
        from planetary.runs.rl.config import NEW, STARTED

        return NEW, STARTED

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any]:
        from planetary.fleet.gateway.gateway import Gateway
        from planetary.run.model.served import load_folder, new_model
        from planetary.runs.rl.gateway import PolicySetup
        from planetary.runs.rl.preparation import prepare_policy

        prepare = partial(prepare_policy, load=new_model, load_folder=load_folder)
        return Gateway(config, options, security, PolicySetup(prepare))

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
        from planetary.runs.rl.config import RlConfig

        rl = config.of(RlConfig)
        folders = [Path(one) for one in (rl.start, rl.teacher) if one]
        return any(map(has_code, folders)) or not (rl.start or is_ours(config.model.source))
