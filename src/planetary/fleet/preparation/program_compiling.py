"""Compiling and verifying a program of several functions. `fleet.preparation.compiling` has the process for it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

from planetary.artifacts.store import BlobStore
from planetary.core.errors import TrustError, UserError
from planetary.core.step import ProgramSpec
from planetary.core.trials.deviations import ROUNDING
from planetary.core.trials.program import (
    ProgramReference,
    decode_program_reference,
    encode_program_reference,
    make_reference,
)
from planetary.fleet.preparation.compiling import CompileTarget, PublishedArtifact
from planetary.runtime.device_program import Program, open_on_xla
from planetary.runtime.host import host_features

if TYPE_CHECKING:
    from planetary.compiler.backends.targets import Target
    from planetary.compiler.check.verification_report import VerifyReport

_REFERENCE = "program reference 3 "  # prefix of a module's digest: the key of the reference for artifacts


def compile_and_verify(
    portable: bytes, spec: ProgramSpec, target: CompileTarget, cache: Path, *, compares: bool = True
) -> PublishedArtifact:
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
    if not compares:
        return PublishedArtifact(
            artifact.digest,
            len(artifact.data),
            "compiled only: every worker checks it on its own device",
            compile_s=compiled - began,
            cached=artifact.cached,
        )
    digest, reference = reference_of(store, portable, spec)
    if wanted.is_pjrt:
        summary = "XLA compiles it on the worker, which checks it there"
    elif not runs_here(wanted, Target("cpu", "host", host_features())):
        summary = "compiled only: this machine has no such device; every worker checks it on its own"
    else:
        report = read_report(store, artifact.digest)
        if report is None:
            report = compared(reference, spec, artifact.data, artifact.digest, wanted)
            write_report(store, report)
        summary = report.summary
    return PublishedArtifact(
        artifact.digest,
        len(artifact.data),
        summary,
        compile_s=compiled - began,
        verify_s=time.monotonic() - compiled,
        cached=artifact.cached,
        reference=digest,
    )


def reference_of(store: BlobStore, portable: bytes, spec: ProgramSpec) -> tuple[str, ProgramReference]:
    """Return the reference for any device's results of a program, and the digest; made by XLA the first time.

    Raises:
        CompileError: XLA refuses a function, or computes no finite numbers.
    """
    known = store.resolve(_REFERENCE + spec.stablehlo_digest)
    if known is not None:
        with contextlib.suppress(TrustError, UserError):  # damaged or removed: made again
            return known, decode_program_reference(store.get(known), spec.functions)
    reference = reference_from_xla(portable, spec)
    digest = store.put(encode_program_reference(reference))
    store.link(_REFERENCE + spec.stablehlo_digest, digest)
    return digest, reference


def reference_from_xla(portable: bytes, spec: ProgramSpec) -> ProgramReference:
    """Run every function with XLA on random arguments. Raises `CompileError` as `reference_of`."""
    from planetary.compiler.rewrites.precision import coarsest_factor

    runner = open_on_xla(Program(portable, spec.functions), optimise=False)
    return make_reference(spec, runner, factor_rounding=ROUNDING[coarsest_factor(portable)], against="XLA")


def compared(
    reference: ProgramReference, spec: ProgramSpec, module: bytes, digest: str, target: Target
) -> VerifyReport:
    """Run every function of a compiled module on this machine and return how far it is from the reference.

    Raises:
        CompileError: a result is another one.
    """
    from planetary.compiler.check.verification_report import VerifyReport
    from planetary.core.artifact_label import read_label
    from planetary.runtime.device_check import check_program
    from planetary.runtime.iree_program import IreeProgram

    began = time.monotonic()
    loaded = IreeProgram(module, Program(b"", spec.functions), backend=target.backend, blocks=read_label(module).blocks)
    found = check_program(loaded, reference, spec.functions)
    made_for = f"{target.backend} {target.name}"
    return VerifyReport(
        digest,
        digest,
        made_for,
        False,
        None,
        found.worst_tensor,
        found.worst_error,
        time.monotonic() - began,
        against=reference.against,
    )
