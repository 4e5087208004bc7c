"""A mixture's compiled program: kept with a manifest and checked like a train step, by its digest."""

from __future__ import annotations

from pathlib import Path

import pytest
from moe_support import TINY, worker

from planetary.artifacts.store import BlobStore
from planetary.cli.main import main
from planetary.compiler.backends.artifact_manifest import read_manifest
from planetary.compiler.check.verification_report import read_report
from planetary.core.artifact_label import read_label
from planetary.core.step import ProgramSpec
from planetary.core.trials.program import decode_program_reference
from planetary.fleet.preparation.compiling import CompileTarget
from planetary.fleet.preparation.program_compiling import compile_and_verify
from planetary.runtime.device_check import check_program
from planetary.runtime.device_program import Program, open_program
from planetary.runtime.host import host_features


def said(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.compiles
def test_program_has_a_manifest_checked_by_its_digest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, cache = worker().program, f"--cache={tmp_path}"
    spec = ProgramSpec("latent_moe", dict(program.functions), TINY.vocab_size, program.digest)
    target = CompileTarget("cpu", "host", host_features())
    first = compile_and_verify(program.portable, spec, target, tmp_path)
    store = BlobStore(tmp_path / "blobs")
    manifest, report = read_manifest(store, first.digest), read_report(store, first.digest)
    assert manifest is not None
    assert report is not None
    assert (manifest.artifact, manifest.program, manifest.spec) == (first.digest, spec, None)
    label = read_label(store.get(first.digest))
    assert (label.stablehlo, label.target) == (program.digest, manifest.target)
    assert store.get(program.digest) == program.portable
    assert report.worst_error <= 1
    again = compile_and_verify(program.portable, spec, target, tmp_path)
    assert (again.digest, again.cached, again.reference) == (first.digest, True, first.reference)
    reference = decode_program_reference(store.get(first.reference), spec.functions)
    loaded = open_program(store.get(first.digest), Program(b"", spec.functions), backend="cpu")
    found = check_program(loaded, reference, spec.functions)  # as a worker does that has fetched both
    assert found.worst_error == pytest.approx(report.worst_error, rel=0.5)
    assert found.device == loaded.device_name

    assert main(["artifact", "show", cache]) == 0
    assert first.digest[:12] in capsys.readouterr().out
    assert main(["artifact", "show", first.digest, cache]) == 0
    shown = said(capsys.readouterr().out)
    assert "latent_moe: 3 functions that are called one by one" in shown
    assert "agrees with XLA" in shown
    assert main(["artifact", "verify", first.digest, cache]) == 0
    checked = capsys.readouterr().out
    assert "bytes, label and manifest agree" in checked
    assert "all functions on random numbers: the artifact (cpu host) agrees with XLA" in checked

    wrong = bytearray(store.get(first.digest))
    wrong[len(wrong) // 2] ^= 1
    store.path(first.digest).write_bytes(wrong)
    rebuilt = compile_and_verify(program.portable, spec, target, tmp_path)  # not what lies there
    assert not rebuilt.cached
    assert read_manifest(store, rebuilt.digest) is not None
