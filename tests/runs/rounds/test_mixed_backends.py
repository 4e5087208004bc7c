"""Workers of different runtimes train one model together: IREE on the CPU, XLA, and Vulkan where there is a device."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from bad_input_support import events, gateway, node_flags, run, started, write_config

from planetary.artifacts.checkpoint import load_latest
from planetary.runtime.backends import CPU_BACKENDS
from vulkan_device import missing_vulkan
from waiting import HANG_S

pytestmark = [pytest.mark.processes, pytest.mark.compiles]


def test_a_mixed_run_trains_with_every_worker(tmp_path: Path, shared_cache: Path) -> None:
    backends = ["cpu", "pjrt:cpu", *([] if missing_vulkan() else ["vulkan"])]
    # The first round waits for all workers; the budget leaves time for the slowest compilation.
    config = write_config(tmp_path, fabric__workers=len(backends), fabric__latency_budget_s=30.0)
    with contextlib.ExitStack() as stack:
        process, announced = stack.enter_context(gateway(config, tmp_path, shared_cache, plain=True))
        for backend in backends:
            name = backend.replace(":", "-")
            flags = [f"--backend={backend}", f"--node-name={name}", "--latency-budget=10"]
            flags += ["--threads=1"] if backend in CPU_BACKENDS else []
            state = f"--state={tmp_path / f'state-{name}'}"
            logs = tmp_path / f"{name}.log"
            manager = ["node-manager", *node_flags(announced, tmp_path, shared_cache), *flags, state]
            stack.enter_context(started(*manager, cwd=tmp_path, log=logs))
        assert process.wait(HANG_S) == 0, (tmp_path / "gateway.log").read_text()

    journal = events(tmp_path / "run")
    joined = {e["worker"]: e["backend"] for e in journal if e["event"] == "worker_joined"}
    # A Vulkan driver that computes something else than the reference is noticed on its own device, and left out.
    refused = {e["worker"]: e for e in journal if e["event"] == "worker_refused"}
    assert sorted([*joined.values(), *(e["backend"] for e in refused.values())]) == sorted(backends)
    assert {"cpu", "pjrt:cpu"} <= set(joined.values())
    assert all("the training step is wrong on" in e["reason"] for e in refused.values())
    for event in (e for e in journal if e["event"] == "worker_joined"):
        assert event["verified"].startswith(f"verified on {event['device']}: the worst tensor")
    accepted = [e for e in journal if e["event"] == "delta_accepted"]
    assert {joined[e["worker"]] for e in accepted} == set(joined.values())
    artifacts = {e["backend"]: e for e in journal if e["event"] == "artifact_published"}
    assert set(artifacts) == set(backends)
    assert all("agrees with XLA" in e["verified"] for e in artifacts.values())
    first = [e["loss"] for e in accepted if e["round"] == 1]
    last = [e["loss"] for e in accepted if e["round"] == 3]
    assert max(last) < min(first)
    assert max(first) - min(first) < 0.1, "workers that start from the same parameters differ in their loss"
    assert load_latest(tmp_path / "run" / "checkpoints").info.round == 3
    assert journal[-1]["event"] == "run_finished"
    assert journal[-1]["ok"]


def test_a_node_without_what_its_backend_needs_says_so(tmp_path: Path) -> None:
    ended = run("node-manager", "--host=h", "--plain-loopback", "--backend=cuda", "--island=8", cwd=tmp_path)
    assert ended.code == 2
    assert "an island of 8 devices needs a PJRT backend" in ended.said
    ended = run("node-manager", "--host=h", "--plain-loopback", "--backend=pjrt:cpu", "--target=sm_80", cwd=tmp_path)
    assert ended.code == 2
    assert "--target sm_80 has no meaning for --backend pjrt:cpu" in ended.said
    ended = run("node-manager", "--host=h", "--plain-loopback", "--backend=pjrt:tpu", cwd=tmp_path)
    assert ended.code == 2
    assert "pjrt:cuda" in ended.said
    ended = run("node-manager", "--host=h", "--plain-loopback", "--backend=vulkan", "--threads=2", cwd=tmp_path)
    assert ended.code == 2
    assert "2 threads for backend 'vulkan': only CPU devices have threads" in ended.said
