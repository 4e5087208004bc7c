"""The checkpoints of a run in rounds: written, and gone back to."""

from __future__ import annotations

from pathlib import Path

import msgspec

from planetary.artifacts.checkpoint import Checkpoint, CheckpointInfo, go_back, write_checkpoint
from planetary.core.configuration.identity import config_hash
from planetary.core.configuration.schema import Config
from planetary.core.errors import ResourceError
from planetary.fleet.gateway.run_files import CHECKPOINTS
from planetary.fleet.shell.system import System
from planetary.runs.rounds import events as e
from planetary.runs.rounds.gateway.disk_room import DiskRoom
from planetary.runs.rounds.preparation.parameters import ParameterVersions
from planetary.runs.rounds.preparation.preparation import Prepared
from planetary.runs.rounds.start import outer_state_of
from planetary.sync.ring import state_digest


class RoundCheckpoints:
    """Each method blocks, and returns the event for the instruction."""

    def __init__(
        self,
        config: Config,
        prepared: Prepared,
        parameters: ParameterVersions,
        system: System,
        *,
        folder: Path,
        room: DiskRoom,
    ) -> None:
        """`folder`: of the run; `room`: on the disk."""
        self._room = room
        self._config, self._prepared, self._parameters = config, prepared, parameters
        self._folder, self._files, self._clock = folder / CHECKPOINTS, system.files, system.clock

    def restore(self, instruction: e.RestoreParameters) -> e.Event:
        """Go back to an earlier version, on the disk as well."""
        try:
            found = go_back(self._folder, instruction.newest, self._files)
        except ResourceError as error:
            return e.RestoreFailed(str(error))
        mark, outer = outer_state_of(found, self._prepared)
        self._parameters.go_back(outer, mark.round, {} if found is None else found.shown)
        return e.ParametersRestored(mark, state_digest(self._prepared.step.spec.params, outer))

    def checkpoint(self, instruction: e.WriteCheckpoint) -> Checkpoint:
        """Make a checkpoint of the parameters that are here now. Does not block."""
        mark, step, state = instruction.mark, self._prepared.step.spec, self._parameters.state
        info = CheckpointInfo(
            round=mark.round,
            config_hash=config_hash(self._config),
            model=step.model,
            model_digest=step.stablehlo_digest,
            param_specs=step.params,
            data_key=self._prepared.data.key,
            controller=msgspec.Raw(msgspec.json.encode(mark)),
            random_state={"seed": self._config.run.seed},
            base=self._prepared.base,
        )
        return Checkpoint(info, state.params, state.velocity, self._parameters.shown, state.moments)

    def write(self, checkpoint: Checkpoint, protected: tuple[int, ...]) -> e.Event:
        """Write a checkpoint; those of the rounds `protected` stay."""
        round_, began = checkpoint.info.round, self._clock.monotonic()
        keep = self._config.checkpoint.keep
        try:
            path = write_checkpoint(self._folder, checkpoint, keep=keep, protected=protected, files=self._files)
        except ResourceError as error:
            return e.CheckpointLost(round_, str(error))
        finally:
            self._room.look()
        self._room.written_at = self._clock.wall()
        return e.CheckpointDone(round_, path.name, self._clock.monotonic() - began)
