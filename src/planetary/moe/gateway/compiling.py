"""Compiling and verifying a mixture's program in a process of its own, as `fabric.preparation.compiling` does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core.errors import CompileError
from planetary.core.step import RATE, FunctionSpec, ProgramSpec
from planetary.core.tensors import TensorSpec
from planetary.fabric.preparation.compiling import (
    Answer,
    CompileTarget,
    Published,
    give_answer,
    published_once,
)
from planetary.fabric.shell.child import end_with_parent
from planetary.moe.program.signature import GRADIENT, Program
from planetary.runtime.host import host_features

if TYPE_CHECKING:
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.check.verification_report import VerifyReport

TOLERANCE = 0.05
"""Largest difference between a result and the reference, relative to its length. Rounding makes 10⁻⁵; a token whose
experts are nearly equally likely may go another way, which changes one row of many."""

TRIAL_RATE = 2.0**-7  # learning rate of the steps that are compared


class _Request(msgspec.Struct, frozen=True):
    target: CompileTarget
    spec: ProgramSpec
    cache: str


async def compile_mixture_apart(program: Program, vocab_size: int, target: CompileTarget, cache: Path) -> Published:
    """Compile and verify a mixture's program for a worker's target in a child process.

    Raises:
        CompileError: as `fabric.preparation.compiling.compile_apart`.
    """

    def write(folder: Path) -> None:
        spec = ProgramSpec("latent_moe", dict(program.functions), vocab_size, program.digest)
        (folder / "request.json").write_bytes(msgspec.json.encode(_Request(target, spec, str(cache))))
        (folder / "program.mlirbc").write_bytes(program.portable)

    return await published_once("planetary.moe.gateway.compiling", write, program.digest, target, cache)


def compile_and_verify(portable: bytes, spec: ProgramSpec, target: CompileTarget, cache: Path) -> Published:
    """Do the work in this process. Raises `CompileError`, `UserError` or `ResourceError`."""
    from planetary.compiler.backends.iree import compile_program
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.check.verification_report import read_report, write_report
    from planetary.compiler.check.verify import runs_here

    store = BlobStore(cache / "blobs")
    began = time.monotonic()
    wanted = Target(target.backend, target.name, target.features)
    artifact = compile_program(portable, spec, wanted, store)
    compiled = time.monotonic()
    if wanted.is_pjrt:
        summary = "XLA compiles it on the worker"
    elif not runs_here(wanted, Target("cpu", "host", host_features())):
        summary = "compiled only: this machine has no such device to run it on"
    else:
        report = read_report(store, artifact.digest)
        if report is None:
            report = compared_with_xla(portable, spec, artifact.data, artifact.digest, wanted)
            write_report(store, report)
        summary = report.summary
    return Published(
        artifact.digest,
        len(artifact.data),
        summary,
        compile_s=compiled - began,
        verify_s=time.monotonic() - compiled,
        cached=artifact.cached,
    )


def compared_with_xla(portable: bytes, spec: ProgramSpec, module: bytes, digest: str, target: Target) -> VerifyReport:
    """Run every function of an artifact on random arguments and return how far it is from XLA.

    Raises:
        CompileError: a result is another one.
    """
    from planetary.compiler.check.verification_report import VerifyReport
    from planetary.moe.program.execution import XlaRunner
    from planetary.runtime.device_program import run_once
    from planetary.runtime.iree_functions import IreeFunctions

    began = time.monotonic()
    reference = XlaRunner(Program(portable, spec.functions), optimise=False)
    suspect = IreeFunctions(module, spec.functions, backend=target.backend)
    worst = -1.0, ""
    for name, function in spec.functions.items():
        given = _arguments(function, spec.integers_below)
        expected = reference(name, given)
        results = run_once(suspect, name, given)
        for result in function.results:
            off = _difference(expected[result.name], results[result.name])
            if not off <= TOLERANCE:
                raise CompileError(
                    f"the compiled {name} computes something else than XLA: its result {result.name} is off by "
                    f"{off:.2g} of its length, {TOLERANCE:g} is allowed"
                )
            worst = max(worst, (off / TOLERANCE, f"{result.name} of {name}"))
    error, tensor = worst
    made_for = f"{target.backend} {target.name}"
    seconds = time.monotonic() - began
    return VerifyReport(digest, digest, made_for, False, None, tensor, error, seconds)


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    length = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - expected)) / max(length, 1e-12)


def _arguments(spec: FunctionSpec, vocab_size: int) -> Mapping[str, np.ndarray]:
    rng = np.random.default_rng(0)
    trained = {s.name.removeprefix(GRADIENT) for s in spec.arguments if s.name.startswith(GRADIENT)}
    state = {s.name for s in spec.results} - trained

    def made(tensor: TensorSpec) -> np.ndarray:
        if tensor == RATE:
            return np.array(TRIAL_RATE, np.float32)
        if tensor.dtype == "i32":
            return rng.integers(0, vocab_size, tensor.shape).astype(np.int32)
        if tensor.name in state:
            return tensor.zeros()  # of the optimizer: a mean of squares is never negative
        return (0.1 * rng.standard_normal(tensor.shape)).astype(np.float32)

    return {tensor.name: made(tensor) for tensor in spec.arguments}


def _serve(folder: Path) -> None:
    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=_Request)
    portable = (folder / "program.mlirbc").read_bytes()
    try:
        answer = Answer(compile_and_verify(portable, request.spec, request.target, Path(request.cache)))
    except Exception as error:  # noqa: BLE001 - whatever it is, the gateway has to hear it
        text = str(error) if type(error).__module__.startswith("planetary.") else f"{type(error).__name__}: {error}"
        answer = Answer(None, text)
    give_answer(folder, answer)


if __name__ == "__main__":
    end_with_parent(lambda: os._exit(0))
    _serve(Path(sys.argv[1]))
    os._exit(0)  # without tearing down the interpreter while a device is open: see `runtime`
