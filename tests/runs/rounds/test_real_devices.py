"""The device tier (`make device-test`): step, parity, mixture and a mixed run on every device that is really here.

Prints a table at its end. A backend without a device is skipped with the reason. The step has the size of the main job;
`PLANETARY_DEVICE_PRESET=tiny` takes a small one, as software devices always do.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bad_input_support import events, gateway, node_flags, run, started, write_config

from device_case import BACKENDS, Case, missing
from planetary.artifacts.store import BlobStore
from planetary.compiler.backends.iree import compile_artifact, compile_program
from planetary.compiler.backends.targets import DEFAULT_NAMES, Target, parse_target
from planetary.compiler.check.verify import reference_digest
from planetary.compiler.frontend.export import export_model
from planetary.compiler.step.train_step import build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.step import ProgramSpec
from planetary.fleet.preparation.compile_process import compile_and_verify
from planetary.fleet.preparation.compiling import CompileTarget
from planetary.models.latent_moe_config import LatentMoeConfig
from planetary.runs.mixture.program.programs import expert_program
from planetary.runtime.host import host_features
from waiting import HANG_S

pytestmark = [pytest.mark.device, pytest.mark.timeout(900)]

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 256, "sequence_length": 16, "batch_size": 2}
MAIN = {"n_layer": 4, "n_head": 4, "n_embd": 256, "vocab_size": 256, "sequence_length": 128, "batch_size": 8}
SOFTWARE = ("vulkan",)  # where it may be one: Mesa's lavapipe takes minutes for the main job's step
PARITY_STEPS = 10
DRIFT = 1e-3
CASE = Path(__file__).parents[2] / "device_case.py"

device = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, Any]]]:
    """Rows by backend; printed when all is done."""
    rows: dict[str, dict[str, Any]] = {backend: {} for backend in BACKENDS}
    yield rows
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    columns = ("device", "model", "step_ms", "error", "peak_mib", "drift", "mixture", "mixed run")
    lines = [f"| backend | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for backend, row in rows.items():
        if why := missing(backend):
            lines.append(f"| `{backend}` | {why} |{' |' * (len(columns) - 1)}")
            continue
        cells = [row.get(column, "") for column in columns]
        said = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append(f"| `{backend}` | {' | '.join(said)} |")
    if reporter is not None:
        reporter.write_line("")
        for line in lines:
            reporter.write_line(line)


def require(backend: str) -> None:
    if why := missing(backend):
        pytest.skip(why)


def target_for(backend: str) -> Target:
    return parse_target(os.environ.get(f"PLANETARY_TARGET_{backend.upper()}", backend), host_features())


def apart(kind: str, case: Case, folder: Path) -> dict[str, Any]:
    (folder / "case.json").write_bytes(msgspec.json.encode(case))
    command = [sys.executable, str(CASE), kind, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (folder / "answer.json").exists(), ended.stderr[-3000:]
    return json.loads((folder / "answer.json").read_text())


@device
def test_the_step_agrees_with_the_reference(
    backend: str, table: dict[str, dict[str, Any]], tmp_path: Path, shared_cache: Path
) -> None:
    require(backend)
    tiny = backend in SOFTWARE or os.environ.get("PLANETARY_DEVICE_PRESET") == "tiny"
    model = export_model("planetary.models.nanochat:build", TINY if tiny else MAIN)
    step = build_train_step(model, StepOptions())
    store = BlobStore(shared_cache / "blobs")
    # The reference is made with a CPU build; what is compared with it is the device's own.
    cpu = CompileTarget("cpu", "host", host_features())
    params, buffers = model.initial("param"), model.initial("buffer")
    compile_and_verify(step.portable, step.spec, cpu, params=params, buffers=buffers, cache=shared_cache)
    artifact = compile_artifact(step, target_for(backend), store)
    reference = reference_digest(store, step.spec)
    assert reference is not None
    path = store.verified_path(store.put(artifact.data))
    case = Case(backend, str(path), spec=step.spec, reference=str(store.path(reference)))
    found = apart("step", case, tmp_path)
    table[backend] |= found | {"model": f"{step.spec.param_count / 1e6:.2g}M"}
    assert found["error"] <= 1, f"{found['worst']} is {found['error']:.3g} times the accepted error off"


@device
def test_ten_steps_stay_with_those_of_the_cpu(
    backend: str, table: dict[str, dict[str, Any]], tmp_path: Path, shared_cache: Path
) -> None:
    require(backend)
    other = "pjrt:cpu" if backend == "cpu" else "cpu"
    sizes = [f"--set={name}={value}" for name, value in TINY.items()]
    flags = [f"--backends={other},{backend}", f"--steps={PARITY_STEPS}", "--json", f"--cache={shared_cache}"]
    ended = run("parity", "nanochat", *sizes, *flags, cwd=tmp_path, deadline_s=600.0)
    assert ended.code == 0, ended.said
    drift = json.loads(ended.out)["drift"]
    table[backend]["drift"] = drift
    assert drift <= DRIFT


@device
def test_a_mixtures_functions_agree_with_xla(backend: str, table: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    require(backend)
    if backend.startswith("pjrt:"):
        pytest.skip("XLA is what mixtures are compared with")
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_kv_head": 2, "n_expert": 4, "n_active": 2, "n_latent": 8}
    config = LatentMoeConfig(**sizes, n_hidden=16, vocab_size=64, sequence_length=8, batch_size=2)
    program = expert_program(config, 2, 16, StepOptions())
    spec = ProgramSpec("latent_moe", dict(program.functions), 64, program.digest)
    artifact = compile_program(program.portable, spec, target_for(backend), BlobStore(tmp_path / "store"))
    (tmp_path / "module").write_bytes(artifact.data)
    (tmp_path / "program").write_bytes(program.portable)
    case = Case(backend, str(tmp_path / "module"), program=spec, portable=str(tmp_path / "program"))
    found = apart("mixture", case, tmp_path)
    table[backend]["mixture"] = f"{found['error']:.2g} of the tolerance"


@device
def test_a_worker_on_the_device_trains_beside_one_on_the_cpu(
    backend: str, table: dict[str, dict[str, Any]], tmp_path: Path, shared_cache: Path
) -> None:
    require(backend)
    config = write_config(tmp_path, fabric__workers=2, fabric__latency_budget_s=30.0)
    with contextlib.ExitStack() as stack:
        process, announced = stack.enter_context(gateway(config, tmp_path, shared_cache, plain=True))
        for node, one in (("beside", "cpu"), ("device", backend)):
            target = target_for(one).name
            flags = [f"--backend={one}", f"--node-name={node}", f"--state={tmp_path / node}"]
            flags += [] if one.startswith("pjrt:") else [f"--target={target or DEFAULT_NAMES[one]}"]
            manager = ["node-manager", *node_flags(announced, tmp_path, shared_cache), *flags]
            stack.enter_context(started(*manager, cwd=tmp_path, log=tmp_path / f"{node}.log"))
        assert process.wait(HANG_S) == 0, (tmp_path / "gateway.log").read_text()
    journal = events(tmp_path / "run")
    refused = [e["reason"] for e in journal if e["event"] == "worker_refused"]
    table[backend]["mixed run"] = "refused" if refused else "trains"
    assert not refused
    assert {e["worker"] for e in journal if e["event"] == "delta_accepted"} == {"beside/0", "device/0"}
