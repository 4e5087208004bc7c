"""A composer's program runs on the device that was asked for, or on none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lockstep_trainer import open_on_iree
from moe_support import TINY, build, worker

from planetary.compiler.backends.targets import Target
from planetary.core.errors import CompileError, ResourceError, UserError
from planetary.core.step import ProgramSpec
from planetary.core.trials.program import make_reference
from planetary.runs.mixture.program.signature import state_specs, zeros_for
from planetary.runtime import pjrt_device
from planetary.runtime.device_check import check_program
from planetary.runtime.device_program import Program, open_program
from vulkan_device import known_to_be_wrong, missing_vulkan


def test_composer_takes_its_workers_device_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    program = worker().program
    asked: list[Any] = []
    real = pjrt_device.open_devices

    def open_devices(*wanted: Any) -> list[Any]:
        asked.append(wanted)
        return real("pjrt:cpu")

    monkeypatch.setattr(pjrt_device, "open_devices", open_devices)
    monkeypatch.setattr(
        "planetary.runtime.device_program.require_backend", lambda *_: None
    )  # the plugin need not be here
    open_program(program.portable, program, backend="pjrt:cuda", device_id=3, threads=2)
    assert asked == [("pjrt:cuda", 3, 1, 2)]


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = worker().program
    with pytest.raises(UserError, match="one device, found --island 2"):
        open_program(program.portable, program, backend="pjrt:cpu", island=2)
    monkeypatch.setattr("planetary.runtime.device_program.require_backend", lambda *_: None)
    with pytest.raises(ResourceError, match="pjrt:cuda devices"):
        open_program(program.portable, Program(b"", program.functions), backend="pjrt:cuda", device_id=63)
    with pytest.raises(UserError, match="unknown backend 'pjrt:tpu'"):
        open_program(program.portable, program, backend="pjrt:tpu")


@pytest.mark.compiles
@pytest.mark.skipif(bool(missing_vulkan()), reason=missing_vulkan())
def test_an_expert_worker_computes_on_vulkan() -> None:
    reference = worker()
    half = build(TINY, slots=2, rank=3)
    vulkan = open_on_iree(reference.program, Target("vulkan", "baseline"))
    moments = zeros_for(state_specs(reference.program))
    tensors = half.worker_inputs(0, half.gradients()) | moments | {"rate": np.array(0.01, np.float32)}
    for function in ("proxy", "gradients", "update"):
        expected, found = reference(function, tensors), vulkan(function, tensors)
        tensors |= expected
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4 * np.abs(value).max(), err_msg=name)
    program = reference.program
    spec = ProgramSpec("expert", dict(program.functions), TINY.vocab_size, program.digest)
    expected = make_reference(spec, reference, factor_rounding=2.0**-23, against="XLA")
    report = check_program(vulkan, expected, program.functions)
    assert report.worst_error < 0.1
    assert report.summary.startswith(f"verified on {vulkan.device_name}: ")


@pytest.mark.soak  # half a minute of compilation
@pytest.mark.compiles
@pytest.mark.skipif(bool(missing_vulkan()), reason=missing_vulkan())
def test_a_vulkan_driver_that_is_wrong_is_refused_as_a_composer() -> None:
    """Of its functions the gradients, in which Mesa 22.3.6 is wrong; any other driver has to be right."""
    run = build(TINY, slots=2, rank=3).run
    functions = {"gradients": run.program.functions["gradients"]}
    spec = ProgramSpec("composer", functions, TINY.vocab_size, run.program.digest)
    expected = make_reference(spec, run, factor_rounding=2.0**-23, against="XLA")
    vulkan = open_on_iree(run.program, Target("vulkan", "baseline"), ["gradients"])
    if known_to_be_wrong(vulkan.device_name):
        with pytest.raises(
            CompileError, match=r"the program is wrong on llvmpipe .* times the accepted error away from XLA"
        ):
            check_program(vulkan, expected, functions)
    else:
        assert check_program(vulkan, expected, functions).worst_error < 0.1
