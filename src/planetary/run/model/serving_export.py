"""A model with verified serving functions, as a folder served without code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.iree import compile_program
from planetary.compiler.backends.targets import Target
from planetary.core.configuration.schema import Config
from planetary.core.errors import ResourceError, UserError
from planetary.core.step import ProgramSpec
from planetary.run.model.served import load_served
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.loaded_model import LoadedModel
from planetary.runs.serve.model_check import check_model
from planetary.runs.serve.program.exported_model import (
    MANIFEST,
    ExportedModel,
    is_exported,
    read_exported,
    write_exported,
)
from planetary.runtime.device_program import Program, open_program
from planetary.runtime.host import host_features


def export_served(config: Config, folder: Path, *, force: bool = False) -> tuple[ExportedModel, str]:
    """Write the model that `serve.model` names into a folder, once its functions were compared on this machine's CPU.

    Args:
        config: `[serve]` has the model and the sizes of the functions.
        folder: gets the files.
        force: replace a model that is in `folder`.

    Returns:
        The model as it was written, and the findings of the comparison, for people.

    Raises:
        UserError: there is no model, or `folder` holds one.
        CompileError: the functions cannot be compiled, or differ from the whole forward pass.
        TrustError: a file of the model is damaged.
        ResourceError: the folder cannot be written.
    """
    if is_exported(folder) and not force:
        raise UserError(f"cannot export to {folder}: it already holds a served model; use another, or --force")
    if config.of(ServeConfig).models or config.of(ServeConfig).adapters:
        raise UserError("serve.models, serve.adapters: an exported folder has one model, without adapters beside it")
    model = load_served(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as scratch:
            place = Path(scratch) / "model"
            write_exported(model, config.of(ServeConfig), place)
            report = _verified(read_exported(place), config, Path(scratch))  # of the files, not of their source
            (folder / MANIFEST).unlink(missing_ok=True)
            for file in sorted(place.iterdir(), key=lambda one: one.name == MANIFEST):  # the manifest last
                os.replace(file, folder / file.name)
    except OSError as error:
        raise ResourceError(f"cannot write the served model into {folder}: {error.strerror or error}") from error
    return read_exported(folder), report


def _verified(model: ExportedModel, config: Config, scratch: Path) -> str:
    shape = model.shape(config.of(ServeConfig))
    program = model.program(shape)
    spec = ProgramSpec(model.name, dict(program.functions), shape.integers_below, program.digest, program.weights)
    artifact = compile_program(
        program.portable, spec, Target("cpu", "host", host_features()), BlobStore(scratch / "cache")
    )
    runner = open_program(artifact.data, Program(b"", program.functions), backend="cpu")
    loaded = LoadedModel(runner, shape, model.arrays())
    return check_model(loaded.compute, shape, model.trial(shape), runner.device_name).summary
