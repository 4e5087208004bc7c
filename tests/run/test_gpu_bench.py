"""`bench/gpu.sh` on this machine's CPU: the parts that take seconds, from the preparation to the result files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HANG_S

pytestmark = [pytest.mark.processes, pytest.mark.compiles]

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.sh"


def test_the_rehearsal_verifies_every_trial(tmp_path: Path) -> None:
    command = ["bash", str(SCRIPT), "--rehearse", "--parts", "a", "g"]
    # The script takes the `python3` of its caller's environment.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "OUT": str(tmp_path), "PATH": path}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    devices = json.loads((tmp_path / "a-devices.json").read_text())
    trials = {name: found["verified"] for name, found in devices.items() if " f32" in name or " bf16" in name}
    assert trials == {
        "pjrt:cpu f32": True,
        "pjrt:cpu f32, TF32 allowed": True,
        "pjrt:cpu bf16": True,
        "cpu f32": True,
    }
    mixture = json.loads((tmp_path / "g-mixture.json").read_text())
    assert "verified" in mixture["mixture on pjrt:cpu"]["summary"]
    peers = list(mixture["ring of two processes, numpy"].values())
    assert peers[0]["1024"]["digest"] == peers[1]["1024"]["digest"]
