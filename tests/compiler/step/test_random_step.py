"""A loss with a random key, a step and a mode: the step's gradient is JAX's with the same key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler.backends.iree import compile_artifact
from planetary.compiler.backends.targets import Target
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import Model, export_loss, load_model
from planetary.compiler.step.train_step import StepOptions, TrainStep, build_train_step
from planetary.core.errors import CompileError, UserError
from planetary.runtime.executor import open_executor
from planetary.runtime.host import host_features

PARAMS = {"w": jnp.linspace(-1, 1, 15).reshape(3, 5), "bias": jnp.full((8, 5), 0.3)}
BATCH = (np.linspace(0, 2, 24, dtype=np.float32).reshape(8, 3), np.linspace(1, -1, 8, dtype=np.float32))
PLAIN = {"optimizer": "sgd", "momentum": 0.0, "clip_norm": 0.0, "weight_decay": 0.0}
FIXED = jax.random.key(3)


def dropout_loss(params: Any, x: Any, y: Any, *, key: Any = None, step: Any = None) -> Any:
    bias = params["bias"]
    if key is not None:
        bias = jnp.where(jax.random.bernoulli(key, 0.5, bias.shape), 2 * bias, 0.0) / (1 + step)
    return jnp.mean((jnp.tanh(x @ params["w"] + bias[: x.shape[0]]).sum(-1) - y) ** 2)


def gradients(step: TrainStep, model: Model, lease: int, number: int) -> tuple[float, dict[str, np.ndarray]]:
    """Return the loss of a step of plain SGD at rate 1, and the changes of the parameters."""
    params = model.initial("param")
    keys = step.spec.keys_of(7, lease, number)
    given = [
        *params.values(),
        *(s.zeros() for s in step.spec.opt_state),
        np.int32(number),
        np.float32(1),
        *BATCH,
        *keys,
    ]
    kinds = [s.dtype for s in (*step.spec.params, *step.spec.opt_state)]
    found = run_reference(step.portable, "train_step", given, [*kinds, "f32", "f32"])
    return float(found[-2]), {n: p - new for (n, p), new in zip(params.items(), found, strict=False)}


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "remat"), [(1, "none"), (2, "none"), (1, "blocks")])
def test_gradients_are_those_of_jax_with_the_same_key(parts: int, remat: str) -> None:
    rows = 8 // parts
    model = export_loss(dropout_loss, PARAMS, tuple(array[:rows] for array in BATCH))
    step = build_train_step(model, StepOptions(**PLAIN, micro_batches=parts, remat=remat))
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 5), 2)
    keys = [key] if parts == 1 else [jax.random.fold_in(key, part) for part in range(parts)]
    expected = [
        jax.value_and_grad(dropout_loss)(PARAMS, *(a[i * rows : (i + 1) * rows] for a in BATCH), key=k, step=2)
        for i, k in enumerate(keys)
    ]
    loss, changes = gradients(step, model, lease=5, number=2)
    assert loss == pytest.approx(float(sum(one[0] for one in expected)) / parts, rel=1e-6)
    for name, change in changes.items():
        want = np.asarray(sum(one[1][name] for one in expected)) / parts
        np.testing.assert_allclose(change, want, atol=1e-6)
        np.testing.assert_array_equal(change == 0, want == 0)  # exactly the same mask


def test_steps_and_leases_draw_distinct_repeatable_numbers() -> None:
    model = export_loss(dropout_loss, PARAMS, BATCH)
    step = build_train_step(model, StepOptions(**PLAIN))
    masks = {at: gradients(step, model, *at)[1]["bias"] == 0 for at in ((0, 0), (0, 1), (1, 0))}
    assert len({mask.tobytes() for mask in masks.values()}) == 3
    again = gradients(step, model, 0, 1)[1]["bias"] == 0
    np.testing.assert_array_equal(again, masks[0, 1])


def test_an_evaluation_has_no_key_and_no_step(tmp_path: Path) -> None:
    model = export_loss(dropout_loss, PARAMS, BATCH)
    model.save(tmp_path)
    assert load_model(tmp_path).manifest == model.manifest
    step = build_train_step(load_model(tmp_path), StepOptions(**PLAIN))
    given = [*model.initial("param").values(), *BATCH]
    expected = float(dropout_loss(PARAMS, *BATCH))
    assert float(run_reference(step.portable, "eval_step", given, ["f32"])[0]) == pytest.approx(expected, rel=1e-6)
    alone = model.evaluation
    assert [argument.role for argument in alone.manifest.arguments] == ["param", "param", "input", "target"]
    assert float(run_reference(alone.stablehlo, "main", given, ["f32"])[0]) == pytest.approx(expected, rel=1e-6)
    assert not model.notes


def needs_key(params: Any, x: Any, y: Any, *, key: Any) -> Any:
    return dropout_loss(params, x, y, key=key, step=0)


def fails_without(params: Any, x: Any, y: Any, *, key: Any = None) -> Any:
    return dropout_loss(params, x + jax.random.normal(key, x.shape), y)


@pytest.mark.parametrize(("loss", "why"), [(needs_key, "has no default"), (fails_without, "without, it fails")])
def test_an_evaluation_that_needs_a_key_has_that_of_seed_0(loss: Callable[..., Any], why: str) -> None:
    model = export_loss(loss, PARAMS, BATCH)
    assert why in model.notes[0]
    step = build_train_step(model, StepOptions(**PLAIN))
    given = [*model.initial("param").values(), *BATCH]
    expected = float(loss(PARAMS, *BATCH, key=jax.random.key(0)))
    assert float(run_reference(step.portable, "eval_step", given, ["f32"])[0]) == pytest.approx(expected, rel=1e-6)


def test_the_mode_is_true_in_training_alone() -> None:
    def loss(params: Any, x: Any, y: Any, train: bool) -> Any:
        return (2.0 if train else 1.0) * dropout_loss(params, x, y)

    model = export_loss(loss, PARAMS, BATCH)
    step = build_train_step(model, StepOptions(**PLAIN))
    assert [argument.role for argument in model.manifest.arguments] == ["param", "param", "input", "target"]
    given = [*model.initial("param").values(), *BATCH]
    evaluated = float(run_reference(step.portable, "eval_step", given, ["f32"])[0])
    assert gradients(step, model, 0, 0)[0] == pytest.approx(2 * evaluated, rel=1e-6)


def test_an_array_of_the_batch_may_be_called_key() -> None:
    model = export_loss(lambda params, x, key: dropout_loss(params, x, key), PARAMS, BATCH)
    assert [argument.role for argument in model.manifest.arguments][-2:] == ["input", "target"]


# --- numbers that are the same in every step ------------------------------------------------------------------


def masked(params: Any, x: Any, y: Any, mask: Any) -> Any:
    return dropout_loss({**params, "w": params["w"] * mask}, x, y)


def key_in_the_loss(params: Any, x: Any, y: Any) -> Any:
    return masked(params, x, y, jax.random.bernoulli(jax.random.key(0), 0.5, (3, 5)))


def key_outside(params: Any, x: Any, y: Any) -> Any:
    return masked(params, x, y, jax.random.normal(FIXED, (3, 5)))


def key_in_a_loop(params: Any, x: Any, y: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        key, total = carry
        key, own = jax.random.split(key)
        return (key, total + jax.random.normal(own, (3, 5)) * params["w"][0, 0]), None

    return masked(params, x, y, jax.lax.scan(body, (FIXED, jnp.zeros((3, 5))), None, length=2)[0][1])


def key_in_a_branch(params: Any, x: Any, y: Any) -> Any:
    return jax.lax.cond(x[0, 0] > 1, lambda: key_outside(params, x, y), lambda: dropout_loss(params, x, y))


def key_when_recomputed(params: Any, x: Any, y: Any) -> Any:
    return jax.checkpoint(lambda params: key_outside(params, x, y))(params)


@pytest.mark.parametrize(
    "loss",
    [key_in_the_loss, key_outside, key_in_a_loop, key_in_a_branch, key_when_recomputed],
    ids=lambda f: f.__name__,
)
def test_numbers_that_never_change_are_noted_with_their_line(loss: Callable[..., Any]) -> None:
    (note,) = export_loss(loss, PARAMS, BATCH).notes
    assert "random numbers that are the same in every step" in note
    assert f"{Path(__file__).name}:" in note
    assert "`key`" in note
    step = build_train_step(export_loss(loss, PARAMS, BATCH), StepOptions(**PLAIN))
    assert note in step.notes


def test_a_key_in_a_buffer_is_noted_and_one_from_data_is_not() -> None:
    def stored(params: Any, x: Any, y: Any) -> Any:
        return masked(params, x, y, jax.random.normal(jax.random.wrap_key_data(params["words"]), (3, 5)))

    def from_data(params: Any, x: Any, y: Any) -> Any:
        return masked(params, x, y, jax.random.normal(jax.random.fold_in(FIXED, x[0, 0].astype(int)), (3, 5)))

    assert export_loss(stored, {**PARAMS, "words": jnp.zeros(2, jnp.uint32)}, BATCH).notes
    assert not export_loss(from_data, PARAMS, BATCH).notes


def test_a_key_of_another_type_is_refused() -> None:
    model = export_loss(dropout_loss, PARAMS, BATCH)
    assert "key" in model.manifest.of_role("key")[0].name
    with pytest.raises(UserError, match=r"role 'key' is for one argument of type ui32\[2\]"):
        export_loss(dropout_loss, PARAMS, BATCH, roles={"x": "key"})


def test_a_loss_that_fails_with_a_key_is_named() -> None:
    def loss(params: Any, x: Any, y: Any, *, key: Any = None) -> Any:
        return dropout_loss(params, x, y) if key is None else key.no_such_thing

    with pytest.raises(CompileError, match="tracing the loss failed"):
        export_loss(loss, PARAMS, BATCH)


@pytest.mark.compiles
def test_evaluation_that_splits_a_constant_key_runs(tmp_path: Path) -> None:
    """IREE 3.13 cannot load the parts of such a key as hoisted constants (`backends.iree`)."""

    def loss_fn(params: Any, x: Any, *, key: Any = None) -> Any:
        _, drawn = jax.random.split(jax.random.key(0) if key is None else key)
        return jnp.mean((x * params["w"] - jax.random.normal(drawn, x.shape)) ** 2)

    x = np.ones((8, 64), np.float32)
    model = export_loss(loss_fn, {"w": np.ones(64, np.float32)}, (x,))
    step = build_train_step(model, StepOptions())
    (tmp_path / "step").write_bytes(compile_artifact(step, Target("cpu", "host", host_features())).data)
    executor = open_executor(tmp_path / "step", step.spec, backend="cpu")
    executor.load(model.initial("param"), {}, None)
    np.testing.assert_allclose(executor.eval_step([x]), loss_fn(model.initial("param"), x), rtol=1e-5)
    executor.close()
