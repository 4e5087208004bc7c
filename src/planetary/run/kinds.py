"""The kinds of run: which one a configuration asks for, and the gateway that coordinates it.

A new kind is one file with a class like those below and one line in `KINDS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from planetary.core.config import Config
from planetary.core.errors import UserError

if TYPE_CHECKING:
    from planetary.fabric.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fabric.worker.role import Roles


class RunKind(Protocol):
    """What a gateway trains, and how."""

    name: str

    def claims(self, config: Config) -> bool:
        """Whether a configuration asks for this kind."""
        ...

    def check(self, config: Config) -> None:
        """Raise `UserError` for a configuration that cannot be run, before a folder or a port is taken."""
        ...

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        """Make the gateway; it is not started."""
        ...

    def worker_roles(self) -> Roles:
        """Return what makes a worker's role of the kind's jobs; without JAX or a compiler."""
        ...


class Mixture:
    """A sparse mixture of experts over composers (PARALLAX)."""

    name = "mixture"

    def claims(self, config: Config) -> bool:
        """See `RunKind`."""
        return config.moe.composers > 0

    def check(self, config: Config) -> None:
        """See `RunKind`."""
        from planetary.moe.plan.checked_config import check_mixture

        check_mixture(config)

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        """See `RunKind`."""
        from planetary.moe.gateway.mixture_gateway import MixtureGateway

        if options.resume_from is not None:
            raise UserError("a mixture over composers goes on from its payloads, not from a checkpoint")
        return MixtureGateway(config, options, security)

    def worker_roles(self) -> Roles:
        """See `RunKind`."""
        from planetary.moe.composer.mixture_loader import MixtureLoader
        from planetary.moe.protocol.mixture_messages import MixtureJob

        return {MixtureJob: MixtureLoader()}


class Rounds:
    """Rounds of leases with one outer step each (DiLoCo)."""

    name = "rounds"

    def claims(self, config: Config) -> bool:
        """See `RunKind`; every configuration that no other kind claims."""
        return True

    def check(self, config: Config) -> None:
        """See `RunKind`; reading the configuration has checked everything."""

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any, Any, Any]:
        """See `RunKind`."""
        from planetary.fabric.gateway.rounds_gateway import RoundsGateway

        return RoundsGateway(config, options, security)

    def worker_roles(self) -> Roles:
        """See `RunKind`."""
        from planetary.fabric.protocol.messages import Job
        from planetary.fabric.worker.training_role import TrainingLoader

        return {Job: TrainingLoader()}


KINDS: tuple[RunKind, ...] = (Mixture(), Rounds())
"""In the order in which they are asked."""


def kind_of(config: Config) -> RunKind:
    """Return the kind of run that a configuration asks for."""
    return next(kind for kind in KINDS if kind.claims(config))


def worker_roles() -> Roles:
    """Return what makes a worker's role of every job that a gateway may give it."""
    return {job: loader for kind in KINDS for job, loader in kind.worker_roles().items()}
