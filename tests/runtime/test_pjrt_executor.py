"""The training step run by XLA: the same results, in place, and on an island of devices."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from planetary.compiler.backends import xla
from planetary.compiler.backends.iree import Artifact, compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check import verify as verification
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import Model, export_model
from planetary.compiler.step.train_step import StepOptions, TrainStep, build_train_step
from planetary.core.errors import ClosedError, CompileError, LocalProtocolError, ResourceError, TrustError, UserError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec
from planetary.core.trials.step import TRIAL_RATE, TRIAL_STEP
from planetary.runtime.backends import require_backend, runtime_version
from planetary.runtime.device_program import DeviceProgram, Handle, Program, WrappedProgram, open_program
from planetary.runtime.executor import StepExecutor, open_executor
from planetary.runtime.pjrt_program import PjrtProgram

RATE = 0.05
BATCH, LENGTH, WORDS = 8, 4, 11
MODEL = """
import jax, jax.numpy as jnp, numpy as np

def build(batch=8):
    def loss(params, x, y):
        h = jnp.tanh(params["table"][x] * params["scale"].astype(jnp.float32) + params["shift"])
        scores = jax.nn.log_softmax(h @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))
    rng = np.random.default_rng(0)
    params = {
        "table": rng.standard_normal((11, 6)).astype(np.float32),
        "scale": np.ones(6, jnp.bfloat16),
        "shift": np.zeros(6, np.float32),
    }
    data = np.zeros((batch, 4), np.int32)
    return loss, params, (data, data)
"""


@dataclass
class Built:
    model: Model
    step: TrainStep
    path: Path


def build(folder: Path) -> Built:
    source = folder / "model.py"
    source.write_text(MODEL)
    model = export_model(f"{source}:build", {}, roles={"scale": "buffer"})
    step = build_train_step(model, StepOptions())
    path = folder / "step"
    path.write_bytes(compile_artifact(step, Target("pjrt:cpu", "stablehlo")).data)
    return Built(model, step, path)


def data() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, WORDS, (BATCH, LENGTH)).astype(np.int32) for _ in range(2)]


def load(built: Built, executor: StepExecutor) -> None:
    executor.load(built.model.initial("param"), built.model.initial("buffer"), None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("pjrt"))


class SeenProgram(WrappedProgram):
    """Keeps the arrays of the last training step's parameters and optimizer state."""

    state: list[Any]

    def invoke(self, function: str, arguments: Sequence[Handle]) -> list[Handle]:
        results = super().invoke(function, arguments)
        if function == "train_step":
            self.state = results[:-2]
        return results


def opened(built: Built, island: int = 1) -> DeviceProgram:
    spec = built.step.spec
    program = Program(b"", spec.functions, split=spec.split)
    return open_program(built.path.read_bytes(), program, backend="pjrt:cpu", island=island)


@pytest.fixture(scope="module")
def compiled(built: Built) -> Iterator[StepExecutor]:
    executor = open_executor(built.path, built.step.spec, backend="pjrt:cpu")
    yield executor
    executor.close()


@pytest.fixture
def executor(built: Built, compiled: StepExecutor) -> StepExecutor:
    load(built, compiled)
    return compiled


# --- results --------------------------------------------------------------------------------------------------


def test_steps_are_those_of_the_reference(built: Built, executor: StepExecutor) -> None:
    spec = built.step.spec
    trial = verification.make_trial(spec, built.model.initial("param"), built.model.initial("buffer"))
    trial = verification.Trial(trial.params, trial.buffers, trial.opt_state, data())
    expected = verification.run_expected(built.step, trial)
    executor.load(trial.params, trial.buffers, trial.opt_state)
    assert executor.eval_step(trial.batch) == pytest.approx(float(expected["eval_loss"]), rel=1e-6)
    loss, norm = executor.train_step(TRIAL_STEP, TRIAL_RATE, trial.batch)
    assert loss == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert norm == pytest.approx(float(expected["grad_norm"]), rel=1e-5)
    for name, value in (executor.read_params() | executor.read_opt_state()).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_loss_falls_and_a_saved_state_goes_on_bit_for_bit(built: Built, executor: StepExecutor) -> None:
    losses = [executor.train_step(step, RATE, data()).loss for step in range(4)]
    params, state = executor.read_params(), executor.read_opt_state()
    expected = [executor.train_step(step, RATE, data()) for step in range(4, 8)]
    assert expected[-1].loss < 0.8 * losses[0]
    executor.load(params, built.model.initial("buffer"), state)
    assert [executor.train_step(step, RATE, data()) for step in range(4, 8)] == expected
    executor.reset_opt_state()
    assert all(not value.any() for value in executor.read_opt_state().values())


# --- memory ---------------------------------------------------------------------------------------------------


def _addresses(program: SeenProgram) -> list[int]:
    # Asking an array for its address pins its memory; a shard's own array is dropped at once.
    return [a.addressable_shards[0].data.unsafe_buffer_pointer() for a in program.state]


def test_state_is_updated_in_place_even_after_it_was_read(built: Built) -> None:
    program = SeenProgram(opened(built))
    executor = StepExecutor(program, built.step.spec)
    load(built, executor)
    executor.train_step(0, RATE, data())  # the first step moves what came from the host into memory of XLA's own
    before, old = _addresses(program), program.state
    executor.train_step(1, RATE, data())
    assert all(array.is_deleted() for array in old)
    assert _addresses(program) == before
    executor.read_params()
    executor.read_opt_state()
    executor.train_step(2, RATE, data())
    assert _addresses(program) == before


def test_what_is_read_or_loaded_is_a_copy(built: Built, executor: StepExecutor) -> None:
    given = {name: value.copy() for name, value in built.model.initial("param").items()}
    executor.set_params(given)
    executor.train_step(0, RATE, data())
    np.testing.assert_array_equal(given["table"], built.model.initial("param")["table"])
    executor.set_params(given)
    first = executor.eval_step(data())
    given["table"][:] = 0
    assert executor.eval_step(data()) == first

    found = executor.read_params()
    kept = found["table"].copy()
    executor.train_step(1, RATE, data())
    np.testing.assert_array_equal(found["table"], kept)
    into = {name: np.empty_like(value) for name, value in found.items()}
    assert executor.read_params(into)["table"] is into["table"]
    assert (into["table"] != kept).any()


def test_sixteen_and_sixty_four_bits_arrive_as_they_are() -> None:
    device = jax.devices("cpu")[0]
    bits = np.array([0x3F80, 0xC000], np.uint16)
    placed = xla.place(bits, "bf16", device)
    assert placed.dtype == "bfloat16"
    assert placed.tolist() == [1.0, -2.0]
    for dtype in (np.int64, np.float64):
        value = np.array([2**40 + 1], dtype)
        assert np.asarray(xla.place(value, "", device)).tolist() == value.tolist()


# --- what goes wrong ------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_misuse_is_named(built: Built) -> None:
    made = open_executor(built.path, built.step.spec, backend="pjrt:cpu")
    with pytest.raises(LocalProtocolError, match="before `load`"):
        made.eval_step(data())
    with pytest.raises(LocalProtocolError, match="missing"):
        made.load({}, {}, None)
    load(built, made)
    with pytest.raises(LocalProtocolError, match="2 arrays"):
        made.train_step(0, RATE, data()[:1])
    with pytest.raises(LocalProtocolError, match="must be i32"):
        made.train_step(0, RATE, [array.astype(np.int64) for array in data()])
    made.close()
    made.close()
    with pytest.raises(ClosedError):
        made.eval_step(data())


def test_an_artifact_of_another_job_is_not_loaded(built: Built, tmp_path: Path) -> None:
    changed = bytearray(built.path.read_bytes())
    changed[len(changed) // 2] ^= 1
    (tmp_path / "changed").write_bytes(changed)
    with pytest.raises(TrustError, match="nothing of it was loaded"):
        open_executor(tmp_path / "changed", built.step.spec, backend="pjrt:cpu")
    with pytest.raises(ResourceError, match="cannot read"):
        open_executor(tmp_path / "absent", built.step.spec, backend="pjrt:cpu")


def test_a_failed_step_leaves_no_half_written_state(
    built: Built, executor: StepExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(xla, "run", fail)
        with pytest.raises(ResourceError, match="train_step failed on the pjrt:cpu device: out of memory"):
            executor.train_step(0, RATE, data())
    with pytest.raises(LocalProtocolError, match="a step that failed"):
        executor.train_step(1, RATE, data())


def test_devices_that_are_not_there_are_named(built: Built) -> None:
    with pytest.raises(ResourceError, match="wants 64 pjrt:cpu devices"):
        open_executor(built.path, built.step.spec, island=64, backend="pjrt:cpu")
    with pytest.raises(UserError, match="cannot be divided among the 3 devices"):
        xla.as_main(built.step.portable, "eval_step", split=[3, 4], devices=3)
    with pytest.raises(UserError, match="unknown backend"):
        open_executor(built.path, built.step.spec, backend="pjrt:tpu")


def test_a_backend_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    require_backend("cpu")
    require_backend("pjrt:cpu", island=8)
    with pytest.raises(UserError, match="needs a PJRT backend"):
        require_backend("cuda", island=8)
    with pytest.raises(UserError, match="at least 1 device"):
        require_backend("pjrt:cpu", island=0)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "jax_cuda" in name else found(name))
    with pytest.raises(UserError, match=r"pip install 'planetary-compute\[pjrt-cuda\]'"):
        require_backend("pjrt:cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'planetary-compute\[pjrt\]'"):
        require_backend("pjrt:cpu")
    assert runtime_version("pjrt:cuda") == ""


# --- the check before publishing ------------------------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.parametrize("backend", ["pjrt:cpu", "pjrt:cuda"])
def test_its_artifact_is_checked_like_any_other(built: Built, tmp_path: Path, backend: str) -> None:
    artifact = compile_artifact(built.step, Target(backend, "stablehlo"))
    assert artifact.digest == built.step.spec.stablehlo_digest
    model = built.model

    def check(offset: float = 0.0) -> verification.VerifyReport:
        class Wrong(WrappedProgram):
            def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
                found = super().get(spec, handle, into)
                return found + np.float32(offset) if any(spec == one for one in built.step.spec.params) else found

        def open_runner(subject: Artifact, spec: StepSpec) -> StepExecutor:
            assert subject.target.backend == "pjrt:cpu"
            program = Program(b"", spec.functions)
            return StepExecutor(Wrong(open_program(subject.data, program, backend=subject.target.backend)), spec)

        return verify_artifact(
            built.step,
            artifact,
            open_runner,
            params=model.initial("param"),
            buffers=model.initial("buffer"),
            local=Target("cpu", "host", "here"),
        )

    report = check()
    assert report.stand_in == (backend == "pjrt:cuda")
    assert report.checked == artifact.digest
    assert 0 <= report.worst_error < 0.5
    with pytest.raises(CompileError, match="is wrong"):
        check(offset=1e-2)


# --- an island of devices -------------------------------------------------------------------------------------


@pytest.mark.processes
def test_an_island_of_eight_devices_takes_the_steps_of_one(tmp_path: Path) -> None:
    """In a process of its own, because XLA makes its CPU devices once."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=110, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["8", "devices", "agree"]


def _compare_island(folder: Path) -> None:
    built = build(folder)
    found = []
    for island in (1, 8):
        program = opened(built, island)
        assert isinstance(program, PjrtProgram)
        watched = SeenProgram(program)
        executor = StepExecutor(watched, built.step.spec)
        load(built, executor)
        losses = [executor.eval_step(data()), *(executor.train_step(step, RATE, data()).loss for step in range(5))]
        assert all(len(array.addressable_shards) == island for array in watched.state)
        text = program.compiled_text("train_step")
        assert ("all-reduce" in text) == (island > 1)
        assert f"s32[{BATCH // island},{LENGTH}]" in text, "the batch is not divided"
        found.append((losses, executor.read_params() | executor.read_opt_state()))
        executor.close()
    (losses, state), (island_losses, island_state) = found
    np.testing.assert_allclose(island_losses, losses, rtol=1e-6)
    for name, value in state.items():
        np.testing.assert_allclose(island_state[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    sys.stdout.write(f"{len(jax.devices())} devices agree\n")


if __name__ == "__main__":
    _compare_island(Path(sys.argv[1]))
