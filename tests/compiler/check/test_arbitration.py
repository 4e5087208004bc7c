"""Where an artifact and XLA differ, the StableHLO interpreter says which of them is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check import verify as verification
from planetary.compiler.check.interpreter import run_interpreter
from planetary.compiler.check.reference import run_reference
from planetary.compiler.check.verification_report import VerifyReport
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import Model, export_model
from planetary.compiler.step.train_step import TrainStep, build_train_step
from planetary.core.errors import CompileError

MODEL = """
import jax.numpy as jnp
import numpy as np

def build():
    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)
    batch = np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32)
    return loss, {"w": np.ones((3, 1), np.float32)}, batch
"""
Results = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, TrainStep]:
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(MODEL)
    model = export_model(f"{path}:build")
    return model, build_train_step(model)


def verify(built: tuple[Model, TrainStep], monkeypatch: pytest.MonkeyPatch, **shift: float) -> VerifyReport:
    """Verify an artifact, with `xla` and `artifact` telling how far their parameters are from the right ones."""
    model, step = built
    right = verification.run_expected

    def run(offset: float) -> Callable[..., Results]:
        def results(train_step: TrainStep, trial: verification.Trial, run: object = None) -> Results:
            found = right(train_step, trial) if run is None else right(train_step, trial, run)  # type: ignore[arg-type]
            return found | {"w": found["w"] + np.float32(offset if run is None else 0)}

        return results

    monkeypatch.setattr(verification, "run_expected", run(shift.get("xla", 0.0)))
    monkeypatch.setattr(
        verification, "run_found", lambda spec, runner, trial: run(shift.get("artifact", 0.0))(step, trial)
    )
    return verify_artifact(
        step,
        compile_artifact(step, Target("pjrt:cpu", "stablehlo")),
        lambda artifact, spec: None,  # type: ignore[arg-type, return-value]
        params=model.initial("param"),
        buffers={},
        local=Target("cpu", "host", "here"),
    )


def test_nobody_is_asked_when_both_agree(built: tuple[Model, TrainStep], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(verification.interpreter, "run_interpreter", refuse)
    assert verify(built, monkeypatch).against == "XLA"


def test_xla_is_overruled(built: tuple[Model, TrainStep], monkeypatch: pytest.MonkeyPatch) -> None:
    report = verify(built, monkeypatch, xla=0.1)
    assert report.worst_error <= 1
    assert "agrees with the StableHLO interpreter (XLA does not: 'w' is" in report.summary


def test_a_wrong_artifact_is_refused(built: tuple[Model, TrainStep], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CompileError, match=r"'w' differs .* The StableHLO interpreter does not agree with it either"):
        verify(built, monkeypatch, artifact=0.1)
    with pytest.raises(CompileError, match="does not agree with it either"):
        verify(built, monkeypatch, artifact=0.1, xla=-0.1)


def test_a_large_step_is_refused_without_a_verdict(
    built: tuple[Model, TrainStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification.interpreter, "LARGEST_COST", 10)
    with pytest.raises(CompileError, match="too large for the StableHLO interpreter"):
        verify(built, monkeypatch, xla=0.1)


def test_the_interpreter_equals_xla(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal((3, 4)).astype(np.float32), np.arange(3, dtype=np.int64), np.array(2, np.int32)]
    with jax.enable_x64(True):
        text = jax.jit(lambda x, i, n: (x.T @ x * n, i * n)).lower(*arguments).as_text()
    found = run_interpreter(text, "main", arguments, ["f32", "i64"])
    expected = run_reference(text, "main", arguments, ["f32", "i64"])
    for have, want in zip(found, expected, strict=True):
        assert have.dtype == want.dtype
        np.testing.assert_allclose(have, want, rtol=1e-6)
    with pytest.raises(CompileError, match="of type i1"):
        run_interpreter(jax.jit(lambda x: ~x).lower(np.array([True])).as_text(), "main", [np.array([True])], ["i1"])
