"""A training step a run may go on with, in place of the one it has: of equal signature, made afresh.

A model's function is imported once in a process, so a process which has run for days would export a file as it was at
the start: the export has a separate process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from planetary.core import decoding
from planetary.core.configuration.schema import Config, config_from_json
from planetary.core.errors import UserError
from planetary.core.step import StepSpec
from planetary.fleet.preparation.compiling import PublishedArtifact, answer_of_child, answer_with
from planetary.fleet.shell.child import end_group, end_with_parent
from planetary.runs.rounds.preparation.preparation import Prepared, check_frozen, prepare_run
from planetary.runs.rounds.preparation.prepared_steps import StepRecord
from planetary.runs.rounds.roll_out import changed_config


async def export_apart(config: Config, overrides: Sequence[str], cache: Path) -> Prepared:
    """Export, differentiate and check the training step of a configuration with `overrides`, in a child process.

    Raises:
        UserError: an override is wrong, or of a key that is no part of the training step.
        CompileError: the step cannot be made; the text says why.
    """
    changed = changed_config(config, overrides)
    with tempfile.TemporaryDirectory(prefix="planetary-step-") as name:
        folder = Path(name)
        (folder / "request.json").write_bytes(msgspec.json.encode((changed, str(cache))))
        await answer_of_child("planetary.runs.rounds.preparation.next_step", folder)
        record = decoding.from_json((folder / "record.json").read_bytes(), StepRecord)
    return await asyncio.to_thread(prepare_run, changed, cache, _ignore, record)


def in_place_of(step: Prepared, current: Prepared) -> Prepared:
    """Return `current` with the training step of another preparation.

    The run keeps data, configuration and initial parameters; the step's record stands for that configuration from now
    on, so a resumed run finds it.

    Raises:
        UserError: the signature or a frozen tensor differs, or the step is the one the run has.
    """
    if difference := signature_difference(current.step.spec, step.step.spec):
        raise UserError(
            f"the new training step cannot go on from the state of the run: {difference}. A roll-out keeps parameters "
            "and optimizer states; for another model begin another run, with model.weights"
        )
    check_frozen(current.config, current.record, step.record)
    if step.step.spec.stablehlo_digest == current.step.spec.stablehlo_digest:
        raise UserError(
            f"the training step is the one that the run has ({step.step.spec.stablehlo_digest[:12]}): neither the "
            "model's files nor the keys given change it"
        )
    record = msgspec.structs.replace(step.record, made_from=current.record.made_from, params=current.record.params)
    return dataclasses.replace(current, step=step.step, buffer_values=step.buffer_values, record=record)


def signature_difference(old: StepSpec, new: StepSpec) -> str:
    """Return the first difference of two steps' signatures, in words; "" for equal ones."""
    if old.statistics != new.statistics:
        return f"the statistics are {_names(old.statistics)} in the run and {_names(new.statistics)} in the new step"
    for kind in ("params", "buffers", "opt_state", "batch"):
        before = {spec.name: spec for spec in getattr(old, kind)}
        after = {spec.name: spec for spec in getattr(new, kind)}
        for name in [*before, *after]:
            one, other = before.get(name), after.get(name)
            if one != other:
                shown = [f"{spec.dtype}{list(spec.shape)}" if spec is not None else "absent" for spec in (one, other)]
                return f"{kind} has {name!r} as {shown[0]} in the run and {shown[1]} in the new step"
        if list(before) != list(after):
            return f"{kind} has another order"
    return ""


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _serve(folder: Path) -> None:
    encoded, cache = decoding.from_json((folder / "request.json").read_bytes(), tuple[msgspec.Raw, str])
    config = config_from_json(encoded)

    def made() -> PublishedArtifact:
        prepared = prepare_run(config, Path(cache), _ignore)
        (folder / "record.json").write_bytes(msgspec.json.encode(prepared.record))
        return PublishedArtifact(prepared.record.module, len(prepared.step.portable), "")

    answer_with(folder, made)


def _ignore(stage: str) -> None:
    """Take no note of a stage."""


ExportStep = Callable[[Config, Sequence[str], Path], Awaitable[Prepared]]
"""As `export_apart`."""

if __name__ == "__main__":
    end_with_parent(end_group)
    _serve(Path(sys.argv[1]))
    os._exit(0)  # without tearing down the interpreter while a device is open: see `runtime`
