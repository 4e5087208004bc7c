"""What the gateway does beside its event loop: compiling, outer steps, checkpoints. Each ends with an event."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.core.config import Config, config_hash
from planetary.core.errors import NumericsError, PlanetaryError, ResourceError
from planetary.fabric import events as e
from planetary.fabric.compiling import CompileTarget, compile_apart
from planetary.fabric.gateway_start import Start
from planetary.fabric.preparation import Prepared
from planetary.fabric.run_files import CHECKPOINTS

if TYPE_CHECKING:
    from planetary.fabric.gateway import GatewayOptions

log = logging.getLogger(__name__)


class GatewayWork:
    """One per run. Its methods are called on the event loop."""

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        prepared: Prepared,
        start: Start,
        post: Callable[[e.Event], None],
    ) -> None:
        """`post` takes the events."""
        self._config, self._options = config, options
        self._prepared, self._start, self._post = prepared, start, post
        self._tasks: set[asyncio.Task[None]] = set()

    def compile(self, instruction: e.Compile) -> None:
        """Begin; `Compiled` or `CompileFailed` is posted."""
        self.add(self._compile(instruction), name="compile")

    def take_outer_step(self, instruction: e.TakeOuterStep) -> None:
        """Begin; `OuterStepDone` or `OuterStepFailed` is posted."""
        self.add(self._take_outer_step(instruction))

    def write_checkpoint(self, instruction: e.WriteCheckpoint) -> None:
        """Begin, with the parameters that are here now; `CheckpointDone` or `CheckpointLost` is posted."""
        mark, spec, state = instruction.mark, self._start.policy.spec, self._start.parameters.state
        info = CheckpointInfo(
            round=mark.round,
            config_hash=config_hash(self._config),
            model=spec.model,
            model_digest=spec.stablehlo_digest,
            param_specs=spec.params,
            data_key=self._prepared.data.key,
            controller=msgspec.Raw(msgspec.json.encode(mark)),
            random_state={"seed": self._config.run.seed},
        )
        self.add(self._write(Checkpoint(info, state.params, state.velocity)))

    def add(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        """Begin something else that `finish` is to wait for."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for what is under way, except that a compiler is killed with its process."""
        for task in list(self._tasks):
            if task.get_name() == "compile":
                task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _compile(self, instruction: e.Compile) -> None:
        backend, target, features = instruction.backend, instruction.target, instruction.features
        began = time.monotonic()
        try:
            published = await compile_apart(
                self._prepared, CompileTarget(backend, target, features), self._options.cache
            )
        except PlanetaryError as error:
            self._post(e.CompileFailed(backend, target, features, str(error)))
            return
        except Exception as error:
            log.exception("compiling for %s:%s failed", backend, target)
            self._post(e.CompileFailed(backend, target, features, f"{type(error).__name__}: {error}"))
            return
        seconds = time.monotonic() - began
        self._post(
            e.Compiled(backend, target, features, published.digest, published.nbytes, seconds, published.verified)
        )

    async def _take_outer_step(self, instruction: e.TakeOuterStep) -> None:
        outer = self._config.outer
        try:
            await asyncio.to_thread(
                self._start.parameters.take_outer_step,
                instruction.round,
                instruction.contributions,
                outer.learning_rate,
                outer.momentum,
            )
        except NumericsError as error:
            self._post(e.OuterStepFailed(instruction.round, str(error)))
            return
        self._post(e.OuterStepDone(instruction.round))

    async def _write(self, checkpoint: Checkpoint) -> None:
        round_, began = checkpoint.info.round, time.monotonic()
        try:
            path = await asyncio.to_thread(
                write_checkpoint, self._options.folder / CHECKPOINTS, checkpoint, keep=self._config.checkpoint.keep
            )
        except ResourceError as error:
            self._post(e.CheckpointLost(round_, str(error)))
            return
        self._post(e.CheckpointDone(round_, path.name, time.monotonic() - began))
