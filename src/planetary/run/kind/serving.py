"""A served model as a kind of run."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from planetary.core.errors import PlanetaryError
from planetary.run.kind.model_code import has_code
from planetary.run.kinds import RunKind, line_count

if TYPE_CHECKING:
    from planetary.core.configuration.honoured import HonouredKeys
    from planetary.core.configuration.schema import Config
    from planetary.fleet.gateway.gateway import Gateway, GatewayOptions, Security
    from planetary.fleet.protocol.events import Finish
    from planetary.fleet.worker.role import Roles
    from planetary.runs.serve.gateway import ServingSetup
    from planetary.wire.protocol import Protocol


class Serving(RunKind):
    """A trained model behind an HTTP endpoint."""

    name = "serving"
    roles = ("server",)
    controller = "inference"
    command = "serve"
    sections: ClassVar[Mapping[str, str]] = {"serve": "serve.model is empty, so that nothing is served"}
    loads_code = True
    keeps_state = False

    def claims(self, config: Config) -> bool:
        from planetary.runs.serve.config import ServeConfig

        return bool(config.of(ServeConfig).model)

    def keys(self, config: Config) -> HonouredKeys:
        from planetary.runs.serve.config import honoured

        return honoured(config)

    def declared(self) -> Sequence[HonouredKeys]:
        from planetary.runs.serve.config import CODED, GRAPH

        return CODED, GRAPH

    def gateway(self, config: Config, options: GatewayOptions, security: Security) -> Gateway[Any]:
        from planetary.fleet.gateway.gateway import Gateway

        return Gateway(config, options, security, _setup(options))

    def beside(self, first: Gateway[Any], security: Security) -> Sequence[Gateway[Any]]:
        import msgspec

        from planetary.fleet.gateway.gateway import Gateway
        from planetary.fleet.gateway.run_files import has_run
        from planetary.runs.serve.config import ServeConfig
        from planetary.runs.serve.gateway import ServingSetup

        serve, found = first.config.of(ServeConfig), []
        assert isinstance(first.setup, ServingSetup)
        for number, (name, path) in enumerate(serve.models.items(), 1):
            folder = first.options.folder / f"{first.options.folder.name}-{number}"
            config = first.config.having(msgspec.structs.replace(serve, model=path, name=name, models={}, adapters={}))
            run = msgspec.structs.replace(config.run, name=f"{config.run.name}-{number}")
            options = msgspec.structs.replace(first.options, folder=folder, resume=has_run(folder))
            setup = _setup(options)
            setup.first = first.setup
            first.setup.beside.append(setup)
            found.append(Gateway(msgspec.structs.replace(config, run=run), options, security, setup))
        return found

    def has_code(self, config: Config) -> bool:
        from planetary.runs.serve.config import ServeConfig

        return has_code(Path(config.of(ServeConfig).model))

    def progress(self, folder: Path) -> int:
        """There are no rounds, and the journal grows once the model is prepared."""
        from planetary.fleet.gateway.run_files import EVENTS

        return line_count(folder / EVENTS)

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


def _setup(options: GatewayOptions) -> ServingSetup:
    from planetary.artifacts.store import BlobStore
    from planetary.run.model.served import load_served
    from planetary.runs.serve.gateway import ServingSetup

    return ServingSetup(partial(load_served, store=BlobStore(options.cache / "blobs")))
