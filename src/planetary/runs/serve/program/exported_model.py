"""A served model as a folder of portable files: functions in StableHLO, parameters, tokenizer and trial.

The functions are served as they are. A worker compares them with the trial, the results of the whole forward pass
where the folder was written, before it serves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from planetary.artifacts.safetensors_file import read_safetensors, safetensors_pieces
from planetary.artifacts.store import digest_of, write_atomically
from planetary.core import decoding
from planetary.core.errors import TrustError, UserError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.data.tokenizer import load_tokenizer, save_tokenizer
from planetary.runs.serve.config import ServeConfig
from planetary.runs.serve.program.served_model import ServedModel
from planetary.runs.serve.program.shape import CallSize, ServingShape
from planetary.runs.serve.program.trial import ServingTrial, decode_trial, encode_trial
from planetary.runtime.device_program import Program

MANIFEST = "serving.json"
"""Names the other files with their digests. It is written last: a folder without it is no model."""
PROGRAM, WEIGHTS, TRIAL = "program.mlir", "weights.safetensors", "trial.msgpack"
FORMAT = 4
FIXED = ("context", "batch", "cache_mb", "cache_precision", "weights", "experts")
"""Keys of `[serve]` that the functions are made for."""


class ExportManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of the folder.

    Attributes:
        format: 4; 1 had no functions that gather pages, 2 had other names for them, 3 no spare pages.
        name: of the model.
        version: see `ServedModel`, as `begins`, `ends`, `chat_template`, `special_tokens` and `warning`.
        vocabulary: tokens the model knows.
        window: the longest text it was trained for.
        tokenizer: for `load_tokenizer`, with the folder.
        shape: sizes of batches, chunks, contexts and of the cache, whose page 0 takes writes that no text reads.
        functions: signature of every function: arguments and results, the cache among both.
        params: the arguments that are parameters, in order.
        options: values of the keys `FIXED` when the folder was written.
        digests: sha256 of the other files.
    """

    format: Literal[4] = FORMAT
    name: str
    version: int
    vocabulary: int
    window: int
    tokenizer: str
    chat_template: str
    special_tokens: tuple[tuple[str, str], ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    warning: str
    shape: ServingShape
    functions: dict[str, FunctionSpec]
    params: tuple[TensorSpec, ...]
    options: dict[str, int | float | str]
    digests: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ExportedModel(ServedModel):
    """A served model in a folder of portable files.

    Attributes:
        folder: it was read from.
        manifest: of the folder.
    """

    folder: Path
    manifest: ExportManifest
    values: dict[str, np.ndarray] = field(repr=False)
    functions: Program = field(repr=False)

    def arrays(self) -> dict[str, np.ndarray]:
        return self.values

    def shape(self, serve: ServeConfig) -> ServingShape:
        """Return the shape of the folder's functions.

        Raises:
            UserError: the configuration asks for other functions than the folder has.
        """
        defaults = ServeConfig()
        for key in FIXED:
            wanted, made = getattr(serve, key), self.manifest.options[key]
            if wanted not in (made, getattr(defaults, key)):
                raise UserError(
                    f"serve.{key} = {wanted!r}: the functions in {self.folder} were exported with {made!r}; export the "
                    "model again with the value that is wanted"
                )
        return self.manifest.shape

    def program(self, shape: ServingShape, calls: Sequence[CallSize] | None = None) -> Program:
        return self.functions if calls is None else _some_of(self.functions, shape.functions(self.specs, calls))

    def trial(self, shape: ServingShape, adapter: int = 0) -> ServingTrial:
        """Raises `TrustError` for a damaged file."""
        return decode_trial(_checked(self.folder, TRIAL, self.manifest), shape)


def _some_of(program: Program, functions: Mapping[str, FunctionSpec]) -> Program:
    """Return a program with these functions of another one alone."""
    from planetary.compiler import ir

    with ir.new_context():
        module = ir.parse_module(program.portable)
        for name, function in ir.functions(module).items():
            if name not in functions:
                ir.erase_function(function)
        return replace(program, portable=ir.to_portable_artifact(module), functions=functions)


def is_exported(path: Path) -> bool:
    """Whether this is such a folder."""
    return (path / MANIFEST).is_file()


def write_exported(model: ServedModel, serve: ServeConfig, folder: Path) -> ExportManifest:
    """Write a model's files into an empty folder.

    Args:
        model: with any source.
        serve: the sizes of the functions.
        folder: gets the files.

    Raises:
        UserError: the sizes do not fit the model.
        CompileError: the model cannot be lowered.
        ResourceError: the folder cannot be written.
    """
    shape = model.shape(serve)
    program, arrays = model.program(shape), model.arrays()
    trial = encode_trial(model.trial(shape))
    weights = b"".join(safetensors_pieces(model.specs, arrays))
    tokenizer = save_tokenizer(model.tokenizer, folder)
    contents = {PROGRAM: program.portable, WEIGHTS: weights, TRIAL: trial}
    for name, data in contents.items():
        write_atomically(folder / name, data)
    manifest = ExportManifest(
        name=model.name,
        version=model.version,
        vocabulary=model.vocabulary,
        window=model.window,
        tokenizer=tokenizer,
        chat_template=model.chat_template,
        special_tokens=model.special_tokens,
        begins=model.begins,
        ends=tuple(sorted(model.ends)),
        warning=model.warning,
        shape=shape,
        functions=dict(program.functions),
        params=model.specs,
        options={key: getattr(serve, key) for key in FIXED},
        digests={name: digest_of(data) for name, data in contents.items()},
    )
    write_atomically(folder / MANIFEST, msgspec.json.encode(manifest))
    return manifest


class _MadeAs(msgspec.Struct):
    """The part of a manifest every format has."""

    format: int = 0


def read_exported(folder: Path) -> ExportedModel:
    """Return the model of a folder.

    Raises:
        TrustError: a file is missing, damaged, or another than the manifest names.
        UserError: the tokenizer cannot be read.
    """
    try:
        text = (folder / MANIFEST).read_bytes()
        made = decoding.from_json(text, _MadeAs).format
        if made not in (0, FORMAT):
            raise TrustError(
                f"{folder} was exported in format {made}, and this planetary reads format {FORMAT}: export the model "
                "again"
            )
        manifest = decoding.from_json(text, ExportManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise TrustError(f"{folder / MANIFEST} is no manifest of a served model: {error}") from None
    shape = manifest.shape
    if manifest.functions != shape.functions(manifest.params) or set(manifest.options) != set(FIXED):
        raise TrustError(f"{folder / MANIFEST} contradicts itself: its functions are not those of its sizes")
    weights = tuple(spec.name for spec in manifest.params)
    program = Program(_checked(folder, PROGRAM, manifest), manifest.functions, weights)
    _checked(folder, WEIGHTS, manifest)
    specs, values = read_safetensors(folder / WEIGHTS)
    if specs != manifest.params:
        raise TrustError(f"{folder / WEIGHTS} has other parameters than {MANIFEST} names")
    return ExportedModel(
        name=manifest.name,
        specs=specs,
        vocabulary=manifest.vocabulary,
        window=manifest.window,
        tokenizer=load_tokenizer(manifest.tokenizer, folder),
        version=manifest.version,
        chat_template=manifest.chat_template,
        special_tokens=manifest.special_tokens,
        begins=manifest.begins,
        ends=frozenset(manifest.ends),
        warning=manifest.warning,
        folder=folder,
        manifest=manifest,
        values=values,
        functions=program,
    )


def _checked(folder: Path, name: str, manifest: ExportManifest) -> bytes:
    """Return a file's bytes. Raises `TrustError` unless they are those the manifest names."""
    try:
        data = (folder / name).read_bytes()
    except OSError as error:
        raise TrustError(f"cannot read {folder / name}: {error.strerror or error}") from None
    if digest_of(data) != manifest.digests.get(name):
        raise TrustError(f"{folder / name} is not the file that {MANIFEST} names: it was changed or cut")
    return data
