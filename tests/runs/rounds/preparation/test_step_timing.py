"""A step that crashes its process, or cannot be loaded, is a failed timing with its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from planetary.core.errors import CompileError
from planetary.core.step import StepSpec
from planetary.runs.rounds.preparation.step_timing import TimingRequest, time_steps, write_values


@pytest.mark.processes
def test_what_the_process_said_last_is_the_reason(tmp_path: Path) -> None:
    artifact = tmp_path / "step.vmfb"
    artifact.write_bytes(b"no module at all")
    write_values(tmp_path, {}, {})
    spec = StepSpec(model="nothing", stablehlo_digest="", params=(), buffers=(), opt_state=(), batch=())
    with pytest.raises(CompileError, match=r"the process that runs the step .*label"):
        asyncio.run(time_steps(tmp_path, TimingRequest(str(artifact), spec, "cpu", 1, 2)))
