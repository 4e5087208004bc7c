"""Training steps and other modules prepared before, so a model is exported and differentiated once.

A record names, by digest, everything that preparing made: the portable StableHLO, the initial parameters and the
buffers. It counts for a new run while nothing that decided it has changed: the configuration's part, the installed
packages, and the files the model's function was loaded from or read. A run keeps the record in the run folder, and is
resumed with it whatever became of the model's files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core import decoding
from planetary.core.configuration.schema import Config, is_function
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import TrustError, UserError
from planetary.core.index_limits import IndexLimit
from planetary.core.meaning import Meaning
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec, digest_of, host_dtype
from planetary.core.user_code import file_of_module
from planetary.fleet.preparation.environment import PACKAGE, environment, is_installed
from planetary.wire.limits import GIB, MAX_PAYLOAD_BYTES

FORMAT = 1  # raise when the same record would mean something else
DECIDING = (
    *(f"compiler/{part}" for part in ("ir", "ops", "frontend", "rewrites", "autodiff", "step")),
    *(f"runs/mixture/{part}" for part in ("methods", "program", "training")),
    "models",
    "core",
)
"""Parts of this package that decide a step; their files count where it is not installed from a wheel."""


class ModelFile(msgspec.Struct, frozen=True):
    """A file a model was made from."""

    sha256: str
    nbytes: int
    modified_ns: int


class PreparedRecord(msgspec.Struct, frozen=True):
    """The sources of a module; each kind of run adds the products.

    Attributes:
        made_from: the keys of the configuration that decide it, as JSON.
        environment: digest of the versions of Python and of the installed packages.
        sources: files of the model by absolute path.
    """

    made_from: str
    environment: str
    sources: dict[str, ModelFile]

    @property
    def module(self) -> str:
        """Digest of the portable StableHLO."""
        raise NotImplementedError

    @property
    def blobs(self) -> tuple[str, ...]:
        """Digests of all that was made."""
        return (self.module,)

    def is_complete(self, store: BlobStore) -> bool:
        """Whether the store has all blobs of the record, undamaged; a damaged one is removed."""
        try:
            for digest in self.blobs:
                store.verified_path(digest)
        except (TrustError, UserError):
            return False
        return True

    def changed_sources(self) -> list[str]:
        """Return the files that are gone, or have other bytes than when the module was made."""
        return [path for path, known in self.sources.items() if not _is_same(Path(path), known)]


RecordT = TypeVar("RecordT", bound=PreparedRecord)


class StepRecord(PreparedRecord, frozen=True):
    """The sources of a training step, and the products.

    Attributes:
        spec: signature of the step; the store has the module under `spec.stablehlo_digest`.
        params: digest of the packed initial parameters.
        buffers: digest of the packed buffers; "" without any.
        frozen: digest of each buffer by name.
        notes: of the step.
        meaning: comparison of the model with the author's framework.
        limits: legal values of the batch's integers, by argument.
    """

    spec: StepSpec
    params: str
    buffers: str
    notes: tuple[str, ...] = ()
    meaning: Meaning | None = None
    frozen: dict[str, str] = {}
    limits: dict[str, tuple[IndexLimit, ...]] = {}

    @property
    def module(self) -> str:
        return self.spec.stablehlo_digest

    @property
    def blobs(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.module, self.params, self.buffers)))


class UntrainedTensors(msgspec.Struct, frozen=True):
    """The part of a run's record about tensors that are not trained: digest by name."""

    frozen: dict[str, str] = {}


class StoredArrays(Mapping[str, np.ndarray]):
    """Named arrays of a packed blob, read when the first one is asked for."""

    def __init__(self, store: BlobStore, digest: str, specs: Iterable[TensorSpec]) -> None:
        self._store, self._digest, self._specs = store, digest, {spec.name: spec for spec in specs}
        self._arrays: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array, read-only."""
        if not self._arrays and self._specs:
            blob, offset = self._store.get(self._digest), 0
            for spec in self._specs.values():
                self._arrays[spec.name] = np.frombuffer(blob, host_dtype(spec.dtype), spec.size, offset).reshape(
                    spec.shape
                )
                offset += spec.nbytes
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._specs)

    def __len__(self) -> int:
        """Return the number of arrays."""
        return len(self._specs)


def check_untrained(model: str, specs: Sequence[TensorSpec]) -> None:
    """Raise `UserError` where the tensors that are not trained are more than a worker takes as one blob."""
    nbytes = sum(spec.nbytes for spec in specs)
    if nbytes > MAX_PAYLOAD_BYTES:
        raise UserError(
            f"the tensors of {model} that are not trained take {nbytes / GIB:.1f} GiB, and a worker gets them as one "
            f"blob of at most {MAX_PAYLOAD_BYTES / GIB:g} GiB: take a smaller model, or one whose function makes its "
            "parameters bfloat16"
        )


def first_change(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the name of the first tensor with another digest; "" if there is none."""
    return next((name for name, digest in before.items() if now.get(name, digest) != digest), "")


def packed(specs: Iterable[TensorSpec], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return the raw bytes of arrays, in the order of `specs`."""
    return b"".join(np.ascontiguousarray(arrays[spec.name]).tobytes() for spec in specs)


def made_from(config: Config, options: StepOptions) -> str:
    """Return the keys of a configuration that decide the training step, as JSON; lengths and rates do not."""
    model, train = config.model, config.train
    made = msgspec.to_builtins(model) | {"source": _resolved(model.source), "weights": _absolute(model.weights)}
    del made["smaller"]  # another model
    parts = {
        "model": made,
        "adapter": msgspec.to_builtins(config.adapter) | {"start": _absolute(config.adapter.start)},
        "options": msgspec.to_builtins(options),
        "loss": ["dpo", config.data.dpo_beta] if config.data.has_pairs else "",
        "batch_size": train.batch_size,
        "sequence_length": train.sequence_length,
        "seed": config.run.seed,
    }
    return json.dumps(parts, sort_keys=True, default=str)


def usable_record(store: BlobStore, parts: str, kind: type[RecordT], own: RecordT | None = None) -> RecordT | None:
    """Return the record of a module that would be made the same way now; None if it has to be made.

    Args:
        store: with the products.
        parts: the keys of the configuration that decide it, as JSON.
        kind: of the record.
        own: of the run that goes on, which counts whatever became of files and packages.
    """
    if own is not None and own.made_from == parts and own.is_complete(store):
        return own
    digest = store.resolve(_key(parts))
    if digest is None:
        return None
    try:
        record = decoding.from_json(store.get(digest), kind)
    except (TrustError, UserError, msgspec.MsgspecError):
        return None  # damaged is as good as absent
    same = record.environment == environment() and not record.changed_sources()
    return record if same and record.is_complete(store) else None


def find_record(
    store: BlobStore, config: Config, options: StepOptions, own: StepRecord | None = None
) -> StepRecord | None:
    """Return the record of a configuration's step, as `usable_record` does."""
    return usable_record(store, made_from(config, options), StepRecord, own)


def keep(store: BlobStore, record: PreparedRecord) -> None:
    """Keep a record whose blobs are in the store: a process that dies in between leaves no record."""
    store.link(_key(record.made_from), put_whole(store, msgspec.json.encode(record)))


def sources_of(config: Config, read: Iterable[Path]) -> dict[str, ModelFile]:
    """Return the files behind the product of this process; `read`: files read for it."""
    files = {path for path in read if not path.is_relative_to(PACKAGE)}
    files |= {*_loaded_files(), *_named_files(config), *_own_files()}
    return {str(path): _stamp(path) for path in sorted(files) if path.is_file()}


def keep_record(
    store: BlobStore,
    config: Config,
    options: StepOptions,
    *,
    portable: bytes,
    spec: StepSpec,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    notes: tuple[str, ...],
    meaning: Meaning | None,
    limits: dict[str, tuple[IndexLimit, ...]],
    read: Iterable[Path],
) -> StepRecord:
    """Keep a step that was just made; `read`: files read for it."""
    blob = packed(spec.buffers, buffers)
    put_whole(store, portable)
    record = StepRecord(
        made_from=made_from(config, options),
        environment=environment(),
        sources=sources_of(config, read),
        spec=spec,
        params=put_whole(store, packed(spec.params, params)),
        buffers=put_whole(store, blob) if blob else "",
        notes=notes,
        meaning=meaning,
        limits=limits,
        frozen={name: digest_of(array) for name, array in buffers.items()},
    )
    keep(store, record)
    return record


@contextlib.contextmanager
def files_read() -> Iterator[set[Path]]:
    """Collect the files that this thread opens for reading through Python, but for those of installed packages.

    A model's function may read tables or settings: a step made from them is another one when they change.
    """
    _install_hook()
    found: set[Path] = set()
    _Reading.sink[threading.get_ident()] = found
    try:
        yield found
    finally:
        del _Reading.sink[threading.get_ident()]


class _Reading:
    """Who collects opened files, by thread; an audit hook cannot be taken away again."""

    sink: dict[int, set[Path]] = {}  # noqa: RUF012
    installed = False


def _install_hook() -> None:
    if not _Reading.installed:
        _Reading.installed = True
        sys.addaudithook(_observe)


def _observe(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _Reading.sink:
        return
    sink = _Reading.sink.get(threading.get_ident())
    if sink is None or not isinstance(arguments[0], str | bytes):
        return
    mode, flags = arguments[1], arguments[2]
    writes = any(c in mode for c in "wax+") if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))
    path = Path(os.path.abspath(os.fsdecode(arguments[0])))
    if not writes and not is_installed(path) and path.suffix != ".pyc":
        sink.add(path)


def _loaded_files() -> set[Path]:
    """The files of all modules of this process that belong to no installed package, nor to this one."""
    found = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).absolute()
        if not is_installed(path) and not path.is_relative_to(PACKAGE):
            found.add(path)
    return found


def _own_files() -> set[Path]:
    """The deciding files of this package, all of them: which of them a process has loaded depends on history."""
    return {path for part in DECIDING for path in (PACKAGE / part).rglob("*.py") if not is_installed(path)}


def _named_files(config: Config) -> set[Path]:
    source = _resolved(config.model.source).rpartition(":")[0] if is_function(config.model.source) else ""
    path = Path(source) if source else Path(config.model.source).absolute()
    found = {path} if path.is_file() else set(path.rglob("*")) if path.is_dir() else set()
    return {one for one in found if one.is_file()} | ({Path(config.model.weights).absolute()} - {Path().absolute()})


def _resolved(source: str) -> str:
    """Return a model's source with the file it names: another folder's `model.py` is another model."""
    if not is_function(source):
        return _absolute(source)
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        return f"{Path(place).absolute()}:{name}"
    if (origin := file_of_module(place)) is not None:
        return f"{origin}:{name}"
    return source


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path and "://" not in path else path


def put_whole(store: BlobStore, data: bytes) -> str:
    """Store a blob and return the digest; a damaged blob of the same name is replaced."""
    digest = store.put(data)
    try:
        store.verified_path(digest)
    except TrustError:  # which removed it
        store.put(data)
    return digest


def _key(parts: str) -> str:
    return f"prepared step {FORMAT} {parts}"


def _stamp(path: Path) -> ModelFile:
    status = path.stat()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return ModelFile(digest, status.st_size, status.st_mtime_ns)


def _is_same(path: Path, known: ModelFile) -> bool:
    try:
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) == (known.nbytes, known.modified_ns):
            return True
        return status.st_size == known.nbytes and _stamp(path).sha256 == known.sha256
    except OSError:
        return False
