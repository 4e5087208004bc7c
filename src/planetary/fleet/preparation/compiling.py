"""Compiling and verifying a training step, or a program of several functions, in a separate process.

A compiler, a reference execution and a freshly compiled module all run native code that may crash, hang or hold the
interpreter for seconds. None of that may happen to the run's process: here it ends as an error with the cause.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.pipeline import LATEST_CHOICE, PIPELINE_VERSION, compiler_version
from planetary.core import decoding
from planetary.core.errors import CompileError, TrustError, UserError
from planetary.core.exit_status import describe_exit
from planetary.core.step import ProgramSpec, StepSpec
from planetary.fleet.preparation.environment import environment
from planetary.fleet.shell.child import Child
from planetary.runtime.host import architecture, host_features

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from planetary.compiler.step.step_module import TrainStep
    from planetary.runtime.device_program import Program

log = logging.getLogger(__name__)

_CHILD = "planetary.fleet.preparation.compile_process"

TIME_LIMIT_S = 3600.0
REQUEST, MODULE, _ANSWER = "request.json", "module.mlirbc", "answer.json"
_LOOK_EVERY_S = 0.5  # seconds between two checks for a refusal, while the child goes on


class CompileTarget(msgspec.Struct, frozen=True):
    """The target a worker names: `features` identifies the CPU, "" for a GPU."""

    backend: str
    name: str
    features: str


class PublishedArtifact(msgspec.Struct, frozen=True):
    """A compiled and verified training step or program in the store."""

    digest: str
    nbytes: int
    verified: str  # the two sides of the comparison, in words
    compile_s: float = 0.0
    verify_s: float = 0.0
    cached: bool = False  # the artifact was in the cache
    reference: str = ""  # digest of the reference for the results of workers' devices


class StepRequest(msgspec.Struct, frozen=True, tag="step"):
    """A training step to compile; the folder has its module, and the values the check starts from."""

    target: CompileTarget
    spec: StepSpec
    cache: str
    notes: tuple[str, ...] = ()  # notes on the step


class ProgramRequest(msgspec.Struct, frozen=True, tag="program"):
    """A program to compile; the folder has its module."""

    target: CompileTarget
    spec: ProgramSpec
    cache: str
    compares: bool = True  # on random numbers, with XLA; otherwise workers compare it with something of their own


class CompileAnswer(msgspec.Struct, frozen=True):
    """Result of the child process: the artifact, or why there is none."""

    published: PublishedArtifact | None
    error: str = ""
    searching: bool = False  # it is refused, and the operation that is wrong is looked for, which takes minutes


class StepToCompile(Protocol):
    """A training step with the values its check starts from."""

    @property
    def step(self) -> TrainStep:
        """The training step in StableHLO."""
        ...

    @property
    def params(self) -> Mapping[str, np.ndarray]:
        """Initial parameters by name, host arrays."""
        ...

    @property
    def buffer_values(self) -> Mapping[str, np.ndarray]:
        """The model's constant inputs by name, host arrays."""
        ...


@dataclass(frozen=True)
class ModelToCompile:
    """A `StepToCompile` of a model no run has prepared.

    Attributes:
        step: the training step in StableHLO.
        params: initial parameters by name, host arrays.
        buffer_values: the model's constant inputs by name, host arrays.
    """

    step: TrainStep
    params: Mapping[str, np.ndarray]
    buffer_values: Mapping[str, np.ndarray]


async def compile_apart(prepared: StepToCompile, target: CompileTarget, cache: Path) -> PublishedArtifact:
    """Compile and verify for a worker's target in a child process.

    Raises:
        CompileError: it cannot be compiled, computes something else than the reference, crashes, takes longer than
            `TIME_LIMIT_S`, or the worker's "host" is another CPU than this machine's.
    """
    spec = prepared.step.spec

    def write(folder: Path) -> None:
        np.savez(folder / "params.npz", *(prepared.params[p.name] for p in spec.params))
        np.savez(folder / "buffers.npz", *(prepared.buffer_values[b.name] for b in spec.buffers))

    request = StepRequest(target, spec, str(cache), prepared.step.notes)
    return await _published_once(request, prepared.step.portable, write)


async def compile_program_apart(
    program: Program, model: str, integers_below: int, target: CompileTarget, cache: Path, *, compares: bool = True
) -> PublishedArtifact:
    """Compile and verify a program for a worker's target in a child process. Raises as `compile_apart`.

    Args:
        program: to compile.
        model: a name for people.
        integers_below: bounds of integer arguments, for checks on random numbers.
        target: to compile for.
        cache: where artifacts and references are kept.
        compares: with XLA, on random numbers; False: workers compare it with something of their own.
    """
    spec = ProgramSpec(model, dict(program.functions), integers_below, program.digest, program.weights)
    return await _published_once(ProgramRequest(target, spec, str(cache), compares), program.portable)


async def _published_once(
    request: StepRequest | ProgramRequest, portable: bytes, write: Callable[[Path], None] = lambda folder: None
) -> PublishedArtifact:
    """Return the artifact published for a module of StableHLO and a target, or have a child process make it.

    Args:
        request: of the child.
        portable: the module.
        write: puts the rest of the request into the child's folder.

    Raises:
        CompileError: as `compile_apart`.
    """
    target, cache = request.target, Path(request.cache)
    check_target(target)
    store = BlobStore(cache / "blobs")
    compares = isinstance(request, StepRequest) or request.compares
    key = published_key(store, request.spec.stablehlo_digest, target, compares=compares)
    known = await asyncio.to_thread(known_artifact, store, key)
    if known is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="planetary-compile-") as name:
        folder = Path(name)
        await asyncio.to_thread((folder / REQUEST).write_bytes, msgspec.json.encode(request))
        await asyncio.to_thread((folder / MODULE).write_bytes, portable)
        await asyncio.to_thread(write, folder)
        published = await answer_of_child(_CHILD, folder)
    if store.has(published.digest):
        keep_artifact(store, key, published)
    return published


def published_key(store: BlobStore, stablehlo: str, target: CompileTarget, *, compares: bool) -> str:
    """Return the key of the artifact published for a module and target.

    Nothing that decides an artifact may be missing: beside the module and the target the compilers, and the flags
    chosen by `planetary tune`, by the newest choice.
    """
    parts = {
        "stablehlo": stablehlo,
        "target": msgspec.to_builtins(target),
        "iree": compiler_version(),
        "pipeline": PIPELINE_VERSION,
        "packages": environment(),
        "flags": store.resolve(LATEST_CHOICE),
        "compares": compares,
    }
    return "published 5 " + json.dumps(parts, sort_keys=True)


def keep_artifact(store: BlobStore, key: str, published: PublishedArtifact) -> None:
    """Keep an artifact for `known_artifact`."""
    store.link(key, store.put(msgspec.json.encode(published)))


def known_artifact(store: BlobStore, key: str) -> PublishedArtifact | None:
    """Return the artifact kept under a `published_key`; None: there is none, or it is damaged."""
    digest = store.resolve(key)
    if digest is None:
        return None
    try:
        found = decoding.from_json(store.get(digest), PublishedArtifact)
        for blob in filter(None, (found.digest, found.reference)):
            store.verified_path(blob)
    except (TrustError, UserError, msgspec.MsgspecError):
        return None  # removed or damaged: made again
    return msgspec.structs.replace(found, cached=True)


def check_target(target: CompileTarget) -> None:
    """Raise `CompileError` for a "host" that is not this machine."""
    if target.backend == "cpu" and target.name == "host" and target.features != host_features():
        raise CompileError(
            f"the worker's CPU ({target.features}) is not the gateway's ({host_features()}), so the step cannot be "
            f"tuned for it here: start that node with --target baseline (or x86-64-v3 on {architecture()})"
        )


async def answer_of_child(module: str, folder: Path) -> PublishedArtifact:
    """Run a module of this package as a process on a folder with a request; it calls `give_answer`.

    Raises:
        CompileError: as `compile_apart`.
    """
    command = [sys.executable, "-m", module, str(folder)]
    child = await Child.start(command, log=folder / "output.txt", environment={"TF_CPP_MIN_LOG_LEVEL": "1"})
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            code = await _wait_and_tell(child, folder / _ANSWER)
    except TimeoutError:
        if not (folder / _ANSWER).is_file():  # else it was refused, and the search for the cause took long
            raise CompileError(f"compiling and verifying did not end within {TIME_LIMIT_S:.0f} s") from None
        code = -signal.SIGKILL
    finally:
        child.kill_group()
    try:
        answer = decoding.from_json((folder / _ANSWER).read_bytes(), CompileAnswer)
    except FileNotFoundError:
        output = (folder / "output.txt").read_text(errors="replace").strip().splitlines()
        raise CompileError(
            f"the process that compiles and verifies the training step {describe_exit(code)}; its last words: "
            f"{output[-1] if output else 'none'}"
        ) from None
    if answer.published is None:
        ended = " The search for the operation that is wrong did not end." if answer.searching else ""
        raise CompileError(answer.error + ended)
    return answer.published


async def _wait_and_tell(child: Child, answer: Path) -> int:
    """Wait for a child's end; log a refusal at once, while the child searches for the cause."""
    waiting = asyncio.ensure_future(child.wait())
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=_LOOK_EVERY_S)
            if answer.is_file():
                found = decoding.from_json(answer.read_bytes(), CompileAnswer)
                if found.searching:
                    log.warning("%s Searching for the operation that is wrong, for at most 5 minutes", found.error)
                break
        return await waiting
    finally:
        waiting.cancel()


def answer_with(folder: Path, made: Callable[[], PublishedArtifact]) -> None:
    """Leave what a child process makes, or the reason why it cannot be made, for the gateway."""
    try:
        answer = CompileAnswer(made())
    except Exception as error:  # noqa: BLE001 - the gateway gets every reason
        text = str(error) if type(error).__module__.startswith("planetary.") else f"{type(error).__name__}: {error}"
        answer = CompileAnswer(None, text)
    give_answer(folder, answer)


def give_answer(folder: Path, answer: CompileAnswer) -> None:
    """Leave the answer in one piece; a later one replaces it."""
    (folder / "answer.new").write_bytes(msgspec.json.encode(answer))
    (folder / "answer.new").rename(folder / _ANSWER)
