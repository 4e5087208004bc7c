"""The training step on a real Vulkan device, which may be Mesa's on the CPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check import verify as verification
from planetary.compiler.frontend.export import export_model
from planetary.compiler.step.train_step import StepOptions, build_train_step
from planetary.runtime.executor import open_executor
from vulkan_device import known_to_be_wrong, missing_vulkan

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(missing_vulkan()), reason=missing_vulkan()),
]

RATE = 0.01
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}


def test_the_step_trains_on_vulkan(tmp_path: Path) -> None:
    model = export_model("planetary.models.nanochat:build", TINY)
    step = build_train_step(model, StepOptions())
    path = tmp_path / "step.vmfb"
    path.write_bytes(compile_artifact(step, Target("vulkan", "baseline")).data)
    trial = verification.make_trial(step.spec, model.initial("param"), model.initial("buffer"))

    executor = open_executor(path, step.spec, backend="vulkan")
    found = verification.run_found(step.spec, executor, trial)
    name, error = verification.compare(step.spec, trial, verification.run_expected(step, trial), found)
    if not error <= 1 and known_to_be_wrong(executor.device_name):
        pytest.skip(f"{executor.device_name} computes {name!r} {error:.3g} times the accepted error off")
    assert error < 0.5, name

    executor = open_executor(path, step.spec, backend="vulkan")
    executor.load(model.initial("param"), model.initial("buffer"), None)
    losses = [executor.train_step(i, RATE, trial.batch).loss for i in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    state = executor.read_opt_state()
    assert int(state["adam.count"]) == 8
    into = {spec.name: spec.empty() for spec in step.spec.params}
    params = executor.read_params(into)
    assert params["head"] is into["head"]
    expected = executor.train_step(8, RATE, trial.batch)
    executor.load(params, model.initial("buffer"), state)
    again = executor.train_step(8, RATE, trial.batch)
    np.testing.assert_allclose(again, expected, rtol=1e-6)
    executor.close()
