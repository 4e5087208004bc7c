"""The training step in StableHLO against JAX and optax; no IREE here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from step_runs import CONSTANT, scalars

from planetary.compiler.autodiff.differentiate import differentiate
from planetary.compiler.check.reference import run_reference
from planetary.compiler.frontend.export import Model, export_loss, export_model
from planetary.compiler.step.step_module import replaced_arguments
from planetary.compiler.step.train_step import StepOptions, TrainStep, build_train_step
from planetary.core.errors import UserError
from planetary.core.schedules import Schedule
from planetary.models import nanochat

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "sequence_length": 8, "batch_size": 2}


@pytest.fixture(scope="module")
def model() -> Model:
    return export_model("planetary.models.nanochat:build", TINY)


@pytest.fixture(scope="module")
def case() -> tuple[Callable[..., jax.Array], Any, list[np.ndarray]]:
    return _case(TINY)


def _case(options: dict[str, int]) -> tuple[Callable[..., jax.Array], Any, list[np.ndarray]]:
    """Loss, parameters away from their special initial values, and a batch."""
    loss_fn, params, _ = nanochat.build(**options)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + 0.05 * rng.standard_normal(p.shape, np.float32), params)
    return loss_fn, params, [rng.integers(0, 32, (2, 8)).astype(np.int32) for _ in range(2)]


def _close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Largest difference relative to the largest expected element."""
    error = np.max(np.abs(found - expected)) / np.max(np.abs(expected))
    assert error <= tolerance, error


@pytest.mark.slow
def test_gradients_are_those_of_jax() -> None:
    options = TINY | {"n_layer": 2}
    model = export_model("planetary.models.nanochat:build", options)
    loss_fn, params, batch = _case(options)
    leaves = jax.tree.leaves(params)
    expected = jax.tree.leaves(jax.jit(jax.grad(loss_fn))(params, *batch))
    text = differentiate(model.text, wrt=tuple(range(len(leaves))))
    arguments = [*leaves, *batch, np.ones((), np.float32)]
    found = run_reference(text, "main", arguments, ["f32"] * len(leaves))
    for have, want in zip(found, expected, strict=True):
        _close(have, np.asarray(want))


@pytest.mark.slow
def test_gradients_are_those_of_finite_differences(model: Model, case: tuple) -> None:
    loss_fn, params, batch = case
    leaves, tree = jax.tree.flatten(params)
    text = differentiate(model.text, wrt=tuple(range(len(leaves))))
    gradients = run_reference(text, "main", [*leaves, *batch, np.ones((), np.float32)], ["f32"] * len(leaves))
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        wide = [np.asarray(leaf, np.float64) for leaf in leaves]
        jitted = jax.jit(loss_fn)
        for _ in range(3):
            way = [rng.standard_normal(leaf.shape) for leaf in wide]

            def loss_at(distance: float, way: list[np.ndarray] = way) -> float:
                moved = [leaf + distance * w for leaf, w in zip(wide, way, strict=True)]
                return float(jitted(jax.tree.unflatten(tree, moved), *batch))

            slope = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
            along = sum(float(np.sum(g.astype(np.float64) * w)) for g, w in zip(gradients, way, strict=True))
            assert along == pytest.approx(slope, rel=1e-4)


class _Run:
    """Runs `train_step` of a module with XLA, feeding its results back."""

    def __init__(self, step: TrainStep, params: list[np.ndarray], schedule: Schedule = CONSTANT) -> None:
        self.step, self.params, self.schedule = step, params, schedule
        self.state = [spec.zeros() for spec in step.spec.opt_state]

    def __call__(self, index: int, batch: list[np.ndarray]) -> tuple[float, float]:
        spec = self.step.spec
        dtypes = [tensor.dtype for tensor in (*spec.params, *spec.opt_state)] + ["f32", "f32"]
        arguments = [*self.params, *self.state, *scalars(index, self.schedule), *batch]
        results = run_reference(self.step.portable, "train_step", arguments, dtypes)
        count = len(self.params)
        self.params, self.state = results[:count], results[count:-2]
        return float(results[-2]), float(results[-1])


def _by_hand(schedule: Schedule) -> Callable[[Any], Any]:
    """The documented cosine, written again."""

    def rate(step: Any) -> Any:
        warm = jnp.minimum(1.0, (step + 1) / schedule.warmup_steps)
        progress = jnp.clip((step - schedule.warmup_steps) / (schedule.total_steps - schedule.warmup_steps), 0, 1)
        swing = 0.5 * (1 + jnp.cos(jnp.pi * progress))
        return schedule.peak * warm * (schedule.final_fraction + (1 - schedule.final_fraction) * swing)

    return rate


UNIT = 2.0**-24  # relative rounding of float32, to nearest
GRADIENT_ERROR = 32 * UNIT  # of a gradient's largest element
UPDATE_ERROR = 16 * UNIT  # relative, of what the optimizer computes from a gradient: schedule, bias, root, quotient
NORM_ERROR = 32 * UNIT  # relative, of the global norm


@pytest.mark.parametrize("clip_norm", [0.05, pytest.param(1e6, marks=pytest.mark.slow)])
def test_steps_are_those_of_optax_adamw(model: Model, case: tuple, clip_norm: float) -> None:
    """Every step, from the parameters and the state that the step before left, against optax in float64.

    A rounding of the gradient is no fixed part of Adam's update: where the gradient is small against its history, the
    quotient magnifies it. So each element may be off by as much as a gradient that is off by `GRADIENT_ERROR` makes
    it, and by the roundings of the update itself. Two executions in float32 would differ by the sum of both, which
    depends on the vector instructions of the machine.
    """
    loss_fn, params, batch = case
    leaves, tree = jax.tree.flatten(params)
    options = StepOptions(weight_decay=0.2, clip_norm=clip_norm)
    schedule = Schedule(peak=0.01, warmup_steps=2, total_steps=5)
    run = _Run(build_train_step(model, options), leaves, schedule)
    adamw = optax.adamw(_by_hand(schedule), options.beta1, options.beta2, options.epsilon, weight_decay=0.2)
    transform = optax.chain(optax.clip_by_global_norm(clip_norm), adamw)
    with jax.enable_x64(True):
        value_and_grad = jax.jit(jax.value_and_grad(loss_fn))
        update = jax.jit(transform.update)
        for index in range(4):
            before = jax.tree.unflatten(tree, [np.asarray(leaf, np.float64) for leaf in run.params])
            means, squares = (
                jax.tree.unflatten(tree, [np.asarray(leaf, np.float64) for leaf in part])
                for part in (run.state[1 : 1 + len(leaves)], run.state[1 + len(leaves) :])
            )
            state = optax.tree.set(transform.init(before), count=int(run.state[0]), mu=means, nu=squares)
            loss, gradients = value_and_grad(before, *batch)
            norm = float(optax.tree.norm(gradients))

            found_loss, found_norm = run(index, batch)

            assert found_loss == pytest.approx(float(loss), rel=1e-6)
            assert found_norm == pytest.approx(norm, rel=NORM_ERROR)
            updates, after = update(gradients, state, before)
            margins = [np.zeros(np.shape(leaf)) for leaf in leaves]
            for sign in (-1.0, 1.0):
                # Clipping divides by the norm, which hardly moves; each element is moved by itself.
                moved = jax.tree.map(lambda g, s=sign: g + s * GRADIENT_ERROR * jnp.max(jnp.abs(g)), gradients)
                shifted, _ = update(moved, state, before)
                for margin, u, v in zip(margins, jax.tree.leaves(updates), jax.tree.leaves(shifted), strict=True):
                    np.maximum(margin, np.abs(u - v), out=margin)
            moments = [*jax.tree.leaves(optax.tree.get(after, "mu")), *jax.tree.leaves(optax.tree.get(after, "nu"))]
            for have, want in zip(run.state[1:], moments, strict=True):
                _close(have, np.asarray(want), 2 * GRADIENT_ERROR)
            expected = jax.tree.leaves(optax.apply_updates(before, updates))
            for have, want, step, margin in zip(run.params, expected, jax.tree.leaves(updates), margins, strict=True):
                allowed = margin + UPDATE_ERROR * np.abs(step) + UNIT * np.abs(want)
                np.testing.assert_array_less(np.abs(have - want), allowed * (1 + 1e-9))


@pytest.mark.slow
def test_a_late_joiner_has_a_fresh_count_and_the_runs_schedule(model: Model, case: tuple) -> None:
    """At step 3 with zero state: Adam's first update, whose elements are about ± the learning rate of step
    3.
    """
    _, params, batch = case
    schedule = Schedule(peak=0.01, warmup_steps=2, total_steps=5)
    run = _Run(build_train_step(model, StepOptions(weight_decay=0.0)), jax.tree.leaves(params), schedule)
    before = run.params
    run(3, batch)
    moved = np.max([np.max(np.abs(a - b)) for a, b in zip(run.params, before, strict=True)])
    assert moved == pytest.approx(float(_by_hand(schedule)(3)), rel=1e-3)
    assert int(run.state[0]) == 1


def test_the_signature_is_the_contract(model: Model) -> None:
    step = build_train_step(model)
    spec = step.spec
    assert spec.param_count == model.param_count
    assert [t.name for t in spec.params] == [t.name for t in model.manifest.of_role("param")]
    assert [t.name for t in spec.batch] == ["tokens", "targets"]
    assert spec.opt_state[0].name == "adam.count"
    assert spec.opt_state[1].name == f"adam.mean.{spec.params[0].name}"
    assert len(spec.opt_state) == 1 + 2 * len(spec.params)
    replaced = replaced_arguments(spec)
    assert replaced == list(range(len(spec.params) + len(spec.opt_state)))  # no buffers in this model
    assert build_train_step(model).spec.stablehlo_digest == spec.stablehlo_digest  # the same bytes every time
    other = build_train_step(model, StepOptions(beta1=0.8))
    assert other.spec.stablehlo_digest != spec.stablehlo_digest


def test_step_needs_no_scatter_and_one_forward_pass(model: Model) -> None:
    text = build_train_step(model).stablehlo
    train = text[text.index("@train_step") : text.index("@eval_step")]
    assert "scatter" not in train
    assert train.count("stablehlo.tanh") == 1


@pytest.mark.slow
def test_eval_is_the_loss_and_changes_nothing(model: Model, case: tuple) -> None:
    loss_fn, params, batch = case
    step = build_train_step(model)
    found = run_reference(step.portable, "eval_step", [*jax.tree.leaves(params), *batch], ["f32"])
    assert float(found[0]) == pytest.approx(float(loss_fn(params, *batch)), rel=1e-6)


def _linear() -> Model:
    rng = np.random.default_rng(0)
    params = {
        "w": rng.standard_normal((3, 2)).astype(np.float32),
        "gain": np.ones(2, np.float32),
        "table": rng.standard_normal(3).astype(np.float32),
    }

    def loss(p: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((((x + p["table"]) @ p["w"]) * p["gain"] - y) ** 2)

    data = (np.zeros((4, 3), np.float32), np.zeros((4, 2), np.float32))
    return export_loss(loss, params, data, roles={"table": "buffer"})


def test_buffers_are_not_trained_and_vectors_do_not_decay() -> None:
    model = _linear()
    step = build_train_step(model, StepOptions(weight_decay=0.5))
    assert [t.name for t in step.spec.params] == ["gain", "w"]
    assert [t.name for t in step.spec.buffers] == ["table"]
    assert replaced_arguments(step.spec)[2:4] == [3, 4]
    params, buffers = model.initial("param"), model.initial("buffer")
    # With x = -table and y = 0 every gradient vanishes: only the decay moves anything.
    x = np.broadcast_to(-buffers["table"], (4, 3)).astype(np.float32)
    arguments = [*params.values(), *buffers.values(), *(t.zeros() for t in step.spec.opt_state)]
    arguments += [*scalars(0, Schedule(kind="constant", peak=0.1)), x, np.zeros((4, 2), np.float32)]
    dtypes = [t.dtype for t in (*step.spec.params, *step.spec.opt_state)] + ["f32", "f32"]
    gain, w = run_reference(step.portable, "train_step", arguments, dtypes)[:2]
    np.testing.assert_array_equal(gain, params["gain"])
    np.testing.assert_allclose(w, 0.95 * params["w"], rtol=1e-6)


def test_rate_is_an_argument_and_no_run_length_is_compiled_in() -> None:
    """The decay moves a matrix by the learning rate alone when gradients vanish."""
    model = _linear()
    step = build_train_step(model, StepOptions(weight_decay=1.0))
    params, buffers = model.initial("param"), model.initial("buffer")
    x = np.broadcast_to(-buffers["table"], (4, 3)).astype(np.float32)
    dtypes = [t.dtype for t in (*step.spec.params, *step.spec.opt_state)] + ["f32", "f32"]
    for total in (4, 400):
        schedule = Schedule(peak=0.1, warmup_steps=2, total_steps=total)
        for index in range(4):
            arguments = [*params.values(), *buffers.values(), *(t.zeros() for t in step.spec.opt_state)]
            arguments += [*scalars(index, schedule), x, np.zeros((4, 2), np.float32)]
            w = run_reference(step.portable, "train_step", arguments, dtypes)[1]
            np.testing.assert_allclose(1 - w / params["w"], schedule.rate(index), rtol=1e-4)


def test_a_nan_reaches_norm_and_parameters_in_spite_of_clipping(model: Model, case: tuple) -> None:
    _, params, batch = case
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(params)]
    leaves[0][0, 0] = np.nan
    run = _Run(build_train_step(model), leaves)
    loss, norm = run(0, batch)
    assert np.isnan(loss)
    assert np.isnan(norm)
    assert all(np.isnan(p).any() for p in run.params)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"beta2": 1.0}, "beta2"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"clip_norm": -1.0}, "clip_norm"),
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        build_train_step(_linear(), StepOptions(**wrong))
