"""A training step cut into stages computes the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from step_runs import mlp_batch, mlp_model, scalars

from planetary.artifacts.store import BlobStore
from planetary.compiler import ir
from planetary.compiler.backends import iree
from planetary.compiler.backends.artifact_manifest import read_manifest
from planetary.compiler.backends.targets import Target
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import export_loss
from planetary.compiler.rewrites.normalise import mark_in_place
from planetary.compiler.rewrites.stages import into_stages
from planetary.compiler.step.step_module import TrainStep, replaced_arguments
from planetary.compiler.step.train_step import build_train_step
from planetary.core.artifact_label import StagedFunction, read_label
from planetary.core.configuration.step_options import StepOptions
from planetary.runtime.executor import open_executor
from planetary.runtime.host import host_features

HOST = Target("cpu", "host", host_features())
MUON = StepOptions(optimizer="muon", adam_for=("emb*",), average_decay=0.9)


def cut(step: TrainStep) -> tuple[str, StagedFunction]:
    with ir.new_context():
        module = ir.parse_module(step.portable)
        staged = into_stages(module, "train_step", replaced_arguments(step.spec))
        ir.verify(module)
        return ir.to_text(module), staged


def called(text: str, staged: StagedFunction, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    values: dict[int, Any] = dict(enumerate(arguments))
    count = len(values)
    for stage in staged.stages:
        results = run_reference(text, stage.function, [values[i] for i in stage.arguments], ["f32"] * stage.results)
        values.update(enumerate(results, count))
        count += len(results)
        for i in stage.released:
            del values[i]
    return [values[i] for i in staged.results]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        MUON,
        StepOptions(optimizer="adafactor", precision="f16", clip_norm=0.0),
        StepOptions(precision="bf16", rounding="stochastic", micro_batches=2, remat="blocks"),
    ],
    ids=["muon", "adafactor", "adamw"],
)
def test_stages_give_the_results_of_the_whole(options: StepOptions) -> None:
    step = build_train_step(mlp_model(), options)
    spec, model = step.spec, mlp_model()
    text, staged = cut(step)
    arguments = [*model.initial("param").values(), *(s.zeros() for s in spec.opt_state), *scalars(0)]
    arguments += mlp_batch(0, 8 * options.micro_batches)
    dtypes = [s.dtype for s in spec.functions["train_step"].results]
    whole = run_reference(step.portable, "train_step", arguments, dtypes)
    for found, expected in zip(called(text, staged, arguments), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_parameters_of_a_kind_share_a_function() -> None:
    matrices = {f"w{i}": np.eye(3, dtype=np.float32) for i in range(9)}

    def loss(params: dict[str, Any], x: Any) -> Any:
        for weight in params.values():
            x = jnp.tanh(x @ weight)
        return jnp.mean(x)

    step = build_train_step(export_loss(loss, matrices, (np.ones((2, 3), np.float32),)), StepOptions())
    text, staged = cut(step)
    assert [stage.function for stage in staged.stages] == [f"train_step_{i}" for i in (0, 1, 1, 2)]  # 4 + 4 + 1
    assert text.count("func.func") == 4
    assert "@train_step(" not in text
    first, second, third, _ = staged.stages
    given = len(step.spec.functions["train_step"].arguments)
    released = {i - given for stage in staged.stages for i in stage.released}
    assert released >= set(range(first.results)[-9:])  # the gradients
    assert len(second.arguments) == len(third.arguments)


def test_a_single_number_is_not_written_over() -> None:
    text = "func.func @f(%c: tensor<i32>, %p: tensor<2xf32>) -> (tensor<i32>, tensor<2xf32>) {"
    text += " return %c, %p : tensor<i32>, tensor<2xf32> }"
    with ir.new_context():
        module = ir.parse_module(text)
        mark_in_place(ir.functions(module)["f"], [0, 1])
        assert "%arg0: tensor<i32>, %arg1: tensor<2xf32> {iree.abi.output = 1 : index}" in ir.to_text(module)


@pytest.mark.compiles
def test_iree_computes_stages_as_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp_model()
    step = build_train_step(model, MUON)
    found = []
    for most in (iree.MOST_RESULTS, 0):
        monkeypatch.setattr(iree, "MOST_RESULTS", most)
        store = BlobStore(tmp_path / str(most))
        digest = iree.compile_artifact(step, HOST, store).digest
        kept = iree.compile_artifact(step, HOST, store)
        manifest = read_manifest(store, digest)
        assert kept.cached
        assert manifest is not None
        assert manifest.spec == step.spec
        assert [function.name for function in read_label(kept.data).staged] == ["train_step"] * (not most)
        executor = open_executor(store.path(digest), step.spec, backend="cpu", threads=1)
        executor.load(model.initial("param"), {}, None)
        results = [executor.train_step(i, 0.01, mlp_batch(i)) for i in range(3)]
        loss = executor.eval_step(mlp_batch(3))
        found.append((results, loss, executor.read_params() | executor.read_opt_state()))
        executor.close()
    (whole, loss, tensors), (staged, loss_too, tensors_too) = found
    np.testing.assert_allclose([*np.ravel(staged), loss_too], [*np.ravel(whole), loss], rtol=1e-6)
    for name, expected in tensors.items():
        np.testing.assert_allclose(tensors_too[name], expected, rtol=1e-5, atol=1e-7, err_msg=name)
