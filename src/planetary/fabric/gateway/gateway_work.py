"""What the gateway does beside its event loop in a run in rounds: outer steps, checkpoints. Each ends with an event."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, write_checkpoint
from planetary.core.config import Config, config_hash
from planetary.core.errors import NumericsError, ResourceError
from planetary.fabric.gateway.background import Background
from planetary.fabric.gateway.gateway_start import Start
from planetary.fabric.gateway.run_files import CHECKPOINTS
from planetary.fabric.preparation.preparation import Prepared
from planetary.fabric.protocol import events as e

if TYPE_CHECKING:
    from planetary.fabric.gateway.run_host import GatewayOptions


class GatewayWork:
    """One per run in rounds. Its methods are called on the event loop."""

    def __init__(
        self,
        config: Config,
        options: GatewayOptions,
        prepared: Prepared,
        start: Start,
        background: Background,
    ) -> None:
        """`background` runs it and takes the events."""
        self._config, self._options = config, options
        self._prepared, self._start = prepared, start
        self._background = background

    def take_outer_step(self, instruction: e.TakeOuterStep) -> None:
        """Begin; `OuterStepDone` or `OuterStepFailed` is posted."""
        self._background.add(self._take_outer_step(instruction))

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
        self._background.add(self._write(Checkpoint(info, state.params, state.velocity)))

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
            self._background.post(e.OuterStepFailed(instruction.round, str(error)))
            return
        self._background.post(e.OuterStepDone(instruction.round))

    async def _write(self, checkpoint: Checkpoint) -> None:
        round_, began = checkpoint.info.round, time.monotonic()
        try:
            path = await asyncio.to_thread(
                write_checkpoint, self._options.folder / CHECKPOINTS, checkpoint, keep=self._config.checkpoint.keep
            )
        except ResourceError as error:
            self._background.post(e.CheckpointLost(round_, str(error)))
            return
        self._background.post(e.CheckpointDone(round_, path.name, time.monotonic() - began))
