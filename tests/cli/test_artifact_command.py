"""`planetary artifact`: list, show, verify, gc."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planetary.artifacts.store import BlobStore
from planetary.cli.main import main
from planetary.compiler.backends.artifact_manifest import ArtifactManifest, read_manifest, write_manifest

MODEL = ["nanochat", "--preset", "tiny"]


def said(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.compiles
def test_an_artifact_is_listed_shown_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, cache = tmp_path / "step.vmfb", f"--cache={tmp_path / 'cache'}"
    assert main(["compile", *MODEL, cache, "-o", str(output), "--json"]) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]

    assert main(["artifact", "show", cache]) == 0
    listed = capsys.readouterr().out
    assert digest[:12] in listed
    assert "cpu:host" in listed
    assert "1 artifact in" in listed
    assert main(["artifact", "show", digest[:8], cache, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["manifest"]["artifact"] == digest
    assert found["verified"]["worst_error"] <= 1
    assert main(["artifact", "show", str(output), cache]) == 0
    shown = capsys.readouterr().out
    assert "param  f32[32, 16] embedding" in shown
    assert "agrees with XLA" in shown

    assert main(["artifact", "verify", str(output), cache]) == 0
    checked = capsys.readouterr().out
    assert "bytes, label and manifest agree" in checked
    assert "a step on random numbers: the artifact (cpu host) agrees with XLA" in checked

    wrong = bytearray(output.read_bytes())
    wrong[len(wrong) // 2] ^= 1
    output.write_bytes(wrong)
    assert main(["artifact", "verify", str(output), cache]) == 2
    assert "nothing says what it should compute" in said(capsys.readouterr().err)

    store = BlobStore(tmp_path / "cache" / "blobs")
    manifest = read_manifest(store, digest)
    assert isinstance(manifest, ArtifactManifest)
    other = {"backend": "cuda"}
    write_manifest(store, ArtifactManifest(**{f: getattr(manifest, f) for f in manifest.__struct_fields__} | other))
    assert main(["artifact", "verify", digest[:8], cache]) == 4
    assert "backend is 'cpu', expected 'cuda'" in said(capsys.readouterr().err)
    store.path(digest).write_bytes(wrong)
    assert main(["artifact", "verify", digest[:8], cache]) == 4
    assert "is damaged" in said(capsys.readouterr().err)


def test_an_empty_cache_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["artifact", "show", f"--cache={tmp_path}"]) == 0
    assert "0 artifacts in" in capsys.readouterr().out
    assert main(["artifact", "gc", f"--cache={tmp_path}"]) == 0
    assert "0 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "nothing.vmfb"], "there is no file 'nothing.vmfb', and it is no digest"),
        (["show", "abcd"], "'abcd' names 0 artifacts"),
        (["gc", "--unused-for", "soon"], "--unused-for expects a duration"),
        (["clean"], "invalid choice: 'clean'"),
    ],
)
def test_what_is_not_there_is_named(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = [] if arguments == ["clean"] else [f"--cache={tmp_path}"]
    assert main(["artifact", *arguments, *cache]) == 2
    assert says in said(capsys.readouterr().err)
