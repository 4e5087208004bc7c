"""The process for compilation and verification on behalf of `compiling`: the only one with the compiler."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core import decoding
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec
from planetary.fleet.preparation import program_compiling
from planetary.fleet.preparation.compiling import (
    MODULE,
    REQUEST,
    CompileAnswer,
    CompileTarget,
    ProgramRequest,
    PublishedArtifact,
    StepRequest,
    answer_with,
    give_answer,
)
from planetary.fleet.shell.child import end_group, end_with_parent
from planetary.runtime.host import host_features

if TYPE_CHECKING:
    from planetary.compiler.backends.iree import Artifact
    from planetary.compiler.check.verify import ReferenceRun
    from planetary.runtime.executor import Executor


def compile_and_verify(
    portable: bytes,
    spec: StepSpec,
    target: CompileTarget,
    *,
    params: Mapping[str, np.ndarray],
    buffers: Mapping[str, np.ndarray],
    cache: Path,
    notes: tuple[str, ...] = (),
    on_refusal: Callable[[str], None] = lambda text: None,
) -> PublishedArtifact:
    """Do the work in this process; `notes` are the step's, `on_refusal` as in `verify_artifact`.

    Raises `CompileError`, `UserError` or `ResourceError`.
    """
    from planetary.compiler.backends.iree import compile_artifact
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.check.verify import reference_digest, run_for_check, verify_artifact
    from planetary.compiler.step.step_module import TrainStep
    from planetary.runtime.executor import open_executor

    step = TrainStep("", spec, portable, notes=notes)
    store = BlobStore(cache / "blobs")
    began = time.monotonic()
    begun: Future[ReferenceRun] | None = None
    if reference_digest(store, spec) is None:  # XLA compiles and runs the step while IREE compiles it
        begun = ThreadPoolExecutor(1).submit(run_for_check, step, params, buffers)
    artifact = compile_artifact(step, Target(target.backend, target.name, target.features), store)
    compiled = time.monotonic()

    def open_runner(artifact: Artifact, spec: StepSpec) -> Executor:
        return open_executor(store.verified_path(store.put(artifact.data)), spec, backend=artifact.target.backend)

    report = verify_artifact(
        step,
        artifact,
        open_runner,
        params=params,
        buffers=buffers,
        local=Target("cpu", "host", host_features()),
        cache=store,
        on_refusal=on_refusal,
        begun=begun,
    )
    return PublishedArtifact(
        artifact.digest,
        len(artifact.data),
        report.summary,
        compile_s=compiled - began,
        verify_s=time.monotonic() - compiled,
        cached=artifact.cached,
        reference=reference_digest(store, spec) or "",
    )


def _load(path: Path, specs: tuple[TensorSpec, ...]) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {spec.name: file[f"arr_{i}"] for i, spec in enumerate(specs)}


def _published(request: StepRequest | ProgramRequest, folder: Path) -> PublishedArtifact:
    portable, cache = (folder / MODULE).read_bytes(), Path(request.cache)
    if isinstance(request, ProgramRequest):
        return program_compiling.compile_and_verify(
            portable, request.spec, request.target, cache, compares=request.compares
        )
    return compile_and_verify(
        portable,
        request.spec,
        request.target,
        params=_load(folder / "params.npz", request.spec.params),
        buffers=_load(folder / "buffers.npz", request.spec.buffers),
        cache=cache,
        notes=request.notes,
        on_refusal=lambda text: give_answer(folder, CompileAnswer(None, text, searching=True)),
    )


def _serve(folder: Path) -> None:
    request = decoding.from_json((folder / REQUEST).read_bytes(), StepRequest | ProgramRequest)
    answer_with(folder, lambda: _published(request, folder))


if __name__ == "__main__":
    end_with_parent(end_group)
    _serve(Path(sys.argv[1]))
    os._exit(0)  # without tearing down the interpreter while a device is open: see `runtime`
