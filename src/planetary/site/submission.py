"""From a submission and files to the configuration of a run, checked as the gateway's command does."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from planetary.core.config import config_from_tables, load_config
from planetary.core.configuration.keys import named_objects
from planetary.core.configuration.schema import FILE_KEYS, Config, is_function, names_code
from planetary.core.configuration.sinks import OwnSink
from planetary.core.errors import ResourceError, UserError
from planetary.core.extension_points import EXTENSION_POINTS
from planetary.core.registry import file_of
from planetary.data.files import is_pattern
from planetary.run.choice import check_unchanged
from planetary.run.kinds import kind_of
from planetary.runs.rl.config import RlConfig
from planetary.runs.rounds.preparation.model_shapes import with_model_shapes
from planetary.runs.serve.config import ServeConfig
from planetary.site.config import DATA_SCHEME, ControllerOptions
from planetary.site.model_process import PreparationLimits, shapes_apart

log = logging.getLogger(__name__)

FILES = "files"
"""Folder of submitted files beside the runs: files/DIGEST/NAME."""
MOST_FILE, MOST_FILES = 4 << 30, 32 << 30  # bytes of one, and of all
_HEX = frozenset("0123456789abcdef")
_NONE: Mapping[str, str] = MappingProxyType({})


class SubmittedFiles:
    """Files that clients sent, by the SHA-256 of their bytes; they stay until a person removes them."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the site."""
        self._folder = folder / FILES

    def path_of(self, digest: str, name: str) -> Path:
        """Return where a file is, or would be. Raises `UserError` for a digest or a name that cannot be."""
        if len(digest) != 64 or not set(digest) <= _HEX:
            raise UserError(f"expected the SHA-256 of a file, 64 hexadecimal digits, found {digest[:80]!r}")
        if name != Path(name).name or name.startswith(".") or not name.isprintable() or len(name.encode()) > 200:
            raise UserError(f"expected the name of one file, found {name[:80]!r}")
        return self._folder / digest / name

    async def receive(self, digest: str, name: str, pieces: AsyncIterator[bytes]) -> Path:
        """Keep a file that arrives in pieces, unless it is here; return the path.

        Raises:
            UserError: the bytes have another digest, or are more than `MOST_FILE`.
            ResourceError: the disk is full, or files of `MOST_FILES` bytes are here already.
        """
        path = self.path_of(digest, name)
        if path.exists():
            return path
        room = MOST_FILES - await asyncio.to_thread(self._nbytes)
        hashed, size = hashlib.sha256(), 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    async for piece in pieces:
                        size += len(piece)
                        if size > MOST_FILE:
                            raise UserError(f"{name} has more than {MOST_FILE} bytes: put it on the gateway's machine")
                        if size > room:
                            raise ResourceError(
                                f"files of {MOST_FILES - room} bytes were sent to this gateway, and {MOST_FILES} may "
                                f"be: remove some from {self._folder}"
                            )
                        hashed.update(piece)
                        await asyncio.to_thread(file.write, piece)
                if hashed.hexdigest() != digest:
                    raise UserError(f"{name}: expected bytes of SHA-256 {digest}, found {hashed.hexdigest()}")
                os.replace(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        except OSError as error:
            raise ResourceError(f"cannot keep {path}: {error.strerror or error}") from error
        return path

    def _nbytes(self) -> int:
        return sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())

    def placed(self, tables: Mapping[str, Any], files: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
        """Return tables of a configuration whose keys name files that were sent.

        Args:
            tables: sections.
            files: "section.key" -> digest and name. The function of a `model.source` stays.

        Raises:
            UserError: a key takes no file, or the file is not here.
        """
        changed: dict[str, Any] = dict(tables)
        for key, (digest, name) in files.items():
            if key not in FILE_KEYS:
                raise UserError(f"files: {key} takes no file; these do: {', '.join(FILE_KEYS)}")
            path = self.path_of(digest, name)
            if not path.exists():
                raise UserError(f"files: {key}: there is no file {digest[:12]}…/{name} here: send it first")
            section, _, field = key.partition(".")
            given = changed.get(section) or {}
            function = str(given.get(field, "")).rpartition(":")[2] if name.endswith(".py") else ""
            changed[section] = {**given, field: f"{path}:{function}" if function else str(path)}
        return changed


def config_of_tables(
    tables: Mapping[str, Any],
    overrides: Sequence[str] = (),
    data_sets: Mapping[str, str] = _NONE,
    runs: Path | None = None,
) -> Config:
    """Return the configuration in tables, whose files are there. Blocks for a moment. Raises `UserError`.

    `runs`: folder of the site's runs, where an earlier job may still make a file; None: there is none.
    """
    config = with_data_sets(config_from_tables(tables, overrides), data_sets)
    require_files(config, runs)
    return checked(config)


def config_of_file(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a resumed run, in the folder. Blocks for a moment. Raises `UserError`."""
    config = load_config(path, overrides)
    check_unchanged(load_config(path), config, Path(path).parent)
    return checked(config)


def config_of_controller(
    controller: ControllerOptions,
    overrides: Sequence[str] = (),
    data_sets: Mapping[str, str] = _NONE,
    runs: Path | None = None,
) -> Config:
    """Return the configuration of a controller's own job. Raises, blocks and takes `runs` as `config_of_tables`."""
    workers = [] if controller.workers is None else [f"fabric.workers={controller.workers}"]
    config = with_data_sets(load_config(controller.config_path, [*workers, *overrides]), data_sets)
    require_files(config, runs)
    return checked(config)


def require_files(config: Config, runs: Path | None) -> None:
    """Refuse a configuration that names a file or folder which this machine does not have.

    Modules, URLs, patterns and built-in names are found by the preparation, and so is a path in `runs` (None: no
    folder), which an earlier job may make: but for files that were sent.

    Raises:
        UserError: with key, path and remedy.
    """
    named = [(key, str(getattr(getattr(config, key.split(".")[0]), key.split(".")[1]))) for key in FILE_KEYS]
    named += [(f"data.sources[{at}].source", one.source) for at, one in enumerate(config.data.sources)]
    named += [(f"rl.{key}", str(getattr(config.of(RlConfig), key))) for key in ("task", "prompts", "start", "teacher")]
    named += [(f"eval.sets.{name}", source) for name, source in config.eval.sets.items()]
    named.append(("adapter.start", config.adapter.start))
    named.append(("serve.model", config.of(ServeConfig).model))
    for key, value in named:
        place, _, function = value.rpartition(":")
        path = Path(place if place.endswith(".py") and function else value)
        if not path.is_absolute() or is_pattern(value) or path.exists():
            continue
        if runs is not None and path.is_relative_to(runs) and not path.is_relative_to(runs / FILES):
            continue
        send = "send it along (planetary jobs submit --send-files), or " if key in FILE_KEYS else ""
        raise UserError(f"{key} = {value}: this machine has no {path}; {send}put it there and submit again")


def with_data_sets(config: Config, sets: Mapping[str, str]) -> Config:
    """Return a configuration with the site's own paths of the data sets it names (site://NAME).

    Raises:
        UserError: the site has no data set of a name.
    """

    def found(source: str) -> str:
        if not source.startswith(DATA_SCHEME):
            return source
        if (name := source.removeprefix(DATA_SCHEME)) not in sets:
            raise UserError(
                f"{source}: this site has no data set {name!r}; federation.data_sets has {', '.join(sets) or 'none'}"
            )
        return sets[name]

    replace = msgspec.structs.replace
    sources = tuple(replace(one, source=found(one.source)) for one in config.data.sources)
    data = replace(config.data, source=found(config.data.source), sources=sources)
    measures = replace(config.eval, sets={name: found(source) for name, source in config.eval.sets.items()})
    rl = config.of(RlConfig)
    return replace(config, data=data, eval=measures).having(replace(rl, prompts=found(rl.prompts)))


def refuse_own_code(config: Config) -> None:
    """Raise `UserError` for an object in a user's file: a site runs the jobs of several people in one process.

    A task judges in separate processes, and is refused only if it would make the prompts, too.
    """
    named = {key: name for key, point, name in named_objects(config) if not EXTENSION_POINTS[point.kind].apart}
    if not config.of(RlConfig).prompts:
        named["rl.task, without rl.prompts"] = config.of(RlConfig).task
    named |= {f"sinks[{at}].kind": one.place for at, one in enumerate(config.sinks) if isinstance(one, OwnSink)}
    if code := next((one.source for one in config.data.parts if names_code(one.source)), ""):
        raise UserError(
            f"data.source = {code}: a site runs no code of jobs in its own process. Write the examples to .npz or "
            "parquet, or start a gateway of your own"
        )
    for key, value in named.items():
        if file_of(value) is not None:
            raise UserError(
                f"{key} = {value}: a site runs no code of jobs in its own process. Have its operator install "
                "a package with an entry point (docs/extending.md), or start a gateway of your own"
            )


def checked(config: Config) -> Config:
    """Return a configuration with the settings implied by the model; warnings are logged. Raises `UserError`.

    Not on an event loop: a compiled model is read by a separate process.
    """
    refuse_own_code(config)
    if not is_function(config.model.source):
        config = asyncio.run(shapes_apart(config, PreparationLimits()))
    else:
        config = with_model_shapes(config)
    for note in kind_of(config).check(config):
        log.warning("%s", note)
    return config
