"""The kinds of run: which one a configuration asks for, and the behaviour that depends on it outside of the gateway.

A kind is a class derived from `RunKind` in a file of `run/kind`, or in an installed package that has an entry point in
the group `planetary.kinds`. Nothing else asks for the kind of a configuration; an operation that only some kinds
support is a method of it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from planetary.core.errors import PlanetaryError, UserError
from planetary.core.registry import Registry

if TYPE_CHECKING:  # supervisors and node managers, which import this, have no configuration
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.core.configuration.schema import Config
    from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fleet.protocol.events import Finish
    from planetary.fleet.worker.role import Roles
    from planetary.wire.protocol import Protocol


class RunKind(ABC):
    """A kind of run: gateway, roles, end.

    Attributes:
        name: of the kind, in messages.
        roles: of the workers, by the names that `--role` takes; empty: there is one role only.
        controller: of a gateway with several, the one that runs it: "training", "inference" or "rl"; "": none does.
        command: that has such a run on this machine.
        sections: of the configuration, that the kind alone has -> why a run of another kind has no effect of them.
        simulated: "module:Class" of the kind's `run.simulations.Simulation`; empty: the kind is not simulated.
        keeps_state: whether a resumed run goes on from a checkpoint, and with the bans in the journal.
        loads_code: whether the gateway's process loads the model's code, although the preparation is in the cache.
    """

    name: ClassVar[str]
    roles: ClassVar[tuple[str, ...]] = ()
    controller: ClassVar[str] = "training"
    simulated: ClassVar[str] = ""
    loads_code: ClassVar[bool] = False
    keeps_state: ClassVar[bool] = True
    command: ClassVar[str] = "train"
    sections: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def claims(self, config: Config) -> bool:
        """Whether a configuration asks for this kind."""

    @abstractmethod
    def declared(self) -> Sequence[HonouredKeys]:
        """Return the keys that runs of the kind honour, for each way in which it runs."""

    def keys(self, config: Config) -> HonouredKeys:
        """Return which of `declared` a run of this configuration has. Every other key with a value is refused."""
        (only,) = self.declared()
        return only

    @abstractmethod
    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any]:
        """Make the gateway; it is not started."""

    def beside(self, first: Gateway[Any], security: Security) -> Sequence[Gateway[Any]]:
        """Make the gateways of further runs that the same process hosts and that end with this one."""
        return ()

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
        """Return the protocol; without JAX or a compiler."""
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
        from planetary.core.configuration.derived import set_keys

        absent = {section: why for kind in all_kinds() for section, why in kind.sections.items()}
        self.keys(config).refuse_others(set_keys(config), absent)
        return []

    def progress(self, folder: Path) -> int:
        """Return a number that grows as the run in `folder` gets further: here, with the finished rounds."""
        from planetary.fleet.gateway.run_files import METRICS

        return line_count(folder / METRICS)

    async def results_after(self, running: Awaitable[Finish], folder: Path, again: str = "") -> Finish:
        """Write a run's report and picture, and return how it ended; raises a failed run's error.

        `again`: command that resumes the run; "": `planetary train`.
        """
        from planetary.run.results import results_after

        return await results_after(running, folder, again)

    def failure(self, end: Finish, folder: Path, again: str = "") -> PlanetaryError:
        """Return the error of an unfinished run in `folder`; the class decides the exit code."""
        from planetary.run.results import failure_of

        return failure_of(end.kind, end.reason, folder, again)

    def check_baseline(self, config: Config) -> None:
        """Raise `UserError` unless the tokens of a run can be trained on one worker for comparison."""
        raise UserError(
            f'train: --baseline trains the tokens of a run in rounds on one worker; found the kind "{self.name}"'
        )

    def check_surrogates(self, folder: Path) -> None:
        """Raise `UserError` unless composers save their shards and surrogates in the run's folder."""
        raise UserError(
            f"the run in {folder} has no composers and no surrogates: it trains the whole model (moe.composers = 0). "
            "Surrogates of an exported model are beside its weights: name these with --checkpoint"
        )


KINDS: Registry[RunKind] = Registry(
    "kind of run",
    "planetary.kinds",
    "planetary.run.kinds:RunKind",
    [f"planetary.run.kind.{name}" for name in ("serving", "mixture", "reinforcement", "federation", "rounds")],
)
"""Imports a kind when it is asked for one, so that whoever asks does not depend on the kinds."""


@functools.cache
def all_kinds() -> tuple[RunKind, ...]:
    """Return the kinds in the order in which they are asked: those of installed packages first, rounds last."""
    names = KINDS.names()
    return tuple(KINDS.find(name)() for name in [*names[len(KINDS.built_in) :], *KINDS.built_in])


def line_count(path: Path) -> int:
    """Return the lines of a file, 0 where there is none."""
    try:
        with path.open("rb") as file:
            return sum(piece.count(b"\n") for piece in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def kind_of(config: Config) -> RunKind:
    """Return the kind of run a configuration asks for."""
    return next(kind for kind in all_kinds() if kind.claims(config))


def kind_named(name: str) -> RunKind:
    """Return the kind of a name in `all_kinds`."""
    return next(kind for kind in all_kinds() if kind.name == name)


def worker_roles() -> Roles:
    """Return the loaders of a worker's roles, for every job a gateway may assign."""
    return {job: loader for kind in all_kinds() for job, loader in kind.worker_roles().items()}


def worker_protocol() -> Protocol:
    """Return a worker's protocol: the messages of every kind of run."""
    from planetary.fleet.protocol.messages import FABRIC

    messages = [message for kind in all_kinds() for message in kind.protocol().messages]
    return FABRIC.extended(*(message for message in dict.fromkeys(messages) if message not in FABRIC.messages))
