"""A compiled training step from end to end: compiler, cache, check, executor. One compilation serves all."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import iree.runtime as iree
import numpy as np
import pytest

from planetary.artifacts.store import BlobStore
from planetary.compiler.backends import iree as iree_compiler
from planetary.compiler.backends.iree import Artifact, compile_artifact, run_compiler
from planetary.compiler.backends.targets import Target, compiler_flags
from planetary.compiler.check import verify as verification
from planetary.compiler.check.verification_report import VerifyReport
from planetary.compiler.check.verify import verify_artifact
from planetary.compiler.frontend.export import Model, export_model
from planetary.compiler.step.train_step import StepOptions, TrainStep, build_train_step
from planetary.core.artifact_label import read_label
from planetary.core.errors import ClosedError, CompileError, LocalProtocolError, TrustError, UserError
from planetary.core.step import StepSpec
from planetary.core.tensors import TensorSpec
from planetary.core.trials.step import TRIAL_RATE, TRIAL_STEP
from planetary.runtime.device_program import Handle, Program, WrappedProgram, open_program
from planetary.runtime.executor import StepExecutor, open_executor
from planetary.runtime.host import architecture, host_features
from planetary.runtime.iree_device import iree_version
from waiting import HANG_S

pytestmark = pytest.mark.compiles

RATE = 0.01
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}
HOST = Target("cpu", "host", host_features())


@dataclass
class Built:
    model: Model
    step: TrainStep
    artifact: Artifact
    store: BlobStore

    def executor(self) -> StepExecutor:
        made = open_executor(self.store.path(self.artifact.digest), self.step.spec, backend="cpu")
        made.load(self.model.initial("param"), self.model.initial("buffer"), None)
        return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    store = BlobStore(tmp_path_factory.mktemp("store"))
    model = export_model("planetary.models.nanochat:build", TINY)
    step = build_train_step(model, StepOptions())
    return Built(model, step, compile_artifact(step, HOST, store), store)


@pytest.fixture
def executor(built: Built) -> Iterator[StepExecutor]:
    made = built.executor()
    yield made
    made.close()


@pytest.fixture
def batch() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 32, (2, 8)).astype(np.int32) for _ in range(2)]


# --- the compiler and its cache -----------------------------------------------------------------------------


def test_the_artifact_is_cached_by_what_it_was_made_from(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not built.artifact.cached
    assert read_label(built.artifact.data).stablehlo == built.step.spec.stablehlo_digest

    def refuse(text: str, flags: list[str]) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(iree_compiler, "run_compiler", refuse)
    again = compile_artifact(built.step, HOST, built.store)
    assert again.cached
    assert again.digest == built.artifact.digest
    with pytest.raises(AssertionError, match="compiled again"):
        compile_artifact(built.step, Target("cpu", "host", "another-cpu"), built.store)
    other = build_train_step(built.model, StepOptions(beta1=0.8))
    with pytest.raises(AssertionError, match="compiled again"):
        compile_artifact(other, HOST, built.store)


def test_the_compilers_complaint_is_passed_on() -> None:
    with pytest.raises(CompileError, match=r"cannot compile.*exit status 1\)\: .*undeclared"):
        run_compiler("func.func @f() -> tensor<f32> { return %missing : tensor<f32> }", compiler_flags(HOST))


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (Target("tpu", "v5"), "unknown backend"),
        (Target("cpu", "pentium", "x86_64"), "unknown cpu target"),
        (Target("cpu", "baseline", "sparc"), "sparc"),
        (Target("cuda", "h100"), "sm_80"),
        (Target("hip", "gfx; rm"), "unknown hip target"),
    ],
)
def test_an_unknown_target_is_named(target: Target, says: str) -> None:
    with pytest.raises(UserError, match=says):
        compiler_flags(target)


def test_newer_nvidia_chips_get_the_newest_known_code() -> None:
    assert "--iree-cuda-target=sm_89" in compiler_flags(Target("cuda", "sm_90"))


# --- the executor -------------------------------------------------------------------------------------------


@pytest.mark.essential
def test_steps_are_those_of_the_reference(built: Built, executor: StepExecutor) -> None:
    trial = verification.make_trial(built.step.spec, built.model.initial("param"), {})
    expected = verification.run_expected(built.step, trial)
    executor.load(trial.params, trial.buffers, trial.opt_state)
    assert executor.eval_step(trial.batch) == pytest.approx(float(expected["eval_loss"]), rel=1e-5)
    loss, norm = executor.train_step(TRIAL_STEP, TRIAL_RATE, trial.batch)
    assert loss == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert norm == pytest.approx(float(expected["grad_norm"]), rel=1e-5)
    for name, value in (executor.read_params() | executor.read_opt_state()).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-7, err_msg=name)


def test_state_stays_on_the_device_and_the_loss_falls(executor: StepExecutor, batch: list[np.ndarray]) -> None:
    before = executor.eval_step(batch)
    first = executor.train_step(0, RATE, batch)
    assert first.loss == pytest.approx(before, rel=1e-6)
    *_, last = [executor.train_step(step, RATE, batch) for step in range(1, 12)]
    assert last.loss < 0.8 * first.loss
    assert int(executor.read_opt_state()["adam.count"]) == 12


def test_a_saved_state_goes_on_bit_for_bit(built: Built, executor: StepExecutor, batch: list[np.ndarray]) -> None:
    for step in range(3):
        executor.train_step(step, RATE, batch)
    params, state = executor.read_params(), executor.read_opt_state()
    expected = [executor.train_step(step, RATE, batch) for step in range(3, 6)]
    executor.load(params, {}, state)
    assert [executor.train_step(step, RATE, batch) for step in range(3, 6)] == expected


def test_what_was_read_is_a_copy(executor: StepExecutor, batch: list[np.ndarray]) -> None:
    params = executor.read_params()
    kept = {name: value.copy() for name, value in params.items()}
    executor.train_step(0, RATE, batch)
    for name, value in params.items():
        np.testing.assert_array_equal(value, kept[name])
    into = {name: np.empty_like(value) for name, value in params.items()}
    found = executor.read_params(into)
    assert all(found[name] is into[name] for name in into)
    assert any((into[name] != kept[name]).any() for name in into)


def test_what_was_loaded_is_not_written_to(built: Built, executor: StepExecutor, batch: list[np.ndarray]) -> None:
    params = {name: value.copy() for name, value in built.model.initial("param").items()}
    executor.set_params(params)
    executor.train_step(0, RATE, batch)
    for name, value in built.model.initial("param").items():
        np.testing.assert_array_equal(params[name], value)


def test_new_parameters_keep_the_optimizer_state_until_reset(
    built: Built, executor: StepExecutor, batch: list[np.ndarray]
) -> None:
    executor.train_step(0, RATE, batch)
    executor.set_params(built.model.initial("param"))
    assert int(executor.read_opt_state()["adam.count"]) == 1
    executor.reset_opt_state()
    assert all(not value.any() for value in executor.read_opt_state().values())


def test_other_threads_go_on_during_a_step(
    executor: StepExecutor, batch: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a switch interval longer than the test, this thread counts only if the binding lets it in."""
    beats, seen = 0, []
    original = iree.VmContext.invoke

    def watched(context: iree.VmContext, *arguments: Any) -> None:
        before = beats
        for _ in range(1000):  # one step may be over before the other thread has woken up
            before = beats
            original(context, *arguments)
            if beats > before:
                break
        seen.append(beats > before)

    monkeypatch.setattr(iree.VmContext, "invoke", watched)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(30)
    thread = threading.Thread(target=executor.eval_step, args=(batch,))
    try:
        thread.start()
        while not seen:
            beats += 1
            if beats % 1000 == 0:
                thread.join(0.001)  # lets the other thread go on
    finally:
        sys.setswitchinterval(interval)
        thread.join(HANG_S)
    assert seen == [True]


def test_misuse_is_named(built: Built, batch: list[np.ndarray]) -> None:
    made = open_executor(built.store.path(built.artifact.digest), built.step.spec, backend="cpu")
    with pytest.raises(LocalProtocolError, match="before `load`"):
        made.eval_step(batch)
    params = built.model.initial("param")
    with pytest.raises(LocalProtocolError, match="missing"):
        made.load({}, {}, None)
    with pytest.raises(LocalProtocolError, match="'embedding' must be"):
        made.load(params | {"embedding": np.zeros(3, np.float32)}, {}, None)
    made.load(params, {}, None)
    with pytest.raises(LocalProtocolError, match="2 arrays"):
        made.train_step(0, RATE, batch[:1])
    with pytest.raises(LocalProtocolError, match="'tokens' must be"):
        made.train_step(0, RATE, [batch[0].astype(np.int64), batch[1]])
    made.close()
    made.close()
    with pytest.raises(ClosedError):
        made.eval_step(batch)


def test_a_module_of_another_version_or_job_is_not_loaded(built: Built, tmp_path: Path) -> None:
    version = iree_version().encode()
    changed = built.artifact.data.replace(b'"iree":"' + version, b'"iree":"' + b"0" * len(version))
    assert changed != built.artifact.data
    (tmp_path / "skewed").write_bytes(changed)
    with pytest.raises(TrustError, match=rf"0+, this process has {iree_version()}"):
        open_executor(tmp_path / "skewed", built.step.spec, backend="cpu")
    other = build_train_step(built.model, StepOptions(beta1=0.8))
    with pytest.raises(TrustError, match="the job is about"):
        open_executor(built.store.path(built.artifact.digest), other.spec, backend="cpu")


# --- the check before publishing ----------------------------------------------------------------------------


def _verify(built: Built, artifact: Artifact, cache: BlobStore | None = None, wrong: str = "") -> VerifyReport:
    class Wrong(WrappedProgram):
        def get(self, spec: TensorSpec, handle: Handle, into: np.ndarray | None = None) -> np.ndarray:
            found = super().get(spec, handle, into)
            return found - 1e-3 * np.sign(found) if spec.name == wrong else found

    def open_runner(subject: Artifact, spec: StepSpec) -> StepExecutor:
        return StepExecutor(Wrong(open_program(subject.data, Program(b"", spec.functions), backend="cpu")), spec)

    return verify_artifact(
        built.step,
        artifact,
        open_runner,
        params=built.model.initial("param"),
        buffers={},
        local=HOST,
        cache=cache,
    )


def test_a_right_artifact_passes_once(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _verify(built, built.artifact, built.store)
    assert not report.stand_in
    assert report.checked == built.artifact.digest
    assert 0 <= report.worst_error < 0.5
    assert "agrees with XLA" in report.summary

    def refuse(*arguments: object) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(verification, "run_expected", refuse)
    assert _verify(built, built.artifact, built.store) == report


def test_wrong_artifact_is_refused_by_its_worst_tensor(built: Built) -> None:
    with pytest.raises(CompileError, match="'head' differs"):
        _verify(built, built.artifact, wrong="head")


def test_another_machines_artifact_is_checked_by_a_local_build(built: Built) -> None:
    foreign = Artifact(b"spir-v", "ab" * 32, "key", Target("vulkan", "rdna3"), cached=False)
    report = _verify(built, foreign, built.store)
    assert report.stand_in
    assert report.digest == foreign.digest
    assert report.checked == built.artifact.digest
    assert "stands in" in report.summary


def test_which_artifacts_run_here() -> None:
    assert verification.runs_here(HOST, HOST)
    assert verification.runs_here(Target("cpu", "baseline", architecture()), HOST)
    assert not verification.runs_here(Target("cpu", "host", "x86_64-other"), HOST)
    assert not verification.runs_here(Target("cpu", "baseline", "other"), HOST)
    assert not verification.runs_here(Target("cuda", "sm_80"), HOST)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_non_finite_result_is_infinitely_wrong(built: Built, poison: float) -> None:
    trial = verification.make_trial(built.step.spec, built.model.initial("param"), {})
    zeros = {t.name: t.zeros() for t in (*built.step.spec.params, *built.step.spec.opt_state)}
    good = zeros | {name: np.asarray(1, np.float32) for name in ("loss", "eval_loss", "grad_norm")}
    bad = dict(good) | {"head": np.full_like(zeros["head"], poison)}
    assert verification.compare(built.step.spec, trial, good, bad) == ("head", np.inf)
    assert verification.compare(built.step.spec, trial, good, good)[1] == 0


def test_opening_and_closing_never_waits_forever(built: Built, batch: list[np.ndarray]) -> None:
    """Destroying an IREE device right after a step used to hang in one close out of five."""

    def once() -> None:
        executor = built.executor()
        executor.train_step(0, RATE, batch)
        executor.close()

    for _ in range(30):
        thread = threading.Thread(target=once, daemon=True)
        thread.start()
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_one_thread_pool_per_process(built: Built, executor: StepExecutor) -> None:
    with pytest.raises(UserError, match="another process"):
        open_executor(built.store.path(built.artifact.digest), built.step.spec, threads=97, backend="cpu")


def test_a_device_number_counts_from_the_first(built: Built) -> None:
    """-1 would be the driver's last device."""
    with pytest.raises(UserError, match="starts at 0, found -1"):
        open_executor(built.store.path(built.artifact.digest), built.step.spec, device_id=-1, backend="cpu")
