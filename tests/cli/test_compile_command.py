"""`planetary compile`: what it prints, writes and refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from planetary.cli.main import main
from planetary.compiler.backends.targets import Target, parse_target
from planetary.core.artifact_label import read_label
from planetary.core.errors import UserError

MODEL = """
import jax.numpy as jnp
import numpy as np

def build(width=3, rounded=False):
    def loss(params, x, y):
        shown = x @ params["w"]
        return jnp.mean(((jnp.round(shown) if rounded else shown) - y) ** 2)
    batch = np.zeros((2, width), np.float32), np.zeros((2, 1), np.float32)
    return loss, {"w": np.ones((width, 1), np.float32)}, batch
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "line.py").write_text(MODEL)
    return f"{tmp_path / 'line.py'}:build"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_explain_lists_each_operation_once(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", source, "--set", "rounded=true", "--explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {line.split()[1]: line.split()[0] for line in lines[:-1]}
    assert len(found) == len(lines) - 1
    assert found["stablehlo.dot_general"] == "rule"
    assert found["stablehlo.round_nearest_even"] == "inactive"
    assert lines[-1] == "every operation has a rule or needs none"
    assert main(["compile", source, "--explain", "--json"]) == 0
    uses = json.loads(capsys.readouterr().out)
    assert {use["name"] for use in uses} >= {"stablehlo.dot_general", "stablehlo.subtract"}


def test_explain_names_what_stops_a_gradient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "random.mlir").write_text(
        "func.func @main(%w: tensor<f32>, %x: tensor<f32>, %y: tensor<f32>) -> tensor<f32> {\n"
        "  %0 = stablehlo.custom_call @mystery(%w) : (tensor<f32>) -> tensor<f32>\n  return %0 : tensor<f32>\n}\n"
    )
    assert main(["compile", str(tmp_path / "random.mlir"), "--explain"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "a gradient that has to pass through stablehlo.custom_call @mystery is an error"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nano-chat"], "one of the zoo (gpt2, nanochat"),
        (["nanochat", "--preset", "huge"], "has no preset 'huge'; it has: "),
        (["line.py:build", "--preset", "tiny"], "use --set"),
        (["nanochat", "--target", "tpu:v5"], "unknown backend 'tpu'"),
        (["nanochat", "--target", "cpu:pentium"], "unknown cpu target 'pentium'"),
        (["nanochat", "--target", "cpu:host:aarch64"], "for another one take baseline"),
        (["nanochat", "--preset", "tiny", "--step", "learnin_rate=1"], "unknown field `learnin_rate`"),
    ],
)
def test_what_cannot_be_compiled_is_named(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["compile", *arguments, f"--cache={tmp_path}"]) == 2
    assert says in said(capsys)


def test_targets_as_people_write_them() -> None:
    here = "x86_64-12ab"
    assert parse_target("cpu", here) == parse_target("cpu:host", here) == Target("cpu", "host", here)
    assert parse_target("cpu:baseline", here) == Target("cpu", "baseline", "x86_64")
    assert parse_target("cpu:baseline:aarch64", here) == Target("cpu", "baseline", "aarch64")
    assert parse_target("cuda", here) == Target("cuda", "sm_80")
    assert parse_target("hip:gfx1100", here) == Target("hip", "gfx1100")
    assert parse_target("vulkan", here) == Target("vulkan", "baseline")
    assert parse_target("pjrt:cuda", here) == Target("pjrt:cuda", "stablehlo")
    for wrong in ("", "pjrt", "pjrt:tpu", "cuda:sm_80:x", "cpu:x86-64-v9"):
        with pytest.raises(UserError):
            parse_target(wrong, here)


@pytest.mark.compiles
def test_compile_writes_a_verified_artifact(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, cache = tmp_path / "step.vmfb", f"--cache={tmp_path / 'cache'}"
    command = ["compile", source, "--step", "optimizer=sgd", cache, "-o", str(output)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "3 parameters" in shown
    assert "cpu:host" in shown
    assert "agrees with XLA" in shown
    label = read_label(output.read_bytes())
    assert (label.backend, label.target) == ("cpu", "host")
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["cached"]
    assert answer["digest"] == hashlib.sha256(output.read_bytes()).hexdigest()
    assert answer["stablehlo_digest"] == label.stablehlo


@pytest.mark.compiles
def test_the_artifact_for_xla_is_the_stablehlo_itself(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "step.mlirbc"
    command = ["compile", source, "--target=pjrt:cuda", f"--cache={tmp_path / 'cache'}", "-o", str(output)]
    assert main(command) == 0
    assert "stands in" in capsys.readouterr().out
    assert output.read_bytes().startswith(b"ML\xefR")


@pytest.mark.compiles
def test_compile_says_what_recomputation_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["n_layer=4", "n_embd=16", "n_head=2", "vocab_size=32", "sequence_length=32", "batch_size=4"]
    settings = [part for size in sizes for part in ("--set", size)]
    command = ["compile", "nanochat", *settings, "--step", "remat=blocks", "--target=pjrt:cpu", f"--cache={tmp_path}"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["remat"]
    assert 2 * found["bytes_after"] < found["bytes_before"]
    assert found["xla_after"] < found["xla_before"]
    assert found["segments"] > 2
