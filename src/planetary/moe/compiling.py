"""Compiling and verifying a mixture's program in a process of its own; why in one of its own: `fabric.compiling`."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from planetary.artifacts.store import BlobStore
from planetary.core.errors import CompileError
from planetary.core.step import FunctionSpec
from planetary.core.tensors import TensorSpec
from planetary.fabric.child import end_with_parent
from planetary.fabric.compiling import Answer, CompileTarget, Published, answer_of_child, check_target, give_answer
from planetary.moe.signature import GRADIENT, Program
from planetary.runtime.host import host_features

TOLERANCE = 0.05
"""Largest difference between a result and the reference, relative to its length. Rounding makes 10⁻⁵; a token whose
experts are nearly equally likely may go another way, which changes one row of many."""


class _Request(msgspec.Struct, frozen=True):
    target: CompileTarget
    functions: dict[str, FunctionSpec]
    vocab_size: int
    cache: str


async def compile_mixture_apart(program: Program, vocab_size: int, target: CompileTarget, cache: Path) -> Published:
    """Compile and verify a mixture's program for a worker's target in a child process.

    Raises:
        CompileError: as `fabric.compiling.compile_apart`.
    """
    check_target(target)
    with tempfile.TemporaryDirectory(prefix="planetary-compile-") as name:
        folder = Path(name)
        request = _Request(target, dict(program.functions), vocab_size, str(cache))
        (folder / "request.json").write_bytes(msgspec.json.encode(request))
        await asyncio.to_thread((folder / "program.mlirbc").write_bytes, program.portable)
        return await answer_of_child("planetary.moe.compiling", folder)


def compile_and_verify(program: Program, vocab_size: int, target: CompileTarget, cache: Path) -> Published:
    """Do the work in this process. Raises `CompileError`, `UserError` or `ResourceError`."""
    from planetary.compiler.iree import compile_program
    from planetary.compiler.targets import Target
    from planetary.compiler.verify import runs_here

    store = BlobStore(cache / "blobs")
    began = time.monotonic()
    wanted = Target(target.backend, target.name, target.features)
    artifact = compile_program(program.portable, wanted, store)
    compiled = time.monotonic()
    verdict = f"verified {artifact.digest}"
    if wanted.is_pjrt:
        summary = "XLA compiles it on the worker"
    elif not runs_here(wanted, Target("cpu", "host", host_features())):
        summary = "compiled only: this machine has no such device to run it on"
    elif (known := store.resolve(verdict)) is not None:
        summary = store.get(known).decode()
    else:
        summary = _compare(program, vocab_size, artifact.data, target.backend)
        store.link(verdict, store.put(summary.encode()))
    return Published(
        artifact.digest,
        len(artifact.data),
        summary,
        compile_s=compiled - began,
        verify_s=time.monotonic() - compiled,
        cached=artifact.cached,
    )


def _compare(program: Program, vocab_size: int, module: bytes, backend: str) -> str:
    """Run every function on random arguments and compare with XLA. Raises `CompileError` where they differ."""
    from planetary.moe.execution import XlaRunner
    from planetary.runtime.iree_functions import IreeFunctions

    reference = XlaRunner(program, optimise=False)
    suspect = IreeFunctions(module, backend=backend)
    worst = 0.0
    for name, spec in program.functions.items():
        given = _arguments(spec, vocab_size)
        expected = reference(name, given)
        arrays = [given[s.name] for s in spec.arguments]
        for result, found in zip(spec.results, suspect.call(name, spec.arguments, arrays, spec.results), strict=True):
            off = _difference(expected[result.name], found)
            if not off <= TOLERANCE:
                raise CompileError(
                    f"the compiled {name} computes something else than XLA: its result {result.name} is off by "
                    f"{off:.2g} of its length, {TOLERANCE:g} is allowed"
                )
            worst = max(worst, off)
    return f"{len(program.functions)} functions within {worst:.1g} of XLA"


def _difference(expected: np.ndarray, found: np.ndarray) -> float:
    length = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(found.astype(np.float64) - expected)) / max(length, 1e-12)


def _arguments(spec: FunctionSpec, vocab_size: int) -> Mapping[str, np.ndarray]:
    rng = np.random.default_rng(0)
    trained = {s.name.removeprefix(GRADIENT) for s in spec.arguments if s.name.startswith(GRADIENT)}
    state = {s.name for s in spec.results} - trained

    def made(tensor: TensorSpec) -> np.ndarray:
        if tensor.name == "step":
            return np.array(0, np.int32)
        if tensor.dtype == "i32":
            return rng.integers(0, vocab_size, tensor.shape).astype(np.int32)
        if tensor.name in state:
            return tensor.zeros()  # of the optimizer: a mean of squares is never negative
        return (0.1 * rng.standard_normal(tensor.shape)).astype(np.float32)

    return {tensor.name: made(tensor) for tensor in spec.arguments}


def _serve(folder: Path) -> None:
    request = msgspec.json.decode((folder / "request.json").read_bytes(), type=_Request)
    program = Program((folder / "program.mlirbc").read_bytes(), request.functions)
    try:
        answer = Answer(compile_and_verify(program, request.vocab_size, request.target, Path(request.cache)))
    except Exception as error:  # noqa: BLE001 - whatever it is, the gateway has to hear it
        text = str(error) if type(error).__module__.startswith("planetary.") else f"{type(error).__name__}: {error}"
        answer = Answer(None, text)
    give_answer(folder, answer)


if __name__ == "__main__":
    end_with_parent(lambda: os._exit(0))
    _serve(Path(sys.argv[1]))
    os._exit(0)  # without tearing down the interpreter while a device is open: see `runtime`
