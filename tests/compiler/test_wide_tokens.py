"""Models with tokens and targets of several integer types compute the same, for tables as large as the type allows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check.reference import run_reference
from planetary.compiler.check.verify import make_trial, run_expected, run_found, verify_artifact
from planetary.compiler.frontend.export import Model, load_model
from planetary.compiler.frontend.manifest import manifest_from_json
from planetary.compiler.step.train_step import TrainStep, build_train_step
from planetary.core.configuration.step_options import StepOptions
from planetary.core.errors import UserError
from planetary.core.tensors import host_dtype, stablehlo_dtype
from planetary.runtime.executor import StepExecutor, open_executor
from planetary.runtime.host import host_features
from token_models import text_model

PAIRS = [("int64", "int64"), ("uint16", "uint16"), ("uint32", "int64"), ("int32", "uint16")]
"""Types of inputs and targets."""
QUICK = [(PAIRS[0], 1), (PAIRS[1], 2)]
"""Pairs and numbers of micro-batches that `make test` tries."""


def model(folder: Path, inputs: str, targets: str, *, vocab: int = 256) -> Model:
    path = folder / f"{inputs}-{targets}.mlir"
    path.write_text(text_model(inputs, targets, vocab=vocab))
    return load_model(path)


def losses(step: TrainStep, made: Model, highest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    batch = [rng.integers(0, highest, spec.shape).astype(host_dtype(spec.dtype)) for spec in step.spec.batch]
    arguments = [*made.initial("param").values(), *batch]
    return run_reference(step.portable, "eval_step", arguments, ["f32"])


@pytest.mark.parametrize(
    ("inputs", "targets", "micro_batches"),
    [
        pytest.param(*pair, count, marks=() if (pair, count) in QUICK else pytest.mark.slow)
        for pair in PAIRS
        for count in (1, 2)
    ],
)
def test_a_step_computes_the_same_with_every_token_type(
    inputs: str, targets: str, micro_batches: int, tmp_path: Path
) -> None:
    plain = build_train_step(model(tmp_path, "int32", "int32"), StepOptions(micro_batches=micro_batches))
    made = model(tmp_path, inputs, targets)
    assert [a.dtype for a in made.manifest.arguments[-2:]] == [stablehlo_dtype(k) for k in (inputs, targets)]
    step = build_train_step(made, StepOptions(micro_batches=micro_batches))
    fed = {"i64": "i32"}  # some devices have no 64-bit integers, and no token needs them
    kinds_of_tokens = [stablehlo_dtype(kind) for kind in (inputs, targets)]
    assert [spec.dtype for spec in step.spec.batch] == [fed.get(kind, kind) for kind in kinds_of_tokens]
    assert losses(step, made, 100) == losses(plain, made, 100)
    trial = make_trial(plain.spec, made.initial("param"), {})
    kinds = [host_dtype(spec.dtype) for spec in step.spec.batch]
    converted = msgspec.structs.replace(trial, batch=[a.astype(k) for a, k in zip(trial.batch, kinds, strict=True)])
    expected, found = run_expected(plain, trial), run_expected(step, converted)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("inputs", ["uint16", "uint32", "int64"])
def test_tables_as_large_as_the_tokens_type_are_looked_up(inputs: str, tmp_path: Path) -> None:
    """Above 2^15, a compiler that takes ui16 for i16 would find row 0."""
    vocab = 40_000
    made = model(tmp_path, inputs, inputs, vocab=vocab)
    step, plain = build_train_step(made), build_train_step(model(tmp_path, "int32", "int32", vocab=vocab))
    assert losses(step, made, vocab) == losses(plain, made, vocab)


@pytest.mark.compiles
@pytest.mark.parametrize(("inputs", "targets"), [("int64", "int64"), ("uint16", "uint32")])
def test_iree_computes_the_same_with_every_token_type(inputs: str, targets: str, tmp_path: Path) -> None:
    vocab = 40_000
    made = model(tmp_path, inputs, targets, vocab=vocab)
    step = build_train_step(made)
    local = Target("cpu", "host", host_features())
    artifact = compile_artifact(step, local)
    (tmp_path / "step.vmfb").write_bytes(artifact.data)

    def runner() -> StepExecutor:
        return open_executor(tmp_path / "step.vmfb", step.spec, backend="cpu")

    verify_artifact(step, artifact, lambda *_: runner(), params=made.initial("param"), buffers={}, local=local)
    assert step.spec.trial_bounds == (vocab, vocab)
    drawn = make_trial(step.spec, made.initial("param"), {})
    assert all(2**15 < part.max() < vocab for part in drawn.batch)  # a trial reads the whole table
    high = [np.full(spec.shape, vocab - 1 - i, host_dtype(spec.dtype)) for i, spec in enumerate(step.spec.batch)]
    trial = msgspec.structs.replace(drawn, batch=high)
    expected, found = run_expected(step, trial), run_found(step.spec, runner(), trial)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["arg0"], expected["arg0"], rtol=1e-4, atol=1e-6)


def test_a_manifest_may_spell_types_as_other_tools_do(tmp_path: Path) -> None:
    made = model(tmp_path, "uint16", "int64")
    made.save(tmp_path / "folder")
    manifest = tmp_path / "folder" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"ui16"', '"u16"').replace('"i64"', '"s64"').replace('"f32"', '"float32"'))
    assert manifest_from_json(manifest.read_bytes()) == made.manifest
    assert load_model(tmp_path / "folder").manifest == made.manifest
    manifest.write_text(text.replace('"ui16"', '"u17"'))
    with pytest.raises(UserError, match="unknown element type 'u17'"):
        load_model(tmp_path / "folder")
