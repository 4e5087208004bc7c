"""Statistics of a model, such as running means: new values come from the loss, not from a gradient."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import export_loss, load_model
from planetary.compiler.step.train_step import StepOptions, TrainStep, build_train_step
from planetary.core.errors import CompileError, UserError
from planetary.core.trials.step import draw_trial, values_of

PARAMS = {
    "norm": {"mean": jnp.zeros(5), "var": jnp.full(5, 0.004), "scale": jnp.ones(5)},
    "w": jnp.linspace(-1, 1.5, 15).reshape(3, 5),
}
BATCH = (np.linspace(0, 2, 24, dtype=np.float32).reshape(8, 3), np.linspace(1, -1, 8, dtype=np.float32))
PLAIN = {"optimizer": "sgd", "momentum": 0.0, "clip_norm": 0.0, "weight_decay": 0.0}


def norm_loss(params: Any, x: Any, y: Any, *, train: bool) -> Any:
    hidden, norm = x @ params["w"], params["norm"]
    mean, var = (hidden.mean(0), hidden.var(0)) if train else (norm["mean"], norm["var"])
    out = jnp.tanh(norm["scale"] * (hidden - mean) / jnp.sqrt(var + 1e-5))
    loss = jnp.mean((out.sum(-1) - y) ** 2)
    if not train:
        return loss
    return loss, {"norm": {name: 0.9 * norm[name] + 0.1 * new for name, new in (("var", var), ("mean", mean))}}


def stepped(step: TrainStep, params: dict[str, np.ndarray], batch: Any) -> tuple[dict[str, np.ndarray], float]:
    """Return all parameters after a step of plain SGD at rate 1, and the loss."""
    given = [*params.values(), *(s.zeros() for s in step.spec.opt_state), np.int32(0), np.float32(1), *batch]
    kinds = [s.dtype for s in (*step.spec.params, *step.spec.opt_state)]
    found = run_reference(step.portable, "train_step", given, [*kinds, "f32", "f32"])
    return dict(zip(params, found, strict=False)), float(found[-2])


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "remat"), [(1, "none"), (2, "none"), (1, "blocks")])
def test_a_step_gives_the_statistics_of_a_plain_loop(parts: int, remat: str) -> None:
    rows = 8 // parts
    model = export_loss(norm_loss, PARAMS, tuple(array[:rows] for array in BATCH))
    step = build_train_step(model, StepOptions(**PLAIN, micro_batches=parts, remat=remat))
    assert step.spec.statistics == ("norm.mean", "norm.var")
    assert [spec.name for spec in step.spec.params] == ["norm.scale", "w", "norm.mean", "norm.var"]
    assert step.spec.param_count == 20
    found, loss = stepped(step, model.start, BATCH)

    params, losses, gradients = PARAMS, [], []
    for part in range(parts):  # the statistics pass from one micro-batch to the next
        own = [array[part * rows : (part + 1) * rows] for array in BATCH]
        (value, new), gradient = jax.value_and_grad(norm_loss, has_aux=True)(params, *own, train=True)
        params = {**params, "norm": {**params["norm"], **new["norm"]}}
        losses.append(float(value))
        gradients.append(gradient)
    assert loss == pytest.approx(sum(losses) / parts, rel=1e-6)
    for name in ("mean", "var"):
        np.testing.assert_allclose(found[f"norm.{name}"], params["norm"][name], rtol=1e-6)
    want = PARAMS["w"] - sum(gradient["w"] for gradient in gradients) / parts
    np.testing.assert_allclose(found["w"], want, rtol=1e-5, atol=1e-5)


def test_an_evaluation_uses_the_statistics(tmp_path: Path) -> None:
    export_loss(norm_loss, PARAMS, BATCH).save(tmp_path)
    model = load_model(tmp_path)
    assert model.manifest.results == ("loss", "evaluation", "norm.mean", "norm.var")
    step = build_train_step(model, StepOptions(**PLAIN))
    found = run_reference(step.portable, "eval_step", [*model.start.values(), *BATCH], ["f32"])[0]
    assert float(found) == pytest.approx(float(norm_loss(PARAMS, *BATCH, train=False)), rel=1e-5)


def test_a_trial_leaves_a_small_variance_positive() -> None:
    model = export_loss(norm_loss, PARAMS, BATCH)
    spec = build_train_step(model, StepOptions(**PLAIN)).spec
    trial = draw_trial(spec, values_of(spec, model.start), {})
    np.testing.assert_array_equal(trial.params["norm.var"], np.full(5, 0.004, np.float32))


def test_a_skipped_step_keeps_the_statistics() -> None:
    def loss(params: Any, x: Any, y: Any, *, train: bool) -> Any:
        found = norm_loss(params, x, y, train=train)
        return (found[0] * 1e38, found[1]) if train else found

    model = export_loss(loss, PARAMS, BATCH)
    step = build_train_step(model, StepOptions(**PLAIN, precision="f16"))
    found, _ = stepped(step, model.start, BATCH)
    for name, value in model.start.items():
        np.testing.assert_array_equal(found[name], value)


def returning(new: Any) -> Any:
    return lambda params, x, y: (norm_loss(params, x, y, train=False), new)


@pytest.mark.parametrize(
    ("new", "why"),
    [
        ({"norm": {"average": jnp.zeros(5)}}, "'norm.average' is none of them"),
        ({"norm": {"mean": jnp.zeros(4)}}, "'norm.mean' as float32[4], expected float32[5]"),
        ({"norm": {"mean": jnp.zeros(5, jnp.bfloat16)}}, "'norm.mean' as bfloat16[5], expected float32[5]"),
        (jnp.zeros(()), "'params' is none of them"),
    ],
)
def test_a_wrong_statistic_is_refused(new: Any, why: str) -> None:
    with pytest.raises(CompileError, match=re.escape(why)):
        export_loss(returning(new), PARAMS, BATCH)


def test_counts_and_flags_travel_as_float32() -> None:
    params = {**PARAMS, "count": jnp.array(2, jnp.int32), "seen": jnp.array(False)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        assert (params["count"].dtype, params["seen"].dtype) == (jnp.int32, jnp.bool_)
        loss = norm_loss(params, x, y, train=False) / (1 + params["count"])
        return loss, {"count": params["count"] + 3, "seen": ~params["seen"]}

    model = export_loss(loss, params, BATCH)
    step = build_train_step(model, StepOptions(**PLAIN))
    found, value = stepped(step, model.start, BATCH)
    assert (found["count"].dtype, float(found["count"]), float(found["seen"])) == (np.float32, 5.0, 1.0)
    assert value == pytest.approx(float(loss(params, *BATCH)[0]), rel=1e-5)
    averaged = {**model.start, "count": np.array(2.6, np.float32)}  # the mean of two workers
    assert stepped(step, averaged, BATCH)[1] == pytest.approx(value * 3 / 4, rel=1e-5)


def test_a_random_key_in_the_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="'rng' is a random key"):
        export_loss(returning({}), {**PARAMS, "rng": jax.random.key(0)}, BATCH)


def test_a_second_value_without_arrays_changes_nothing() -> None:
    model = export_loss(returning({}), PARAMS, BATCH)
    assert model.manifest.results == ("loss",)
    assert not model.manifest.of_role("statistic")
